"""The socket of a tab: it is told what it watches, what it has not seen, and nothing else."""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from app.ui.live import Changes, Event, Hub, Seen, State


class Counting:
    """Tells how far it is, and what of that a tab has not heard."""

    def __init__(self) -> None:
        self.num = 0

    def news(self, topic: str, seen: Seen) -> Iterable[Event]:
        if topic.endswith("broken"):
            raise ValueError("no such thing")
        told, seen["num"] = seen.get("num", 0), self.num
        return [{"kind": "counted", "from": told, "to": self.num}] if told != self.num else []


class House:
    def __init__(self) -> None:
        self.hub = Hub()
        self.counting = Counting()
        self.changes = Changes(self.hub)
        self.state = {"warm": False}
        self.hub.add("count", self.counting)
        self.hub.add("changes", self.changes)
        self.hub.add("state", State(lambda: self.state), every_s=0.01)
        app = FastAPI()
        app.include_router(self.hub.router())
        app.add_api_route("/count", self.count)
        app.add_api_route("/change", self.change)
        self.client = TestClient(app)

    async def count(self, times: int) -> None:
        for _ in range(times):
            self.counting.num += 1
            self.hub.wake("count:1")

    async def change(self) -> None:
        self.changes.changed("changes")


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    with house.client:
        yield house


@pytest.fixture
def tab(house: House) -> Iterator[Any]:
    with house.client.websocket_connect("/ui/live") as tab:
        yield tab


def test_a_tab_hears_of_what_it_watches_from_the_beginning_and_then_only_what_is_new(house: House, tab: Any) -> None:
    house.client.get("/count?times=3")
    tab.send_json({"watch": ["count:1"]})
    assert tab.receive_json() == [{"topic": "count:1", "kind": "counted", "from": 0, "to": 3}]
    house.client.get("/count?times=1")
    assert tab.receive_json() == [{"topic": "count:1", "kind": "counted", "from": 3, "to": 4}]


def test_much_news_at_once_is_one_message(house: House, tab: Any) -> None:
    tab.send_json({"watch": ["count:1"]})
    house.client.get("/count?times=1")
    tab.receive_json()
    house.client.get("/count?times=500")
    assert tab.receive_json()[-1]["to"] == 501


def test_what_is_watched_no_more_is_told_no_more_and_starts_anew_when_watched_again(house: House, tab: Any) -> None:
    house.client.get("/count?times=2")
    tab.send_json({"watch": ["count:1"]})
    tab.receive_json()
    tab.send_json({"watch": []})
    house.client.get("/count?times=1")
    tab.send_json({"watch": ["count:1"]})
    assert tab.receive_json() == [{"topic": "count:1", "kind": "counted", "from": 0, "to": 3}]


def test_a_state_is_told_at_once_and_then_only_when_it_changes(house: House, tab: Any) -> None:
    tab.send_json({"watch": ["state"]})
    assert tab.receive_json() == [{"topic": "state", "kind": "state", "warm": False}]
    house.state = {"warm": True}
    assert tab.receive_json() == [{"topic": "state", "kind": "state", "warm": True}]


def test_a_change_is_told_and_so_is_the_beginning_since_it_may_have_been_missed(house: House, tab: Any) -> None:
    tab.send_json({"watch": ["changes"]})
    assert tab.receive_json() == [{"topic": "changes", "kind": "changed"}]
    house.client.get("/change")
    assert tab.receive_json() == [{"topic": "changes", "kind": "changed"}]


def test_a_topic_that_fails_or_is_unknown_is_told_and_silences_no_other(house: House, tab: Any) -> None:
    house.client.get("/count?times=1")
    tab.send_json({"watch": ["count:broken", "nobody", "count:1"]})
    told = {}
    while len(told) < 3:
        told |= {event["topic"]: event["kind"] for event in tab.receive_json()}
    assert told == {"count:broken": "broken", "nobody": "unknown", "count:1": "counted"}


@pytest.mark.parametrize("message", ["no json", "[]", '{"watch": 1}', "[" * 10_000, '{"watch": ["x' + "x" * 20_000])
def test_what_is_no_message_ends_the_socket(tab: Any, message: str) -> None:
    tab.send_text(message)
    with pytest.raises(WebSocketDisconnect) as ended:
        tab.receive_json()
    assert ended.value.code == 1003


def test_bytes_and_too_many_topics_end_the_socket(house: House) -> None:
    for send in (lambda tab: tab.send_bytes(b"x"), lambda tab: tab.send_json({"watch": [str(i) for i in range(65)]})):
        with house.client.websocket_connect("/ui/live") as tab:
            send(tab)
            with pytest.raises(WebSocketDisconnect):
                tab.receive_json()


def test_a_closed_tab_leaves_nothing_behind(house: House) -> None:
    with house.client.websocket_connect("/ui/live") as tab:
        tab.send_json({"watch": ["state"]})
        tab.receive_json()
        assert house.hub.watched("state")
    ended = threading.Event()
    while house.hub.watched("state"):
        ended.wait(0.01)
