"""A service that says what the message tells it to, at the speed it tells: exact text for tests of the page.

"say: TEXT" answers TEXT, "think: A | TEXT" reasons first, "count: N every S as W" gives W0, W1, ... S seconds apart,
"fail: TEXT" breaks in mid-answer, "refuse: TEXT" before it, anything else is echoed. To go on with an answer adds
" and on".
"""

import asyncio
import math
import re
from collections.abc import AsyncIterator
from dataclasses import replace

from app.chat.types import ChatDelta, ChatRequest, ScoredToken, Timings, Usage
from app.errors import AppError


class ScriptedService:
    """
    piece_s    seconds before each word
    is_ready   False holds every answer back, as a model that is still loading does
    refusal    of every request
    requests   those that came
    closed     ids of answers that were closed before their end
    num_open   answers being given now
    """

    def __init__(self, *, piece_s: float = 0.0) -> None:
        self.is_ready = True
        self.refusal: AppError | None = None
        self.requests: list[ChatRequest] = []
        self.closed: list[str] = []
        self.num_open = 0
        self._piece_s = piece_s

    async def stream(self, request: ChatRequest) -> AsyncIterator[ChatDelta]:
        self.requests.append(request)
        self.num_open += 1
        num_pieces = 0
        try:
            while not self.is_ready:
                await asyncio.sleep(0.02)
            if self.refusal is not None:
                raise self.refusal
            if request.returns_prompt_ids:
                yield ChatDelta(prompt_token_ids=(1,) * sum(len(each.content.split()) for each in request.messages))
            async for delta in self._say(_script_of(request)):
                num_pieces += 1
                yield _scored(delta) if request.sampling.logprobs else delta
            yield self._end(request, num_pieces)
        except (GeneratorExit, asyncio.CancelledError):
            self.closed.append(request.request_id)
            raise
        finally:
            self.num_open -= 1

    async def _say(self, script: str) -> AsyncIterator[ChatDelta]:
        word, _, rest = script.partition(": ")
        if word == "count":
            number, _, pause, _, name = rest.split(" ")
            for index in range(int(number)):
                await asyncio.sleep(float(pause))
                yield ChatDelta(text=f"{name}{index} ")
        elif word == "refuse":
            raise AppError(400, "refused", rest)
        elif word == "fail":
            yield ChatDelta(text="It began well ")
            await asyncio.sleep(0.2)
            raise AppError(500, "broke", rest)
        elif word == "think":
            thought, _, answer = rest.partition(" | ")
            for piece in _pieces(thought):
                await asyncio.sleep(self._piece_s)
                yield ChatDelta(reasoning=piece)
            async for delta in self._say(f"say: {answer}"):
                yield delta
        else:
            for piece in _pieces(rest if word == "say" else script):
                await asyncio.sleep(self._piece_s)
                yield ChatDelta(text=piece)

    def _end(self, request: ChatRequest, num_pieces: int) -> ChatDelta:
        return ChatDelta(
            finish_reason="stop",
            usage=Usage(
                prompt_tokens=sum(len(message.content.split()) for message in request.messages),
                completion_tokens=num_pieces,
                cached_tokens=0,
            ),
            timings=Timings(
                queue_s=0.0, prefill_s=0.1, decode_s=1.0, prompt_per_second=100.0, predicted_per_second=42.5
            ),
        )


def _script_of(request: ChatRequest) -> str:
    """What the last message of the user says; an answer that is gone on with says that it is."""
    if request.continue_final_message:
        return "say:  and on"
    return request.messages[-1].content


def _scored(delta: ChatDelta) -> ChatDelta:
    """Each piece is a token of probability 1/2; its rival is "other"."""
    word, half = delta.text.encode(), math.log(0.5)
    return replace(delta, logprobs=(ScoredToken(word, True, half, ((word, half), (b"other", math.log(0.25)))),))


def _pieces(text: str) -> list[str]:
    return re.findall(r"\s*\S+\s*", text)
