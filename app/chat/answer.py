"""The one way from an answer's tokens to what the caller gets, for streams and whole answers alike:

    token -> bytes -> text -> stop strings -> thinking | answer -> content | tool calls -> finish reason

Each part holds back what is not certain yet, so that however the tokens come, the sum is the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

from app.chat.channels import Channels, Piece
from app.chat.detokenizer import Detokenizer
from app.chat.tools.format import ToolParser
from app.chat.tools.found import Found
from app.chat.types import FinishReason, ToolCallDelta


class Spoken(NamedTuple):
    """What is certain since the last time."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[ToolCallDelta] = ()


_NOTHING = Spoken()


class AnswerText:
    """
    text         tokens to text, up to a stop string
    channels     tells thinking from answer; None where the text is one (raw completions)
    calls        tells tool calls from content; None where there are no tools
    single_call  the answer ends with its first call
    must_call    its grammar allows calls alone: what is left of one that was cut before it began is no text
    """

    def __init__(
        self,
        text: Detokenizer,
        channels: Channels | None = None,
        calls: ToolParser | None = None,
        *,
        single_call: bool = False,
        must_call: bool = False,
    ) -> None:
        self._text = text
        self._channels = channels
        self._calls = calls
        self._single_call = single_call
        self._must_call = must_call

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was met."""
        return self._text.stopped_by

    @property
    def is_thinking(self) -> bool:
        return self._channels is not None and self._channels.is_thinking

    @property
    def is_over(self) -> bool:
        """It ends here, whatever the engine would say next."""
        return self._text.stopped_by is not None or self._has_its_call

    def feed(self, token_id: int) -> Spoken:
        return self._pass_on(self._text.feed(token_id))

    def finish(self, *, is_cut: bool = False) -> Spoken:
        """What was held back, now that nothing follows. `is_cut`: max_tokens or the context ended it."""
        if self._has_its_call:
            return _NOTHING
        spoken = self._pass_on(self._text.finish(is_cut=is_cut))
        piece = self._channels.finish(is_cut=is_cut) if self._channels else Piece()
        told = self._tell_calls(piece.content)
        found = self._calls.finish() if self._calls else Found()
        content = spoken.content + told.content + found.content
        return Spoken(
            "" if self._must_call else content,
            spoken.reasoning + piece.reasoning,
            (*spoken.calls, *self._kept(told.calls), *self._kept(found.calls)),
        )

    def finish_reason(self, *, is_cut: bool) -> FinishReason:
        """is_cut   max_tokens or the context ended it"""
        if is_cut:
            return "length"
        return "tool_calls" if self._calls and self._calls.num_calls else "stop"

    @property
    def _has_its_call(self) -> bool:
        return self._single_call and self._calls is not None and self._calls.has_ended_call

    def _pass_on(self, text: str) -> Spoken:
        if not text:
            return _NOTHING
        piece = self._channels.feed(text) if self._channels else Piece(content=text)
        if self._calls is None or not piece.content:
            return Spoken(piece.content, piece.reasoning)
        found = self._calls.feed(piece.content)
        return Spoken(found.content, piece.reasoning, self._kept(found.calls))

    def _tell_calls(self, text: str) -> Found:
        return self._calls.feed(text) if self._calls else Found(text)

    def _kept(self, calls: Sequence[ToolCallDelta]) -> Sequence[ToolCallDelta]:
        return [call for call in calls if call.index == 0] if self._single_call else calls
