"""One step's work, as the scheduler decides it and the runner executes it. Lists, no tensors."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.types import SamplingParams


class ScheduledSequence(NamedTuple):
    """The part of one sequence that this step computes. A named tuple: one is made for each sequence and step.

    token_ids      the tokens to feed, at positions start .. start + len(token_ids) - 1
    start          tokens of this sequence whose KV is already in the cache
    block_table    blocks that hold positions 0 .. start + len(token_ids) - 1, in order
    samples        True where the last fed token is the sequence's last: its logits give the next token.
                   False for a prefill chunk that ends before the prompt does
    sample_position  index of the token to be sampled, counted from the start of the sequence (seeds depend on it)
    seed           always set: the request's own, or one drawn at admission
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    samples: bool
    sample_position: int
    params: SamplingParams
    seed: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Sequences in the order of their tokens; the runner returns one id for each that samples, in this order."""

    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def num_sampled(self) -> int:
        return sum(sequence.samples for sequence in self.sequences)
