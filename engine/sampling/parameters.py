"""The sampling parameters of a batch's rows as tensors on the device, grouped by what a row needs.

Made when the rows of a batch change, not each step. What no row asks for is None and costs nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from engine.checks import stop_ids
from engine.forward import on_device
from engine.plan import ScheduledSequence
from engine.sampling.penalties import Penalties
from engine.sampling.truncation import Truncation
from engine.types import SamplingParams

_GREEDY_BELOW = 1e-5  # a logit divided by less may leave fp32's range; the likeliest token has all of the mass anyway


@dataclass(frozen=True, slots=True)
class Entries:
    """Single logits: rows [n] and token_ids [n] int64, values [n] fp32 or int64."""

    rows: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Members:
    """Some rows of a batch, on the host and as an index [n] int64 on the device: to send them there takes a wait."""

    rows: tuple[int, ...]
    index: torch.Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """How torch chooses the tokens; a kernel that does it reads `kernels.choices.Choices` instead.

    num_rows     of the batch
    seeds        [rows] int64
    temperature  [rows, 1] fp32, 1 for greedy rows; None if it is 1 for all
    drawn        rows that are drawn from the whole vocabulary, int64; truncated: among the likeliest
    """

    num_rows: int
    seeds: torch.Tensor
    temperature: torch.Tensor | None
    drawn: torch.Tensor | None
    truncated: torch.Tensor | None
    truncation: Truncation | None

    @property
    def are_greedy(self) -> bool:
        return self.drawn is None and self.truncated is None


@dataclass(frozen=True, slots=True)
class Parameters:
    """
    slots        [rows] int64
    draws        None where a kernel chooses
    bias         what is added
    bans         tokens that may not come before position `values`
    allowed      rows, and what is added to their logits: 0 to the tokens that may come, -inf to others [n, vocab]
    grammars     rows with a grammar
    logprobs     rows whose log-probabilities are asked
    logprob_counts  of how many likeliest tokens each of those
    """

    slots: torch.Tensor
    draws: Draws | None
    penalties: Penalties | None
    bias: Entries | None
    bans: Entries | None
    allowed: tuple[torch.Tensor, torch.Tensor] | None
    grammars: Members | None
    logprobs: Members | None
    logprob_counts: tuple[int, ...]

    @property
    def only_chooses(self) -> bool:
        """Nothing is done to the logits, and nothing asked of them but a token."""
        asked = (self.penalties, self.bias, self.bans, self.allowed, self.grammars, self.logprobs)
        return all(part is None for part in asked)


def parameters_of(
    rows: Sequence[ScheduledSequence],
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    device: torch.device,
    *,
    with_draws: bool,
) -> Parameters:
    make = _Maker(rows, vocab_size, eos_token_ids, device)
    with_logprobs = make.where(lambda params: params.logprobs is not None)
    return Parameters(
        slots=make.ints([row.slot for row in rows]),
        draws=make.draws() if with_draws else None,
        penalties=make.penalties(make.where(has_penalties)),
        bias=make.bias(),
        bans=make.bans(),
        allowed=make.allowed(make.where(lambda params: bool(params.allowed_token_ids))),
        grammars=make.members(make.where(lambda params: params.grammar is not None)),
        logprobs=make.members(with_logprobs),
        logprob_counts=tuple(rows[i].params.logprobs or 0 for i in with_logprobs),
    )


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def choice_of(params: SamplingParams, vocab_size: int) -> tuple[tuple[float, float, float], int]:
    """A slot's row of `Choices.numbers`, and its top_k."""
    temperature = 0.0 if _is_greedy(params) else params.temperature
    log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
    return (temperature, params.top_p, log_min_p), min(params.top_k or vocab_size, vocab_size)


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _GREEDY_BELOW or params.top_k == 1


