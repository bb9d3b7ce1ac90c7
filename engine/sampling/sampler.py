"""Logits to token ids, the whole batch at once: what engine/types.py says of SamplingParams, in that order.

One uniform number decides each row: the sampled token is the first whose running sum of probability passes it. The
number comes from (seed, position) alone, and a row's own parameters decide how it is drawn, never its company's. On a
card one kernel makes the choice, `ops.choose_tokens`, and a captured step may hold it: `Sampler.choose`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.forward import on_device
from engine.plan import ScheduledSequence
from engine.sampling.grammar import GrammarMasks
from engine.sampling.logprobs import Logprobs, logprobs_of
from engine.sampling.parameters import Draws, Entries, Parameters, choice_of, has_penalties, parameters_of
from engine.sampling.truncation import draw_truncated
from engine.sampling.uniform import uniform_numbers
from engine.sampling.vocabulary import argmax, draw
from engine.types import TokenLogprobs
from kernels import ops
from kernels.choices import greedy_choices


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

    `engine.forecast.sampler_bytes` says how much.
    """

    def __init__(
        self, *, max_num_seqs: int, max_len: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self._vocab_size, self._eos_token_ids, self._device = vocab_size, eos_token_ids, device
        self._token_ids = torch.zeros(max_num_seqs, max_len, dtype=torch.int32, device=device)  # prompt, then answer
        self._choices = greedy_choices(max_num_seqs + 1, device) if ops.chooses_tokens(device) else None
        self._unread_ids = torch.empty(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._masks = GrammarMasks(device)
        self._seated: dict[int, int] = {}  # slot -> run whose parameters and tokens are kept there
        self._rows: tuple[int, ...] = ()
        self._parameters: Parameters | None = None

    def sample(self, logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> Sampled:
        """logits [rows, vocab] fp32, contiguous; they are overwritten. `rows` is not empty."""
        parameters = self._parameters_of(rows)
        positions = on_device([row.sample_position for row in rows], torch.int64, self._device)
        asked, counts = parameters.logprobs, parameters.logprob_counts
        raw = None if asked is None else logits[asked.index]
        self._adjust(logits, parameters, rows, positions)
        token_ids = self._chosen(logits, parameters, positions)
        if parameters.penalties is not None:
            members = parameters.penalties.rows
            self._token_ids[parameters.penalties.slots, positions[members]] = token_ids[members].int()
        if asked is None or raw is None:
            return Sampled(token_ids)
        return Sampled(token_ids, logprobs_of(raw, token_ids[asked.index], max(counts)), asked.rows, counts)

    def only_chooses(self, rows: Sequence[ScheduledSequence]) -> bool:
        """Whether `choose` is all that these rows need: then their parameters are in their slots from now on.

        That is a draw by temperature, top_p, top_k, min_p and seed, or the likeliest token; only that where no kernel
        draws (a CPU, REFERENCE=1). Costs next to nothing for the rows of the last call, and never waits for the device.
        """
        parameters = self._parameters_of(rows)
        return parameters.only_chooses and (parameters.draws is None or parameters.draws.are_greedy)

    def choose(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, last_token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Each row's token by what its slot was last told (`only_chooses`). May be captured in a graph: all that
        changes from step to step is read from these tensors and from the slots'.

        logits          [rows, vocab] fp32, contiguous; they stay as they are
        slots           [rows] int64; max_num_seqs is nobody's, for rows that fill a batch up
        positions       [rows] int32 or int64, of the tokens that are chosen: `sample_position`, a sequence's `seq_lens`
        last_token_ids  [slots + 1] int64, where each slot's token is written too
        Returns         [rows] int64
        """
        if self._choices is not None:
            return ops.choose_tokens(logits, slots, positions, self._choices, last_token_ids)
        token_ids = argmax(logits)
        last_token_ids.index_copy_(0, slots, token_ids)
        return token_ids

    def _parameters_of(self, rows: Sequence[ScheduledSequence]) -> Parameters:
        runs = tuple([row.run_id for row in rows])
        if self._parameters is None or runs != self._rows:
            with_draws = self._choices is None
            self._parameters = parameters_of(
                rows, self._vocab_size, self._eos_token_ids, self._device, with_draws=with_draws
            )
            self._rows = runs
            if new := [row for row in rows if self._seated.get(row.slot) != row.run_id]:
                self._seat(new)
        return self._parameters

    def _seat(self, rows: Sequence[ScheduledSequence]) -> None:
        if self._choices is not None:
            numbers, top_k = zip(*(choice_of(row.params, self._vocab_size) for row in rows), strict=True)
            slots = on_device([row.slot for row in rows], torch.int64, self._device)
            wholes = [[k, row.seed] for k, row in zip(top_k, rows, strict=True)]
            self._choices.numbers[slots] = on_device([list(row) for row in numbers], torch.float64, self._device)
            self._choices.wholes[slots] = on_device(wholes, torch.int64, self._device)
        for row in rows:
            if has_penalties(row.params):
                self._keep(row)
            self._seated[row.slot] = row.run_id

    def _keep(self, row: ScheduledSequence) -> None:
        """Later tokens of this run are written as they are sampled, before the host knows them."""
        known = on_device(row.known_token_ids[: row.sample_position], torch.int32, self._device)
        assert len(known) == row.sample_position, "a run's first sampled token has predecessors that are not known"
        self._token_ids[row.slot, : len(known)] = known

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

    def _chosen(self, logits: torch.Tensor, parameters: Parameters, positions: torch.Tensor) -> torch.Tensor:
        if self._choices is not None:
            # By the very kernel that `choose` takes: one compilation, one way of rounding.
            return ops.choose_tokens(logits, parameters.slots, positions.int(), self._choices, self._unread_ids)
        assert parameters.draws is not None
        return choose(logits, parameters.draws, positions)


def _ban(logits: torch.Tensor, bans: Entries, positions: torch.Tensor) -> None:
    is_banned = positions[bans.rows] < bans.values
    at = (bans.rows, bans.token_ids)
    logits[at] = logits[at].masked_fill(is_banned, float("-inf"))


def choose(logits: torch.Tensor, draws: Draws, positions: torch.Tensor) -> torch.Tensor:
    """[rows] token ids. Each kind of row on its own, without a copy of the logits where all rows are of one kind."""
    if draws.temperature is not None:
        logits.div_(draws.temperature)
    drawn, truncated, limits = draws.drawn, draws.truncated, draws.truncation
    uniform = uniform_numbers(draws.seeds, positions) if drawn is not None or truncated is not None else positions
    if drawn is not None and len(drawn) == draws.num_rows:
        return _draw_all(logits, uniform)
    if truncated is not None and limits is not None and len(truncated) == draws.num_rows:
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
