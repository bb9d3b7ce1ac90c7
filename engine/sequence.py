"""One request as the engine sees it: its tokens, how far its KV is, and which blocks hold it. Plain state, no rules:
the scheduler is the only one that changes a sequence.
"""

from dataclasses import dataclass
from enum import Enum, auto

from engine.blocks import NO_PREFIX, PrefixId
from engine.types import RequestTimes, SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()  # new or preempted: holds no blocks
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """
    token_ids            the prompt, then what was sampled
    max_length           tokens (prompt + answer) at which it ends with LENGTH
    seed                 the request's own, or one drawn for it; part of the sequence, so that a restart repeats it
    num_computed_tokens  tokens whose KV is in the cache; catches up with len(token_ids), there are no phases
    num_cached_tokens    prompt tokens that the prefix cache gave at the first admission
    block_table          blocks of the positions 0 .. num_computed_tokens - 1 and of what is planned. A tuple, so that
                         plans share it; a new one is made only when a block is added
    num_published        leading blocks that the prefix cache knows; `prefix` is the chain up to there
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_length: int
    params: SamplingParams
    stop_token_ids: frozenset[int]
    seed: int
    arrived_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: tuple[int, ...] = ()
    num_published: int = 0
    prefix: PrefixId = NO_PREFIX

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def times(self, now_s: float) -> RequestTimes:
        """Where the time went, if it ends now; a stage that was not reached took nothing."""
        admitted_s = now_s if self.admitted_s is None else self.admitted_s
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        return RequestTimes(
            queue_s=admitted_s - self.arrived_s, prefill_s=first_token_s - admitted_s, decode_s=now_s - first_token_s
        )
