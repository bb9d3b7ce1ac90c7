"""One step's work, as the scheduler decides it and the runner executes it, and what comes of it. Lists, no tensors.

A step may be planned before the ids of the step before are known here: they are on the device already, one a slot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.types import SamplingParams, TokenLogprobs


class Grammar(Protocol):
    """What the answer of one sequence must look like, and how far it is. `engine.sampling.grammar.Matcher`."""

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        ...

    def accept(self, token_id: int) -> None:
        """Go on by a token that came. Raises BadRequest if it cannot."""
        ...


class ScheduledSequence(NamedTuple):
    """The part of one sequence that this step computes. A named tuple: one is made for each sequence and step.

    slot           0 .. max_num_seqs - 1, the sequence's own from its admission until it ends or is preempted: the row
                   of what the device keeps of it from step to step, such as the id that it sampled last
    run_id         a number given at each admission and never again: tells whether a slot has changed hands, also
                   between two requests of one id
    token_ids      the tokens to feed, at positions start .. start + len(token_ids) - 1
    feeds_last     True where the one token to feed is the id that the slot sampled last: the host may not know it yet,
                   so token_ids holds a 0 in its place
    start          tokens of this sequence whose KV is already in the cache
    block_tables   of each group of layers the blocks that hold positions 0 .. start + len(token_ids) - 1, in order;
                   those that a group's window has passed by are no longer its own, and never read
    samples        True where the last fed token is the sequence's last: its logits give the next token.
                   False for a prefill chunk that ends before the prompt does
    sample_position  index of the token to be sampled, counted from the start of the sequence (seeds depend on it)
    seed           always set: the request's own, or one drawn at admission
    num_prompt_tokens  of the whole prompt
    known_token_ids  all tokens of the sequence that the host knows, at least those before the first that a run samples
                   and the whole prompt. The sequence's own list: it grows, and is read while the plan is submitted
    grammar        one that has taken in all tokens so far; such a sequence is not planned ahead of its ids
    """

    request_id: str
    slot: int
    run_id: int
    token_ids: tuple[int, ...]
    feeds_last: bool
    start: int
    block_tables: tuple[tuple[int, ...], ...]
    samples: bool
    sample_position: int
    params: SamplingParams
    seed: int
    num_prompt_tokens: int = 0
    known_token_ids: Sequence[int] = ()
    grammar: Grammar | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Sequences in the order of their tokens; the runner returns one id for each that samples, in this order.

    planned_s          when, by the scheduler's clock
    num_prompt_tokens  of the tokens, those that are not the one next token of a sequence
    """

    sequences: tuple[ScheduledSequence, ...]
    planned_s: float = 0.0
    num_prompt_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def num_sampled(self) -> int:
        return sum(sequence.samples for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step computed.

    token_ids        one for each sequence of its plan that samples, in the plan's order
    logprobs         of those of them whose request asks, by place in token_ids
    prompt_logprobs  by place in the plan: of the prompt tokens that follow those fed, one each
    embeddings       of those whose request asks, by place in token_ids
    """

    token_ids: tuple[int, ...]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    embeddings: Mapping[int, tuple[float, ...]] = field(default_factory=dict)


class PendingStep(Protocol):
    """A step that was handed to the device. Steps are executed in the order in which they were submitted."""

    def wait(self) -> StepOutput:
        """Block until the step is done. Raises EngineError if it failed; called once."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was done when `submit` returned, as on a CPU."""

    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output