def _truncates(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1.0 or params.min_p > 0.0 or 0 < params.top_k < vocab_size


class _Maker:
    """Parameters of the rows -> tensors."""

    def __init__(
        self,
        rows: Sequence[ScheduledSequence],
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._rows = rows
        self._params = [row.params for row in rows]
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device

    def where(self, has: Callable[[SamplingParams], bool]) -> list[int]:
        return [i for i, params in enumerate(self._params) if has(params)]

    def ints(self, values: list[int]) -> torch.Tensor:
        return on_device(values, torch.int64, self._device)

    def floats(self, values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return on_device(values, dtype, self._device)

    def index(self, members: list[int]) -> torch.Tensor | None:
        return self.ints(members) if members else None

    def members(self, members: list[int]) -> Members | None:
        return Members(tuple(members), self.ints(members)) if members else None

    def draws(self) -> Draws:
        truncated = self.where(lambda params: not _is_greedy(params) and _truncates(params, self._vocab_size))
        drawn = self.where(lambda params: not (_is_greedy(params) or _truncates(params, self._vocab_size)))
        return Draws(
            num_rows=len(self._rows),
            seeds=self.ints([row.seed for row in self._rows]),
            temperature=self.temperature(),
            drawn=self.index(drawn),
            truncated=self.index(truncated),
            truncation=self.truncation(truncated) if truncated else None,
        )

    def temperature(self) -> torch.Tensor | None:
        values = [1.0 if _is_greedy(params) else params.temperature for params in self._params]
        return self.floats(values).unsqueeze(1) if set(values) != {1.0} else None

    def truncation(self, members: list[int]) -> Truncation:
        params = [self._params[i] for i in members]
        top_k = self.ints([min(p.top_k or self._vocab_size, self._vocab_size) for p in params])
        min_p = self.floats([p.min_p for p in params])
        return Truncation(
            top_k=top_k.unsqueeze(1),
            top_p=self.floats([p.top_p for p in params], torch.float64).unsqueeze(1),
            log_min_p=min_p.log().unsqueeze(1),
            most_kept=max(map(self._most_kept, params)),
        )

    def _most_kept(self, params: SamplingParams) -> int:
        """Before top_p. A probability is at most 1, so no more than 1 / min_p tokens can have min_p of it."""
        by_min_p = int(1 / params.min_p) if params.min_p > 1 / self._vocab_size else self._vocab_size
        return min(params.top_k or self._vocab_size, by_min_p, self._vocab_size)

    def penalties(self, members: list[int]) -> Penalties | None:
        if not members:
            return None
        rows = [self._rows[i] for i in members]
        return Penalties(
            rows=self.ints(members),
            slots=self.ints([row.slot for row in rows]),
            num_prompt=self.ints([row.num_prompt_tokens for row in rows]).unsqueeze(1),
            repetition=self.floats([row.params.repetition_penalty for row in rows]).unsqueeze(1),
            presence=self.floats([row.params.presence_penalty for row in rows]).unsqueeze(1),
            frequency=self.floats([row.params.frequency_penalty for row in rows]).unsqueeze(1),
        )

    def bias(self) -> Entries | None:
        entries = [(i, *entry) for i, params in enumerate(self._params) for entry in params.logit_bias.items()]
        if not entries:
            return None
        rows, token_ids, values = zip(*entries, strict=True)
        return Entries(self.ints(list(rows)), self.ints(list(token_ids)), self.floats(list(values)))

    def bans(self) -> Entries | None:
        entries = list(chain.from_iterable(self._bans_of(i, row) for i, row in enumerate(self._rows)))
        if not entries:
            return None
        rows, token_ids, until = zip(*entries, strict=True)
        return Entries(self.ints(list(rows)), self.ints(list(token_ids)), self.ints(list(until)))

    def _bans_of(self, index: int, row: ScheduledSequence) -> list[tuple[int, int, int]]:
        until = {token_id: _FOR_EVER for token_id in row.params.banned_token_ids}
        if row.params.min_tokens:
            for token_id in stop_ids(row.params, self._eos_token_ids):
                until.setdefault(token_id, row.num_prompt_tokens + row.params.min_tokens)
        return [(index, token_id, end) for token_id, end in until.items() if 0 <= token_id < self._vocab_size]

    def allowed(self, members: list[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not members:
            return None
        mask = torch.full((len(members), self._vocab_size), float("-inf"), device=self._device)
        pairs = [(n, token_id) for n, i in enumerate(members) for token_id in self._params[i].allowed_token_ids]
        rows, token_ids = zip(*pairs, strict=True)
        mask[self.ints(list(rows)), self.ints(list(token_ids))] = 0.0
        return self.ints(members), mask


_FOR_EVER = 2**62
