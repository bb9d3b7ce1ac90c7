"""Text of one answer -> its channels: what the model thinks (`<think>...</think>`, or between other tags) and says.

One state machine for streams and whole answers. A tag that is not whole yet is held back; blank space around the
thinking belongs to the template's layout and goes to neither channel.
"""

from enum import Enum, auto
from typing import NamedTuple


class Tags(NamedTuple):
    """Around a model's thinking."""

    opening: str
    closing: str


THINK = Tags("<think>", "</think>")


class Piece(NamedTuple):
    reasoning: str = ""
    content: str = ""

    def __add__(self, other: object) -> "Piece":
        assert isinstance(other, Piece)
        return Piece(self.reasoning + other.reasoning, self.content + other.content)


class _State(Enum):
    BEGIN = auto()  # nothing but blanks yet: a tag may open
    THINK_BEGIN = auto()  # tag open, nothing but blanks since
    THINK = auto()
    CONTENT_BEGIN = auto()  # tag closed, nothing but blanks since
    CONTENT = auto()


class Channels:
    """opened   the prompt itself ends inside an open tag, as some templates write it"""

    def __init__(self, tags: Tags = THINK, *, opened: bool = False) -> None:
        self._tags = tags
        self._state = _State.THINK_BEGIN if opened else _State.BEGIN
        self._held = ""

    def feed(self, text: str) -> Piece:
        self._held += text
        piece = Piece()
        before = None
        while before is not self._state:  # a step that changes the state may leave work for the next one
            before = self._state
            piece += _STEPS[before](self)
        return piece

    @property
    def is_thinking(self) -> bool:
        return self._state in (_State.THINK_BEGIN, _State.THINK)

    def finish(self, *, is_cut: bool = False) -> Piece:
        """What was held back, now that nothing follows: half a tag was no tag, unless the answer was cut in it."""
        held, self._held = self._held, ""
        tag = self._tags.closing if self.is_thinking else self._tags.opening
        if is_cut:
            held = held[: len(held) - _begun(tag, held)]
        return Piece(reasoning=held) if self._state in (_State.THINK_BEGIN, _State.THINK) else Piece(content=held)

    def _begin(self) -> Piece:
        """Only an answer's very first word can open a tag: later the model may well write about one."""
        text = self._held.lstrip()
        if text.startswith(self._tags.opening):
            self._held = text[len(self._tags.opening) :]
            self._state = _State.THINK_BEGIN
        elif not self._tags.opening.startswith(text):
            self._state = _State.CONTENT
        return Piece()

    def _think_begin(self) -> Piece:
        return self._skip_blanks(_State.THINK)

    def _think(self) -> Piece:
        closing = self._tags.closing
        end = self._held.find(closing)
        if end >= 0:
            text, self._held = self._held[:end].rstrip(), self._held[end + len(closing) :]
            self._state = _State.CONTENT_BEGIN
            return Piece(reasoning=text)
        certain = self._held[: len(self._held) - _begun(closing, self._held)].rstrip()
        self._held = self._held[len(certain) :]
        return Piece(reasoning=certain)

    def _content_begin(self) -> Piece:
        return self._skip_blanks(_State.CONTENT)

    def _content(self) -> Piece:
        text, self._held = self._held, ""
        return Piece(content=text)

    def _skip_blanks(self, then: _State) -> Piece:
        self._held = self._held.lstrip()
        if self._held:
            self._state = then
        return Piece()


_STEPS = {
    _State.BEGIN: Channels._begin,
    _State.THINK_BEGIN: Channels._think_begin,
    _State.THINK: Channels._think,
    _State.CONTENT_BEGIN: Channels._content_begin,
    _State.CONTENT: Channels._content,
}


def prompt_opens_thinking(prompt: str, tags: Tags = THINK) -> bool:
    """The template wrote the opening tag, so the answer starts inside it."""
    return prompt.rstrip().endswith(tags.opening)


def prompt_has_thought(prompt: str, tags: Tags = THINK) -> bool:
    """The template wrote both tags, as it does where thinking is switched off: the answer starts after them."""
    return prompt.rstrip().endswith(tags.closing)


def text_is_thinking(text: str, tags: Tags = THINK) -> bool:
    """An answer that was begun as `text` and goes on is still inside its tag."""
    return text.lstrip().startswith(tags.opening) and tags.closing not in text


def _begun(tag: str, text: str) -> int:
    """Length of the longest end of `text` with which `tag` begins."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
