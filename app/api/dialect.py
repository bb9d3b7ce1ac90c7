"""What a dialect of the API is to `stream`, which decides when something is sent; a dialect says what it looks like.

OpenAI's two formats live in answers.py; each further dialect has a file of its own.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol

import orjson
from pydantic_core import to_json
from starlette.responses import Response

from app.chat.types import ChatDelta, ScoredToken, Timings, ToolCall, ToolCallDelta, Usage
from app.errors import AppError

SSE_TYPE = "text/event-stream; charset=utf-8"


@dataclass(slots=True)
class Answer:
    """One whole answer: the sum of its deltas."""

    text: str = ""
    reasoning: str = ""
    logprobs: list[ScoredToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    embedding: tuple[float, ...] = ()
    _calls: list[list[ToolCallDelta]] = field(default_factory=list)
    _parts: list[list["Part"]] = field(default_factory=list)  # of each block

    def add(self, delta: ChatDelta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.logprobs += delta.logprobs
        for part in parts_of(delta):
            if not self._parts or self._parts[-1][0].block != part.block:
                self._parts.append([])
            self._parts[-1].append(part)
        self.token_ids += delta.token_ids
        self.prompt_token_ids = self.prompt_token_ids or delta.prompt_token_ids
        for call in delta.tool_calls:
            if call.index == len(self._calls):
                self._calls.append([])
            self._calls[call.index].append(call)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            self.usage, self.timings = delta.usage, delta.timings
            self.embedding = delta.embedding

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(_joined(pieces) for pieces in self._calls)

    @property
    def blocks(self) -> Iterator["Part"]:
        """One whole part each, in the order in which a stream has them."""
        for parts in self._parts:
            tokens = [token for part in parts for token in part.tokens]
            yield parts[0]._replace(text="".join(part.text for part in parts), tokens=tokens)


def _of_text(delta: ChatDelta) -> Sequence[ScoredToken]:
    """Its tokens from the beginning of its text on: before it there may be some that end the thinking."""
    tokens = [token for token in delta.logprobs if token.is_text]
    start = b"".join(token.token for token in tokens).rfind(delta.text.encode())
    ends = accumulate(len(token.token) for token in tokens)
    return tokens[sum(end <= start for end in ends) :]


def _joined(pieces: Sequence[ToolCallDelta]) -> ToolCall:
    first = pieces[0]
    arguments = "".join(piece.arguments for piece in pieces)
    return ToolCall(id=first.id or "", name=first.name or "", arguments=arguments)


class Part(NamedTuple):
    """A piece of one block of an answer: of its thinking, its text, or one of its calls.

    begins   the call's id and name, in its first piece
    tokens   of a text, where their log-probabilities were asked
    """

    kind: Literal["reasoning", "text", "call"]
    text: str
    call_index: int = 0
    begins: ToolCallDelta | None = None
    tokens: Sequence[ScoredToken] = ()

    @property
    def block(self) -> tuple[str, int]:
        """Parts of the same block have the same one."""
        return self.kind, self.call_index


def parts_of(delta: ChatDelta) -> Iterator[Part]:
    """In the order in which the model wrote them: for dialects that send an answer block by block."""
    if delta.reasoning:
        yield Part("reasoning", delta.reasoning)
    if delta.text:
        yield Part("text", delta.text, tokens=_of_text(delta))
    for call in delta.tool_calls:
        yield Part("call", call.arguments, call.index, call if call.id is not None else None)


class WholeDialect(Protocol):
    """The answers of one request on the wire, all at once. One object a request.

    choices   answers a prompt; the answers of one prompt come in a row
    """

    choices: int

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Raises AppError where they are not what was asked."""
        ...

    def refusal(self, error: AppError) -> Response:
        """The reply to a request that failed before its first byte."""
        ...


class Dialect(WholeDialect, Protocol):
    """The same as a stream too. It may keep what it has said.

    stream_type  Content-Type of a stream
    """

    stream_type: str

    def opening(self) -> Iterable[bytes]:
        """What a stream begins with: sent as soon as the request is accepted."""
        ...

    def piece(self, index: int, delta: ChatDelta) -> Iterable[bytes]:
        """One delta of answer `index`; an empty delta too must give something, as it is sent against long silence."""
        ...

    def keep_alive(self) -> bytes:
        """What says nothing, but shows that the connection lives; b"" where the dialect has no such thing."""
        ...

    def closing(self) -> Iterable[bytes]:
        """What a stream ends with, after the last piece of every answer."""
        ...

    def failure(self, error: AppError) -> Iterable[bytes]:
        """What a stream ends with instead, where it failed after its headers."""
        ...


def scored(tokens: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities, as OpenAI's two endpoints for conversations have them."""
    return [
        _scored(token.token, token.logprob)
        | {"top_logprobs": [_scored(likely, logprob) for likely, logprob in token.top]}
        for token in tokens
    ]


def _scored(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(token)}


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments as the object that some dialects want. What the model wrote may be none, where it was cut
    short: then it is kept as its very words.
    """
    try:
        read = json.loads(text or "{}")
    except ValueError:
        read = None
    return read if isinstance(read, dict) else {"arguments": text}


def sse(frame: dict[str, Any], *, event: str = "") -> bytes:
    """One server-sent event; with its name where the dialect names them."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + json_bytes(frame) + b"\n\n"


def json_bytes(value: object) -> bytes:
    """What clients and models write is given back: their numbers may have more than 64 bits."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return to_json(value, inf_nan_mode="null")
