"""Logits to token ids, the whole batch at once: what engine/types.py says of SamplingParams, in that order.

One uniform number decides each row: the sampled token is the first whose running sum of probability passes it. The
number comes from (seed, position) alone, and a row's own parameters decide how it is drawn, never its company's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.forward import on_device
from engine.plan import ScheduledSequence
from engine.sampling.grammar import GrammarMasks
from engine.sampling.logprobs import Logprobs, logprobs_of
from engine.sampling.parameters import Entries, Parameters, has_penalties, parameters_of
from engine.sampling.truncation import draw_truncated
from engine.sampling.uniform import uniform_numbers
from engine.sampling.vocabulary import argmax, draw
from engine.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """
    token_ids  [rows] int64
    logprobs   of the rows that ask; None if there are none
    rows       these
    counts     of how many likeliest tokens each
    """

    token_ids: torch.Tensor
    logprobs: Logprobs | None = None
    rows: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    def logprobs_by_row(self) -> dict[int, TokenLogprobs]:
        """On the host."""
        if self.logprobs is None:
            return {}
        return dict(zip(self.rows, self.logprobs.by_token(self.counts), strict=True))


class Sampler:
    """Samples for the sequences in `max_num_seqs` slots; keeps the tokens of those that penalties look at.

    `bytes_for` says how much.
    """

    def __init__(
        self, *, max_num_seqs: int, max_len: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self._vocab_size, self._eos_token_ids, self._device = vocab_size, eos_token_ids, device
        self._token_ids = torch.zeros(max_num_seqs, max_len, dtype=torch.int32, device=device)  # prompt, then answer
        self._masks = GrammarMasks(device)
        self._kept: dict[int, int] = {}  # slot -> run whose tokens are kept there
        self._rows: tuple[int, ...] = ()
        self._parameters: Parameters | None = None

    @staticmethod
    def bytes_for(max_num_seqs: int, max_len: int) -> int:
        return 4 * max_num_seqs * max_len

    def sample(self, logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> Sampled:
        """logits [rows, vocab] fp32, contiguous; they are overwritten. `rows` is not empty."""
        parameters = self._parameters_of(rows)
        positions = on_device([row.sample_position for row in rows], torch.int64, self._device)
        asked, counts = parameters.logprobs, parameters.logprob_counts
        raw = None if asked is None else logits[asked.index]
        self._adjust(logits, parameters, rows, positions)
        token_ids = _choose(logits, parameters, positions)
        if parameters.penalties is not None:
            members = parameters.penalties.rows
            self._token_ids[parameters.penalties.slots, positions[members]] = token_ids[members].int()
        if asked is None or raw is None:
            return Sampled(token_ids)
        return Sampled(token_ids, logprobs_of(raw, token_ids[asked.index], max(counts)), asked.rows, counts)

    def wants_likeliest(self, rows: Sequence[ScheduledSequence]) -> bool:
        """Whether the likeliest token of the plain logits is what every row asks for, and nothing beside it."""
        return self._parameters_of(rows).is_plain

    def _parameters_of(self, rows: Sequence[ScheduledSequence]) -> Parameters:
        runs = tuple([row.run_id for row in rows])
        if self._parameters is None or runs != self._rows:
            self._parameters = parameters_of(rows, self._vocab_size, self._eos_token_ids, self._device)
            self._rows = runs
            for row in rows:
                if has_penalties(row.params) and self._kept.get(row.slot) != row.run_id:
                    self._keep(row)
        return self._parameters

    def _keep(self, row: ScheduledSequence) -> None:
        """Take over a slot. Later tokens of this run are written as they are sampled, before the host knows them."""
        known = on_device(row.known_token_ids[: row.sample_position], torch.int32, self._device)
        assert len(known) == row.sample_position, "a run's first sampled token has predecessors that are not known"
        self._token_ids[row.slot, : len(known)] = known
        self._kept[row.slot] = row.run_id

    def _adjust(
        self,
        logits: torch.Tensor,
        parameters: Parameters,
        rows: Sequence[ScheduledSequence],
        positions: torch.Tensor,
    ) -> None:
        """All that comes before the choice, in place."""
        if parameters.bias is not None:
            logits[parameters.bias.rows, parameters.bias.token_ids] += parameters.bias.values
        if parameters.penalties is not None:
            penalties = parameters.penalties
            longest = max(row.sample_position for row in rows)
            lengths = positions[penalties.rows].unsqueeze(1)
            penalties.apply(logits, self._token_ids[penalties.slots, :longest].long(), lengths)
        if parameters.bans is not None:
            _ban(logits, parameters.bans, positions)
        if parameters.allowed is not None:
            logits.index_add_(0, *parameters.allowed)
        if parameters.grammars is not None:
            members = parameters.grammars
            self._masks.apply(logits, members.index, [rows[i].grammar for i in members.rows])
        if parameters.temperature is not None:
            logits.div_(parameters.temperature)


def _ban(logits: torch.Tensor, bans: Entries, positions: torch.Tensor) -> None:
    is_banned = positions[bans.rows] < bans.values
    at = (bans.rows, bans.token_ids)
    logits[at] = logits[at].masked_fill(is_banned, float("-inf"))


def _choose(logits: torch.Tensor, parameters: Parameters, positions: torch.Tensor) -> torch.Tensor:
    """[rows] token ids. Each kind of row on its own, without a copy of the logits where all rows are of one kind."""
    drawn, truncated, limits = parameters.drawn, parameters.truncated, parameters.truncation
    uniform = uniform_numbers(parameters.seeds, positions) if drawn is not None or truncated is not None else positions
    if drawn is not None and len(drawn) == parameters.num_rows:
        return _draw_all(logits, uniform)
    if truncated is not None and limits is not None and len(truncated) == parameters.num_rows:
        return draw_truncated(logits, limits, uniform)
    token_ids = argmax(logits)
    if drawn is not None:
        token_ids[drawn] = _draw_all(logits[drawn], uniform[drawn])
    if truncated is not None and limits is not None:
        token_ids[truncated] = draw_truncated(logits[truncated], limits, uniform[truncated])
    return token_ids


def _draw_all(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """From the whole vocabulary; overwrites the logits with weights, of which the largest is 1."""
    return draw(logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_(), uniform)
