"""What the bodies of chat and raw completions have in common, in OpenAI's words and vLLM's, -> SamplingOptions.

A field that is honoured is declared here or in the body's own file; one that would change the answer and cannot be
honoured is in `_REFUSED`, by name; any other is accepted and ignored, as clients send many of their own.
"""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from app.api.body import Many, invalid
from app.api.errors import echo
from app.api.grammars import FIELDS as GRAMMAR_FIELDS
from app.api.grammars import named_grammar_of
from app.api.numbers import COUNTS, NUMBER, Count, Penalty, Probability, Repetition, Seed, Temperature, TopK, Whole
from app.chat.types import SamplingOptions
from app.errors import AppError
from engine.types import RequestClass, Standing

MAX_CHOICES = 128
MAX_STOPS = 256
MAX_STOP_CHARS = 4096
MAX_BIASES = 16_384
_SEEDS = 2**63
_PRIORITIES = 10**9

Stop = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})]
Bias = Annotated[float, Field(ge=-100, le=100), NUMBER]


def _not_too_many(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise invalid("logit_bias", f"has {len(biases):,} entries; the limit is {MAX_BIASES:,}.")
    return biases


class StreamOptions(BaseModel):
    """include_progress   of a long prompt: an extra of ours"""

    include_usage: bool | None = None
    include_progress: bool | None = None


class GenerationBody(BaseModel):
    """What both endpoints take. None is the same as not given, everywhere."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_not_too_many)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=COUNTS), NUMBER] | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), NUMBER] | None = None
    stop: Stop = None
    stop_token_ids: Many[Whole] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[Many[Whole], Field(min_length=1)] | None = None
    bad_words: Many[str] | None = None
    truncate_prompt_tokens: TopK | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-_PRIORITIES, le=_PRIORITIES), NUMBER] | None = None
    request_class: RequestClass | None = None
    user: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_json_object: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> "GenerationBody":
        for name, value in (self.model_extra or {}).items():
            changes_nothing = _REFUSED.get(name)
            if changes_nothing is not None and value is not None and not changes_nothing(value):
                raise _unsupported(name, value)
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens whose log-probabilities are asked with each token; None asks for none at all."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt."""
        return None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_progress(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_progress)

    @property
    def standing(self) -> Standing:
        """Somebody waits for what an API answers, unless it says another class; `priority` as in vLLM, lower first. An
        autocompletion makes the one before it of the same `user` needless."""
        request_class = self.request_class or RequestClass.INTERACTIVE
        has_follower = request_class is RequestClass.AUTOCOMPLETE and isinstance(self.user, str)
        return Standing(
            request_class=request_class,
            priority=self.priority or 0,
            client_id=self.user if has_follower else "",
        )

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only allowed when `stream` is true.")

    def sampling(self, choice: int, max_tokens: int | None) -> SamplingOptions:
        """Options of answer number `choice`. Each answer of a seeded request has its own seed, or all were the same."""
        min_tokens = self.min_tokens or 0
        if max_tokens is not None and min_tokens > max_tokens:
            raise invalid("min_tokens", f"is {min_tokens}, more than the {max_tokens} that the answer may have.")
        temperature, top_p = greedy_at_zero(self.temperature, self.top_p)
        grammar_param, grammar = named_grammar_of({name: getattr(self, name) for name in GRAMMAR_FIELDS}) or (
            None,
            None,
        )
        seed = None if self.seed is None or self.seed < 0 else (self.seed + choice) % _SEEDS
        return SamplingOptions(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias or {},
            seed=seed,
            stop=stop_strings(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            grammar=grammar,
            grammar_param=grammar_param,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=stop_strings(self.bad_words, "bad_words"),
            keeps_stop=bool(self.include_stop_str_in_output),
            shows_control_tokens=self.skip_special_tokens is False,
        )


def greedy_at_zero(temperature: float | None, top_p: float | None) -> tuple[float | None, float | None]:
    """The smallest set of tokens that reaches probability 0 is the likeliest one."""
    return (0.0, None) if top_p == 0 else (temperature, top_p)


def token_limit(param: str, value: int | None) -> int | None:
    """None and -1 take what the context leaves."""
    if value is None or value == -1:
        return None
    if value < 1:
        raise invalid(param, f"must be at least 1, got {value}; leave it out to use what the context leaves.")
    return value


def stop_strings(stop: Any, param: str = "stop") -> tuple[str, ...]:
    """null | string | list of strings; empty strings stop nothing. Raises AppError (400)."""
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise invalid(param, f"expected a string or a list of strings; got {echo(stop)}.")
    if len(stops) > MAX_STOPS or sum(map(len, stops)) > MAX_STOP_CHARS:
        raise invalid(param, f"at most {MAX_STOPS} strings of {MAX_STOP_CHARS:,} characters in all.")
    return tuple(item for item in stops if item)


def _unsupported(name: str, value: Any) -> AppError:
    return AppError(
        400,
        "unsupported_parameter",
        f"`{name}` is not supported (got {echo(value)}).",
        hint="Send `tools` and `tool_choice`." if name in _OLDER_FORMS else "Leave it out.",
        param=name,
    )


def _is_one_of(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: value in neutral


_ZERO = _is_one_of(0)
_ONE = _is_one_of(1)
_OFF = _is_one_of(False)
_EMPTY = _is_one_of([], {}, "")

_OLDER_FORMS = ("functions", "function_call")

# Fields that would change the answer, in ways that Fireside has not -> does this value change nothing?
_REFUSED: dict[str, Callable[[Any], bool]] = {
    "functions": _EMPTY,
    "function_call": _is_one_of("none", "auto"),
    "prompt_logprobs": _OFF,
    "best_of": _ONE,
    "use_beam_search": _OFF,
    "modalities": _is_one_of(["text"], []),
    "audio": _EMPTY,
    "documents": _EMPTY,
    "chat_template": _EMPTY,
    "logits_processors": _EMPTY,
    "prompt_embeds": _EMPTY,
    "thinking_token_budget": lambda value: False,
    # samplers of other servers
    "typical_p": _ONE,
    "tfs": _ONE,
    "tfs_z": _ONE,
    "top_a": _ZERO,
    "mirostat": _ZERO,
    "mirostat_mode": _ZERO,
    "dynatemp_range": _ZERO,
    "dry_multiplier": _ZERO,
    "xtc_probability": _ZERO,
}
