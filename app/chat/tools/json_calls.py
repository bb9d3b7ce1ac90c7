"""Calls written as JSON objects, `{"name": ..., "arguments": {...}}`, as most formats have them somewhere inside.

The name must have come before the arguments can go out; arguments then go out as they come, letter for letter.
"""

import json
from dataclasses import dataclass

from app.chat.tools.found import Finds
from app.chat.tools.source import Source, Steps

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")

_PLAIN = frozenset("0123456789+-.eEtrufalsn:, \t\r\n")  # of JSON, outside strings


class Extent:
    """Finds where a JSON value ends. `scan` takes it piece by piece.

    is_done    it has ended
    is_broken  a character came that JSON has not
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.is_done = self.is_broken = False

    def scan(self, text: str) -> int:
        """How many of these characters belong to it."""
        for index, char in enumerate(text):
            if not self._takes(char):
                return index
            if self.is_done:
                return index + 1
        return len(text)

    def _takes(self, char: str) -> bool:
        if self._in_string:
            self._string(char)
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
            self.is_done = self._depth == 0
        elif self._depth == 0 and char in ",}]\n":
            self.is_done = True  # a number or a word, which ends where something else begins
            return False
        elif char not in _PLAIN:
            self.is_broken = True
            return False
        return True

    def _string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            self.is_done = self._depth == 0


def read_value(source: Source) -> Steps[str | None]:
    """Take one JSON value; None, with nothing taken, where there is none or it is cut."""
    extent, taken = Extent(), ""
    while True:
        taken += source.take(extent.scan(source.rest))
        if extent.is_done:
            return taken
        if extent.is_broken or not (yield from source.more()):
            source.put_back(taken)
            return None


def copy_value(source: Source, finds: Finds) -> Steps[None]:
    """Give out a JSON value as the arguments of the call begun last, as it comes; up to where it breaks."""
    extent = Extent()
    while True:
        finds.arguments(source.take(extent.scan(source.rest)))
        if extent.is_done or extent.is_broken or not (yield from source.more()):
            return


@dataclass(slots=True)
class _Call:
    """What is known of a call that is being read. `raw`: its text that has gone out in no other way."""

    raw: str = ""
    name: str | None = None
    arguments: str | None = None
    is_begun: bool = False


def read_call(source: Source, finds: Finds, names: frozenset[str] | None = None) -> Steps[bool]:
    """Read one call object, whatever the order of its keys. False, with nothing taken, if it is none. What follows the
    arguments of a call that breaks off stays.

    names  of the functions that there are; None takes any
    """
    call = _Call()
    is_whole = yield from _read_object(source, finds, call, names)
    if call.is_begun:
        if not is_whole:
            source.put_back(call.raw)
        return True
    if is_whole and call.name is not None and (names is None or call.name in names):
        finds.call(call.name, call.arguments or "{}")
        return True
    source.put_back(call.raw)
    return False


def _read_object(source: Source, finds: Finds, call: _Call, names: frozenset[str] | None) -> Steps[bool]:
    """Whether it was read to its end."""
    if not (yield from _take(source, call, "{")):
        return False
    while True:
        key = yield from _read_key(source, call)
        if key is None or not (yield from _read_member(source, finds, call, key, names)):
            return False
        call.raw += yield from source.blanks()
        if (yield from _take(source, call, "}")):
            return True
        if not (yield from _take(source, call, ",")):
            return False


def _read_key(source: Source, call: _Call) -> Steps[str | None]:
    call.raw += yield from source.blanks()
    text = (yield from read_value(source)) if (yield from source.has('"')) else None
    if text is None:
        return None
    call.raw += text + (yield from source.blanks())
    if not (yield from _take(source, call, ":")):
        return None
    call.raw += yield from source.blanks()
    key = loaded(text)
    return key if isinstance(key, str) else None


def _read_member(source: Source, finds: Finds, call: _Call, key: str, names: frozenset[str] | None) -> Steps[bool]:
    begins_object = yield from source.has("{")
    if key == "function" and begins_object:  # {"type": "function", "function": {...}}
        return (yield from _read_object(source, finds, call, names))
    if key in ARGUMENT_KEYS and begins_object and call.name is not None and not call.is_begun:
        if names is not None and call.name not in names:
            return False
        call.is_begun, call.raw = True, ""
        finds.begin(call.name)
        yield from copy_value(source, finds)
        return True
    text = yield from read_value(source)
    if text is None:
        return False
    call.raw += text
    return _note(call, key, text)


def _note(call: _Call, key: str, text: str) -> bool:
    """Keep a member that was read whole. False for one that no call has."""
    value = loaded(text)
    if key in NAME_KEYS:
        call.name = value if isinstance(value, str) else call.name
    elif key in ARGUMENT_KEYS:
        written = loaded(value) if isinstance(value, str) else value  # some write the object as a string
        if isinstance(written, dict):
            call.arguments = value if isinstance(value, str) else text
        return value in (None, "") or isinstance(written, dict)
    return True


def _take(source: Source, call: _Call, text: str) -> Steps[bool]:
    comes = yield from source.skip(text)
    if comes:
        call.raw += text
    return comes


def loaded(text: str) -> object:
    """The value of a JSON text; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
