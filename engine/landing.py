"""What a step computed, on its way to the host: pinned memory that it is copied into, and the wait for the copy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.plan import StepOutput
from engine.sampling.logprobs import Logprobs
from engine.sampling.sampler import Sampled


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Log-probabilities of prompt tokens. place: in the plan. count: of likeliest tokens."""

    place: int
    count: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Embeddings:
    """vectors [number, hidden] fp32. places: of their sequences, among those that sample."""

    places: tuple[int, ...]
    vectors: torch.Tensor


class Landings:
    """Places for the ids of `num_places` steps under way, taken in turns: nothing is allocated for a step's ids."""

    def __init__(self, max_num_seqs: int, num_places: int) -> None:
        self._places = [_Landing(max_num_seqs) for _ in range(num_places)]
        self._turn = 0

    def send(self, sampled: Sampled, prompts: Sequence[PromptPart], embeddings: Embeddings | None = None) -> "_Landing":
        """Have the copy made when the step is done. An engine.plan.PendingStep."""
        landing = self._places[self._turn]
        self._turn = (self._turn + 1) % len(self._places)
        landing.send(sampled, prompts, embeddings)
        return landing


class _Landing:
    def __init__(self, max_num_seqs: int) -> None:
        self._token_ids = torch.empty(max_num_seqs, dtype=torch.int64, pin_memory=True)
        self._is_copied = torch.cuda.Event()
        self._sampled = Sampled(self._token_ids[:0])
        self._prompts: list[PromptPart] = []
        self._embeddings: Embeddings | None = None

    def send(self, sampled: Sampled, prompts: Sequence[PromptPart], embeddings: Embeddings | None) -> None:
        token_ids = self._token_ids[: len(sampled.token_ids)].copy_(sampled.token_ids, non_blocking=True)
        logprobs = None if sampled.logprobs is None else _on_host(sampled.logprobs)
        self._sampled = replace(sampled, token_ids=token_ids, logprobs=logprobs)
        self._prompts = [replace(part, logprobs=_on_host(part.logprobs)) for part in prompts]
        self._embeddings = embeddings and replace(embeddings, vectors=_pinned(embeddings.vectors))
        self._is_copied.record()

    def wait(self) -> StepOutput:
        self._is_copied.synchronize()
        return output_of(self._sampled, self._prompts, self._embeddings)


def output_of(sampled: Sampled, prompts: Sequence[PromptPart], embeddings: Embeddings | None = None) -> StepOutput:
    """All of it is on the host."""
    return StepOutput(
        token_ids=tuple(sampled.token_ids.tolist()),
        logprobs=sampled.logprobs_by_row(),
        prompt_logprobs={
            part.place: tuple(part.logprobs.by_token([part.count] * len(part.logprobs.chosen))) for part in prompts
        },
        embeddings=dict(zip(embeddings.places, map(tuple, embeddings.vectors.tolist()), strict=True))
        if embeddings
        else {},
    )


def _on_host(logprobs: Logprobs) -> Logprobs:
    return Logprobs(_pinned(logprobs.chosen), _pinned(logprobs.ids), _pinned(logprobs.top))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
