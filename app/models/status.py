"""The words for how a model is: what the page, /health, the lists and the terminal are told."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.types import EngineStats

State = Literal["empty", "loading", "ready", "failed"]
CardState = Literal["unloaded", "loading", "loaded", "failed"]

_ON_CARDS: dict[State, CardState] = {
    "empty": "unloaded",
    "loading": "loading",
    "ready": "loaded",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A snapshot of one model, cheap to take.

    model          its id; "" where there is none
    stage          what a load does now, for people
    fraction       0 to 1 of that stage; None where it cannot be known
    seconds_left   until it can answer, as far as can be told
    error          why there is no model, with the next step
    max_model_len  tokens that a request may hold; None until the model is ready
    """

    state: State = "empty"
    model: str = ""
    stage: str = ""
    fraction: float | None = None
    seconds_left: float | None = None
    error: str = ""
    max_model_len: int | None = None

    @property
    def on_card(self) -> CardState:
        return _ON_CARDS[self.state]

    @property
    def time_left(self) -> str:
        return "" if self.seconds_left is None else f"about {max(self.seconds_left, 1):.0f} s left"

    @property
    def detail(self) -> str:
        """One line for people."""
        if self.error:
            return self.error
        share = "" if self.fraction is None else f"{self.fraction:.0%}"
        known = ", ".join(filter(None, (share, self.time_left)))
        return f"{self.stage} ({known})" if known else self.stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """One line of GET /v1/models.

    format        gptq, awq, ...; None where it is not known
    architecture  known once the model is loaded
    error         why its last load failed
    """

    id: str
    created: int
    state: CardState
    max_model_len: int | None
    context_length: int | None
    aliases: tuple[str, ...] = ()
    format: str | None = None
    size_bytes: int = 0
    thinks: bool = False
    architecture: str | None = None
    error: str = ""


_SUMMED = (
    "num_requests_running",
    "num_requests_waiting",
    "num_blocks_total",
    "num_blocks_used",
    "num_blocks_cached",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "num_steps",
    "step_tokens",
)


def total_of(stats: Sequence[EngineStats]) -> EngineStats:
    """Of several engines: counts added up, times those of the one that takes longest."""
    steps = [each.steps_by_tokens for each in stats if each.steps_by_tokens]
    return replace(
        stats[0],
        **{name: sum(getattr(each, name) for each in stats) for name in _SUMMED},
        steps_by_tokens=tuple(map(sum, zip(*steps, strict=True))),
        last_step_age_s=max(each.last_step_age_s for each in stats),
        step_host_us=max(each.step_host_us for each in stats),
        load_s=max(each.load_s for each in stats),
    )
