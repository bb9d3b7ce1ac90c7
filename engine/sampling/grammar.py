"""Grammars: what an answer must look like, as a mask over the vocabulary before each token. Over `llguidance`.

`GrammarCompiler` turns a GrammarSpec into a `Matcher` for one sequence; the scheduler feeds it the tokens that came,
the sampler asks it what may come. An end id may come only where the grammar accepts what is there.
"""

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.errors import BadRequest
from engine.plan import Grammar
from engine.types import GrammarKind, GrammarSpec

if TYPE_CHECKING:  # imported where a vocabulary is made, so that the engine starts without it
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

# As llama.cpp: room for indentation, but a model that began to write blanks cannot go on with them for ever.
_JSON_OPTIONS = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?"}
_MAX_REASON = 400  # characters of llguidance's own words


class GrammarCompiler:
    """Compiles for one model's vocabulary. Safe to use from several threads; `compile` may take a second.

    The vocabulary is made in a thread from the start on: that takes half a second to two, most of it with the
    interpreter locked, which would otherwise be missing in the answers under way at the first grammar.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocabulary: Future[LLTokenizer] = Future()
        arguments = (folder, vocab_size, eos_token_ids, self._vocabulary)
        threading.Thread(target=_make_vocabulary, args=arguments, name="grammar-vocabulary", daemon=True).start()

    def wait(self) -> None:
        """Until the vocabulary is made, or could not be."""
        self._vocabulary.exception()

    def compile(self, spec: GrammarSpec) -> "Matcher":
        """Raises BadRequest that says what is wrong with the grammar."""
        try:
            vocabulary = self._vocabulary.result()
        except RuntimeError as error:
            raise BadRequest(f"This model takes no grammars: {error}") from error
        from llguidance import LLMatcher

        try:
            inner = LLMatcher(vocabulary, _source(spec, vocabulary), log_level=0)
        except Exception as error:  # llguidance's converters raise plain Exception
            raise _refusal(spec, str(error)) from error
        if inner.is_error():
            raise _refusal(spec, inner.get_error())
        return Matcher(inner, vocabulary.vocab_size, spec)


class Matcher:
    """A grammar and how far one sequence is in it: `engine.plan.Grammar`."""

    def __init__(self, inner: "LLMatcher", vocab_size: int, spec: GrammarSpec) -> None:
        self.inner = inner
        self.vocab_size = vocab_size  # bits of a mask; a tokenizer may name more tokens than the model has logits for
        self._spec = spec

    @property
    def is_complete(self) -> bool:
        """Nothing but an end id may follow."""
        return self.inner.is_stopped()

    def accept(self, token_id: int) -> None:
        """Go on by a token that came. Raises BadRequest if the grammar does not allow it or grew beyond its limits."""
        if not self.inner.consume_token(token_id):
            raise _refusal(self._spec, self.inner.get_error())


class GrammarMasks:
    """What grammars allow next, put onto logits. Owned by the sampler."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        bits = (torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)) & 1
        self._of_byte = bits.float().log()  # [256, 8]: 0 where the token may come, -inf where it may not

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, grammars: Sequence[Grammar | None]) -> None:
        """Set to -inf, in place, what the grammars of these rows [n] int64 of `logits` [all rows, vocab] exclude.

        The masks are computed on the host, on several cores, while a card still computes the logits.
        """
        matchers = [grammar for grammar in grammars if isinstance(grammar, Matcher)]
        assert len(matchers) == len(rows)
        width = -(-matchers[0].vocab_size // 32)
        words = torch.empty(len(rows), width, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        inner = [(matcher.inner, index) for index, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(inner, words.data_ptr(), 4 * width, len(rows))
        allowed = words.view(torch.uint8).view(-1).to(self._device, non_blocking=True).int()
        masks = self._of_byte.index_select(0, allowed).view(len(rows), -1)[:, : logits.shape[1]]
        if len(rows) == len(logits):
            logits.add_(masks)
        else:
            logits.index_add_(0, rows, masks)


def _make_vocabulary(
    folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], made: "Future[LLTokenizer]"
) -> None:
    try:
        made.set_result(_vocabulary(folder / "tokenizer.json", vocab_size, eos_token_ids))
    except BaseException as error:  # a panic of the library is no Exception
        made.set_exception(RuntimeError(str(error)))


def _vocabulary(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> "LLTokenizer":
    from llguidance import LLTokenizer

    if not path.is_file():
        raise FileNotFoundError(f"its folder has no {path.name}.")
    text = path.read_text(encoding="utf-8")
    ends = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size] or None
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
    except ValueError as error:
        if "vocab size too small" not in str(error):
            raise
        return LLTokenizer(text, eos_token=[*eos_token_ids])  # names more tokens than the model has logits for


def _source(spec: GrammarSpec, vocabulary: "LLTokenizer") -> str:
    """The grammar in llguidance's words: JSON that names one grammar, or two where the answer begins with free text."""
    answer = _answer(spec)
    if not spec.after:
        return json.dumps({"grammars": [answer]})
    ids = vocabulary.tokenize_str(spec.after, parse_special=True)
    if len(ids) == 1:  # a token of its own, which no text stands for
        free = f"start: free <[{ids[0]}]> blanks? @answer\nfree: /(?s:.*)/"
    else:
        free = f"start: free blanks? @answer\nfree[suffix={json.dumps(spec.after)}]: /(?s:.*)/"
    return json.dumps(
        {"grammars": [{"lark_grammar": f"{free}\nblanks: /[ \\n]{{1,4}}/"}, {"name": "answer", **answer}]}
    )


def _answer(spec: GrammarSpec) -> dict[str, object]:
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return {"json_schema": _schema(spec.text)}
        case GrammarKind.JSON_OBJECT:
            return {"json_schema": _schema('{"type": "object"}')}
        case GrammarKind.REGEX:
            from llguidance import LLMatcher

            return {"lark_grammar": json.loads(LLMatcher.grammar_from_regex(spec.text))["grammars"][0]["lark_grammar"]}
        case GrammarKind.CHOICE:
            return {"lark_grammar": "start: " + " | ".join(map(json.dumps, _choices(spec.text)))}
        case GrammarKind.LARK:
            from llguidance.gbnf_to_lark import any_to_lark

            return {"lark_grammar": any_to_lark(spec.text)}


def _schema(text: str) -> dict[str, object]:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object.")
    return {**schema, "x-guidance": _JSON_OPTIONS}


def _choices(text: str) -> list[str]:
    choices = json.loads(text)
    if not (isinstance(choices, list) and choices and all(isinstance(item, str) and item for item in choices)):
        raise ValueError("choices are a list of one string or more, none of them empty.")
    return choices


def _refusal(spec: GrammarSpec, reason: str) -> BadRequest:
    words = " ".join(reason.partition("\n<state>")[0].split())
    shown = words if len(words) <= _MAX_REASON else words[: _MAX_REASON - 1] + "…"
    return BadRequest(f"The {spec.kind.replace('_', ' ')} grammar cannot be served: {shown}")
