"""SamplingParams as users of vLLM know them, and how an unknown keyword is refused."""

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from app.chat.model_text import ModelText
from app.chat.types import SamplingOptions
from engine import types as engine_types
from engine.types import GrammarKind, GrammarSpec

_MOST_ANSWERS = 128  # as over HTTP

_P = ParamSpec("_P")
_T = TypeVar("_T")

_GRAMMARS = {
    "json": GrammarKind.JSON_SCHEMA,
    "json_object": GrammarKind.JSON_OBJECT,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.LARK,
}


def names_its_keywords(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Python's TypeError for an unknown keyword, with those that there are."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    called = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if unknown := [name for name in kwargs if name not in known]:
            raise TypeError(f"{called} has no keyword {', '.join(unknown)}. It has {', '.join(known)}.")
        return function(*args, **kwargs)

    return checked


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How prompts are continued: `engine.types.SamplingParams` under vLLM's names and defaults, and what concerns text.

    n                   answers to each prompt; with a seed, the answers' seeds count up from it
    max_tokens          None takes what the context leaves
    top_k               0 or -1 keeps all
    stop                strings that end the answer and are no part of it
    structured_outputs  what the answer must look like, one of {"json": schema}, {"json_object": True},
                        {"regex": text}, {"choice": [text, ...]}, {"grammar": text (Lark or GBNF)}
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError, before anything reaches an engine. "5" and 5.0 are taken for 5, as over HTTP."""
        for name, kind in _kinds().items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind.validate_python(value))
            except ValidationError as error:
                first = error.errors()[0]
                where = "".join(f"[{part!r}]" for part in first["loc"] if part not in ("[key]", "str"))
                raise ValueError(f"{name}{where} is {first['input']!r:.100}: {first['msg'].lower()}.") from None
        _check_bounds(self)
        _grammar(self.structured_outputs)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def for_engine(self, text: ModelText, index: int) -> engine_types.SamplingParams:
        """Of answer `index` of `n`."""
        options = SamplingOptions(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=None if self.seed is None else self.seed + index,
            stop=self.stop_strings,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )
        return replace(
            text.sampling(options, {}),
            min_tokens=self.min_tokens,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias or {}),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs if index == 0 else None,
            grammar=_grammar(self.structured_outputs),
        )


# Not as a decorator: the class that `dataclass` makes for its slots is another one than it is given.
SamplingParams.__init__ = names_its_keywords(SamplingParams.__init__)  # type: ignore[method-assign]


@functools.cache
def _kinds() -> dict[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(hint) for name, hint in get_type_hints(SamplingParams).items()}


def _check_bounds(params: SamplingParams) -> None:
    """Of what the engine does not know by these names; the rest it checks itself."""
    if not 1 <= params.n <= _MOST_ANSWERS:
        raise ValueError(f"n is {params.n}; it must be from 1 to {_MOST_ANSWERS}.")
    if params.top_k < -1:
        raise ValueError(f"top_k is {params.top_k}; it must be at least -1, where 0 and -1 keep every token.")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise ValueError("allowed_token_ids is empty: no token could come. Leave it out to allow all.")


def _grammar(structured: Mapping[str, Any] | None) -> GrammarSpec | None:
    if structured is None:
        return None
    if len(structured) != 1 or not structured.keys() <= _GRAMMARS.keys():
        raise ValueError(f"structured_outputs has {', '.join(structured)}; it must have one of {', '.join(_GRAMMARS)}.")
    ((name, value),) = structured.items()
    if name in ("regex", "grammar") and not isinstance(value, str):
        raise ValueError(f"structured_outputs has the {name} {value!r:.100}; it must be a string.")
    if name == "json_object":
        return GrammarSpec(GrammarKind.JSON_OBJECT)
    return GrammarSpec(_GRAMMARS[name], value if isinstance(value, str) else json.dumps(value))
