"""One request as the engine sees it: its tokens, how far its KV is, and which blocks hold it. Plain state, no rules:
the scheduler is the only one that changes a sequence.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.blocks import NO_PREFIX, PrefixId
from engine.plan import Grammar
from engine.types import ORDINARY, RequestTimes, SamplingParams, Standing, TokenLogprobs


class SequenceStatus(Enum):
    WAITING = auto()  # new or preempted: holds no blocks
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """
    token_ids            the prompt, then what was sampled
    max_length           tokens (prompt + answer) at which it ends with LENGTH
    asked_length         the same as it was asked for; a pool that was made smaller lowers max_length for a while
    seed                 the request's own, or one drawn for it; part of the sequence, so that a restart repeats it
    standing             beside others
    rank                 its place in the line, which the scheduler gives it once; lower goes first
    needs_its_ids        not planned before its last id is known here, since that decides what may come next (a grammar)
    grammar              what its answer must look like; set before it is added to the scheduler
    prompt_logprobs      where asked: of the prompt tokens from the second on, as far as they are computed
    num_pending          ids sampled by steps under way, which are not in token_ids yet
    num_computed_tokens  tokens whose KV is in the cache once the steps under way are done; catches up with `length`,
                         there are no phases
    num_cached_tokens    prompt tokens that the prefix cache gave at the first admission
    block_tables         of each group of layers, as long as each other: blocks of the positions 0 ..
                         num_computed_tokens - 1 and of what is planned. Tuples, so that plans share them; new ones are
                         made only when blocks are added
    num_settled_tokens   tokens whose KV is there: what a window has passed by this far is not held any more, though it
                         stays in the table
    num_published        leading blocks that the prefix cache knows; `prefix` is the chain up to there
    slot, run_id         as in ScheduledSequence, while it runs; a preempted one keeps its old run_id, by which an id
                         that was under way still finds it
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_length: int
    params: SamplingParams
    stop_token_ids: frozenset[int]
    seed: int
    arrived_s: float
    standing: Standing = ORDINARY
    rank: tuple[float, int] = (0.0, 0)
    needs_its_ids: bool = False
    grammar: Grammar | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    admitted_s: float | None = None
    first_token_s: float | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = 0
    run_id: int = 0
    num_pending: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    block_tables: tuple[tuple[int, ...], ...] = ()
    num_settled_tokens: int = 0
    num_published: int = 0
    prefix: PrefixId = NO_PREFIX
    asked_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.asked_length = self.max_length

    def fit(self, most_tokens: int) -> None:
        """The pool holds no more than `most_tokens` now."""
        self.max_length = min(self.asked_length, most_tokens)

    @property
    def length(self) -> int:
        """Tokens it has, those that the host does not know yet included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_places(self) -> int:
        """Of each of its block tables."""
        return len(self.block_tables[0]) if self.block_tables else 0

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.length - self.num_computed_tokens

    @property
    def can_go_on(self) -> bool:
        """False where nothing is to be computed before the id under way is known here."""
        return not self.num_pending or (self.length < self.max_length and not self.needs_its_ids)

    @property
    def num_cacheable_tokens(self) -> int:
        """Tokens that may come from the prefix cache. The last one is always left to compute, since its logits are
        what we are after; so are all whose log-probabilities are asked and not given yet.
        """
        is_whole = self.params.prompt_logprobs is not None and self.first_token_s is None
        return 0 if is_whole else self.length - 1

    def times(self, now_s: float) -> RequestTimes:
        """Where the time went, if it ends now; a stage that was not reached took nothing."""
        admitted_s = now_s if self.admitted_s is None else self.admitted_s
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        return RequestTimes(
            queue_s=admitted_s - self.arrived_s, prefill_s=first_token_s - admitted_s, decode_s=now_s - first_token_s
        )
