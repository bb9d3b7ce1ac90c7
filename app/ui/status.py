"""What the page needs from the rest of the house, in its own words: who answers, and how the model in hand is.

The server hands both in (`page.mount`); the ModelManager's snapshot is translated to `ModelStatus` there.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from app.chat.types import ChatDelta, ChatRequest

ModelState = Literal["empty", "loading", "ready", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A snapshot, cheap to take: the page asks about once a second and tab.

    model_id       id in hand, or the one being loaded; "" where there is none
    stage          what a load is doing now, for people ("reading weights")
    fraction       0 to 1 of the whole load; None where it cannot be known
    seconds_left   until it can answer, as far as can be told
    error          why a load failed, with the next step
    max_model_len  tokens of context, prompt and answer together; None until it is known
    """

    model_id: str = ""
    state: ModelState = "empty"
    stage: str = ""
    fraction: float | None = None
    seconds_left: float | None = None
    error: str = ""
    max_model_len: int | None = None


StatusSource = Callable[[], ModelStatus]  # of the model in hand
StatusOf = Callable[[str], ModelStatus]  # of the model that a name means; "" the one in hand


class Answerer(Protocol):
    """The face of `app.chat.service.ChatService` that the page talks to."""

    def stream(self, request: ChatRequest) -> AsyncIterator[ChatDelta]:
        """Pieces of one answer. Closing the iterator stops the engine's work. Raises AppError or EngineError."""
        ...
