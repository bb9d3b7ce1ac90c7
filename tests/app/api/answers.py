"""What tests of several routes check on replies."""

import json
from typing import Any

import httpx


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream in order; the last is the string [DONE]."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = [frame for frame in response.text.split("\n\n") if frame]
    assert all(frame.startswith(("data: ", ": ")) for frame in frames)
    data = [frame.removeprefix("data: ") for frame in frames if frame.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def named_events(response: httpx.Response) -> list[tuple[str, Any]]:
    """(event, data) of a stream whose events have names, which `type` in the data repeats."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    for frame in response.text.split("\n\n"):
        if frame:
            event, data = frame.split("\n")
            found.append((event.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Checks the shape that every error of the OpenAI dialect has."""
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] is None or isinstance(error["code"], str)
    assert_no_leak(error["message"])
    return dict(error)


def assert_no_leak(message: str) -> None:
    assert not any(leak in message for leak in ("Traceback", "site-packages", "/home", "0x"))
