"""What a parser finds in an answer's text: content, and calls as they grow."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from app.chat.types import ToolCallDelta


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class Found:
    """A piece of the answer, in the order in which it was written."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class Finds:
    """Gathers them until they are taken.

    num_calls  begun so far
    """

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._content = ""
        self._calls: list[ToolCallDelta] = []
        self.num_calls = 0

    def content(self, text: str) -> None:
        self._content += text

    def begin(self, name: str) -> None:
        self._calls.append(ToolCallDelta(index=self.num_calls, id=self._new_id(), name=name))
        self.num_calls += 1

    def arguments(self, piece: str) -> None:
        """More of the arguments of the call begun last."""
        if piece:
            self._calls.append(ToolCallDelta(index=self.num_calls - 1, arguments=piece))

    def call(self, name: str, arguments: str) -> None:
        """A whole one."""
        self.begin(name)
        self.arguments(arguments)

    def take(self) -> Found:
        found = Found(self._content, tuple(self._calls))
        self._content, self._calls = "", []
        return found
