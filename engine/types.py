"""The plain words that cross the border between the app and the engine. Picklable, free of torch and of text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from engine.errors import EngineError
from engine.layout import CacheLayout, Window


class FinishReason(StrEnum):
    STOP = "stop"  # a stop id (end of sequence included) was sampled
    GRAMMAR = "grammar"  # the grammar is complete: nothing may follow the token, which is part of the answer
    LENGTH = "length"  # max_tokens or the context was reached
    ABORT = "abort"  # the caller left
    ERROR = "error"  # this request cannot go on; its last event says why


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # text: the schema
    JSON_OBJECT = "json_object"  # any JSON object; text: empty
    REGEX = "regex"  # the whole answer matches
    CHOICE = "choice"  # text: a JSON list of strings, of which the answer is one
    LARK = "lark"  # EBNF in Lark's syntax, or in GBNF
    NATIVE = "native"  # Lark as its compiler has it, tokens and JSON schemas inside: what the app itself writes


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the whole answer must look like.

    after    delays it: free text up to and with this string comes first (the end of a thinking block)
    opening  with `after`: the free text comes only if the answer begins with this string
    instead  what the answer may look like as well
    """

    kind: GrammarKind
    text: str = ""
    after: str = ""
    opening: str = ""
    instead: "GrammarSpec | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one sequence is continued. Each step works on the logits in this order, vLLM's: logit_bias; repetition,
    presence, frequency penalty; what may not come (min_tokens, banned and allowed ids, grammar); temperature; min_p,
    top_k, top_p.

    max_tokens          tokens to generate at most; None takes what the context leaves
    min_tokens          no stop id before so many tokens; a complete grammar ends the answer all the same
    temperature         0 is greedy, exactly; so is anything below 1e-5
    top_p               keep the smallest set of tokens whose probability reaches it; 1 keeps all
    top_k               keep the k likeliest; 0 keeps all
    min_p               keep tokens at least this share as likely as the likeliest; 0 keeps all
    repetition_penalty  of tokens in prompt or answer: divides a positive logit, multiplies a negative one; 1 is none
    presence_penalty    subtracted from the logit of every token that is in the answer; 0 is none
    frequency_penalty   subtracted from it as often as the token is in the answer; 0 is none
    logit_bias          token id -> what is added to its logit
    allowed_token_ids   no other comes, where there are any; stop ids must be among them to come
    banned_token_ids    never come
    seed                the same request with the same seed gives the same tokens whatever shares its batch;
                        None draws a fresh one
    stop_token_ids      end the sequence; they are emitted as its last token
    ignore_eos          go on after the model's own end ids (benches)
    logprobs            with each token its log-probability and those of so many likeliest tokens, 0 to 20: log_softmax
                        of the raw logits, before all of the above
    prompt_logprobs     the same for each token of the prompt but the first, with the first event
    grammar             what the answer must look like
    reports_progress    an event without a token when the grammar is compiled, and for each piece of the prompt that is
                        computed before the first token
    embeds              the prompt as a vector is asked, which comes with the first token; there is only one, of no use
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None
    reports_progress: bool = False
    embeds: bool = False


class TokenLogprobs(NamedTuple):
    """Log-probability of one token, and the likeliest tokens at its place with theirs, likeliest first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class RequestClass(StrEnum):
    """What a request is for; under the priority policy those further up go first."""

    INTERACTIVE = "interactive"  # somebody watches the answer
    AUTOCOMPLETE = "autocomplete"  # somebody types; of no use once a newer one of the same client is there
    BACKGROUND = "background"  # titles, agents' side calls: nobody waits, and its cache need not be kept
    BATCH = "batch"  # whenever there is room


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a request stands beside others.

    priority   lower goes first, as in vLLM; each 1 is worth one class. Under the fcfs policy only 0 is taken
    client_id  who asks; an autocomplete request ends the one before it of the same client. "" is nobody in particular
    """

    request_class: RequestClass = RequestClass.INTERACTIVE
    priority: int = 0
    client_id: str = ""


ORDINARY = Standing()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Where one request spent its time, in seconds, sent with its last event."""

    queue_s: float
    prefill_s: float
    decode_s: float


class TokenEvent(NamedTuple):
    """One step's outcome for one request. A named tuple, since one is made and sent for every token.

    token_id            the sampled token; None where a request ends without one (abort), and with progress of a prompt
    finish_reason       set on the last event, and only there. With STOP, token_id is the stop id itself
    num_prompt_tokens   length of the prompt as the engine received it
    num_cached_tokens   prompt tokens taken from the prefix cache instead of being computed
    num_computed_tokens prompt tokens that are in the cache by now, where progress is told
    embedding           of length 1, where it was asked
    times               on the last event
    """

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    times: RequestTimes | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: EngineError | None = None
    num_computed_tokens: int = 0
    embedding: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What came out of a load (a config is what was asked, this is what there is).

    max_model_len   tokens (prompt + answer) that one sequence may hold here, after fitting to memory
    context_length  tokens that the architecture was trained for
    eos_token_ids   end ids from generation_config.json, else config.json
    device          its name, for people
    device_kind     "cpu" or "cuda"
    """

    architecture: str
    quantization: str | None
    dtype: str
    device: str
    vocab_size: int
    num_layers: int
    max_model_len: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    device_kind: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes by part. `notes` says in words what was chosen and why, one line a choice.

    graphs_bytes  the memory that captured steps share (CUDA)
    num_blocks    of `block_size` tokens, for one group of layers each; windows: of each group, see `CacheLayout`
    step_tokens   that a step computes at most
    """

    total_bytes: int
    free_bytes_at_start: int
    weights_bytes: int
    workspace_bytes: int
    kv_bytes: int
    reserve_bytes: int
    num_blocks: int
    block_size: int
    graphs_bytes: int = 0
    windows: tuple[Window, ...] = (None,)
    step_tokens: int = 1
    notes: tuple[str, ...] = ()

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(self.block_size, self.windows, self.step_tokens)

    @property
    def kv_tokens(self) -> int:
        """Of one sequence that would fill the cache; where all layers have windows, those that it has places for."""
        return self.layout.longest(self.num_blocks, self.num_blocks * self.block_size) if self.num_blocks else 0


# Tokens of a step, by which steps are counted: up to so many.
STEP_TOKEN_BOUNDS = tuple(2**power for power in range(15))


class DeviceMemory(NamedTuple):
    """Bytes of a card, as its driver counts them: whoever uses them."""

    used_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot for the monitor and /metrics. Counters grow from the child's start.

    num_blocks_cached  held by no request, but found by the prefix cache
    steps_by_tokens  steps that computed up to so many tokens, for each of STEP_TOKEN_BOUNDS (each step counts once),
                     and last those with more
    load_s           from the child's start to its being ready
    device_memory    None on a CPU
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_blocks_total: int = 0
    num_blocks_used: int = 0
    num_blocks_cached: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # of those, found
    num_preemptions: int = 0
    prompt_tokens: int = 0  # prompt tokens computed
    generation_tokens: int = 0
    num_steps: int = 0
    last_step_age_s: float = 0.0  # since the last step ended, while there is work; 0 when idle
    step_host_us: float = 0.0  # scheduler time (plan + settle) of the last step
    steps_by_tokens: tuple[int, ...] = ()
    step_tokens: int = 0  # tokens of all steps
    load_s: float = 0.0
    device_memory: DeviceMemory | None = None

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that sequences hold now, 0 to 1."""
        return self.num_blocks_used / self.num_blocks_total if self.num_blocks_total else 0.0
