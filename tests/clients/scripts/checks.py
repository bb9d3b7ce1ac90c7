"""What every script here needs: the stage's words from stdin, and a JSON line for each check. Standard library only."""

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

STAGE: dict[str, Any] = json.load(sys.stdin)

_checks: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    """A check is a function with the name of its feature."""
    _checks.append(function)
    return function


def asks(scene: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"scene:{scene}"}]


def same(got: Any, wanted: Any) -> None:
    if got != wanted:
        raise AssertionError(f"got {got!r}, not {wanted!r}")


def fails(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    try:
        call()
    except kind as error:
        if words not in str(error):
            raise AssertionError(f"it failed, but said {error}") from error
        return
    raise AssertionError("it did not fail")


def play() -> None:
    for function in _checks:
        error = None
        try:
            function()
        except Exception:
            error = traceback.format_exc()[-1500:]
        print(json.dumps({"feature": function.__name__, "error": error}), flush=True)
