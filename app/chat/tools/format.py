"""What a tool format is: how a model writes calls, how they are read, and how they are enforced. One file a format."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.chat.tools.found import Finds, Found, new_call_id
from app.chat.tools.grammar import Lark, escaped
from app.chat.tools.source import Source, Steps, first_of, live_size
from app.chat.types import ToolSpec

ToolsByName = Mapping[str, ToolSpec]


class ToolFormat(ABC):
    """
    name       in the catalogue
    starts     strings with which a call begins; they may be control tokens of the vocabulary
    at_start   calls begin with the answer, or not at all: these starts may well stand in a text
    control    further strings of the format that may be control tokens
    """

    name: str
    starts: tuple[str, ...]
    at_start: bool = False
    control: tuple[str, ...] = ()

    def claims(self, template: str) -> bool:
        """A chat template of this source makes the model write calls so."""
        return False

    @abstractmethod
    def read_calls(self, start: str, source: Source, finds: Finds, tools: ToolsByName) -> Steps[bool]:
        """Read what follows `start`, which was taken. False if no call came of it; then all that was read since was
        put back."""

    @abstractmethod
    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls, as name and arguments, in the model's way."""

    @abstractmethod
    def grammar(self, tools: Sequence[ToolSpec], lark: Lark, *, several: bool) -> str:
        """A rule's body in Lark: one call, or `several`, to `tools`."""

    def parser(self, tools: Sequence[ToolSpec], *, new_id: Callable[[], str] = new_call_id) -> "ToolParser":
        return ToolParser(self, {tool.name: tool for tool in tools}, new_id)

    def call_pattern(self) -> str:
        """A regular expression, as Lark has them, of the answers that have a call in them."""
        starts = "|".join(map(escaped, self.starts))
        return rf"[ \n]*({starts}).*" if self.at_start else f".*({starts}).*"


class ToolParser:
    """Text of one answer -> content and calls, however it is cut.

    What begins like a call and is none is content, whole. A call that was begun well and breaks off stays one: its
    arguments are what the model wrote.
    """

    def __init__(self, format: ToolFormat, tools: ToolsByName, new_id: Callable[[], str] = new_call_id) -> None:
        self._source, self._finds = Source(), Finds(new_id)
        self._format, self._tools = format, tools
        self._steps = self._read()
        self._is_done = self._has_ended_call = False
        self._go_on()

    @property
    def num_calls(self) -> int:
        """Begun so far."""
        return self._finds.num_calls

    @property
    def has_ended_call(self) -> bool:
        """One call at least is over."""
        return self.num_calls > 1 or self._has_ended_call

    def feed(self, text: str) -> Found:
        self._source.add(text)
        self._go_on()
        return self._finds.take()

    def finish(self) -> Found:
        self._source.is_over = True
        self._go_on()
        return self._finds.take()

    def _go_on(self) -> None:
        if not self._is_done:
            self._is_done = next(self._steps, self) is self

    def _read(self) -> Steps[None]:
        read = self._calls_at_the_start if self._format.at_start else self._calls_anywhere
        yield from read()
        while True:  # what follows is text
            self._finds.content(self._source.take(len(self._source.rest)))
            if not (yield from self._source.more()):
                return

    def _calls_anywhere(self) -> Steps[None]:
        while (start := (yield from self._text_before_a_start())) is not None:
            blanks = yield from self._source.blanks()
            self._source.take(len(start))
            if not (yield from self._read_calls(start)):
                self._finds.content(blanks + start)

    def _calls_at_the_start(self) -> Steps[None]:
        blanks = yield from self._source.blanks()
        for start in self._format.starts:
            if (yield from self._source.skip(start)):
                if (yield from self._read_calls(start)):
                    yield from self._drop_blanks_at_the_end()
                    return
                self._source.put_back(start)
        self._finds.content(blanks)

    def _read_calls(self, start: str) -> Steps[bool]:
        is_call = yield from self._format.read_calls(start, self._source, self._finds, self._tools)
        self._has_ended_call = self._has_ended_call or is_call
        return is_call

    def _text_before_a_start(self) -> Steps[str | None]:
        """Give out the text before the next start, but for the blanks before it: those are layout if a call follows."""
        while (found := first_of(self._source.rest, self._format.starts)) is None:
            rest = self._source.rest
            certain = rest[: len(rest) - live_size(rest, self._format.starts)].rstrip()
            self._finds.content(self._source.take(len(certain)))
            if not (yield from self._source.more()):
                if self.num_calls:
                    yield from self._drop_blanks_at_the_end()
                return None
        before = self._source.rest[: found[0]].rstrip()
        self._finds.content(self._source.take(len(before)))
        return found[1]

    def _drop_blanks_at_the_end(self) -> Steps[None]:
        blanks = yield from self._source.blanks()
        if self._source.rest:
            self._finds.content(blanks)
