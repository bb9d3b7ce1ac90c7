"""Grammars: what an answer must look like, as a mask over the vocabulary before each token. Over `llguidance`.

`GrammarCompiler` turns a GrammarSpec into a `Matcher` for one sequence; the scheduler feeds it the tokens that came,
the sampler asks it what may come. An end id may come only where the grammar accepts what is there.
"""

import json
import re
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.errors import BadGrammar
from engine.plan import Grammar
from engine.types import GrammarKind, GrammarSpec

if TYPE_CHECKING:  # imported where a vocabulary is made, so that the engine starts without it
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

# As llama.cpp: room for indentation, but a model that began to write blanks cannot go on with them for ever.
_JSON_OPTIONS = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?"}
_CODE_POINT = re.compile(r"\\\\|\\u(?P<four>[0-9a-fA-F]{4})|\\U(?P<eight>[0-9a-fA-F]{8})")
_PLACE = re.compile(r"(at )?\d+\(\d+\): ")
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
        """Raises BadGrammar that says what is wrong with it."""
        try:
            vocabulary = self._vocabulary.result()
        except RuntimeError as error:
            raise BadGrammar(f"This model takes no grammars: {error}") from error
        inner = _matcher(vocabulary, _source(spec, vocabulary), spec)
        has_more = spec.after or spec.instead
        _refuse_empty(_matcher(vocabulary, _alone(spec), spec) if has_more else inner, vocabulary, spec)
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


def _matcher(vocabulary: "LLTokenizer", source: str, spec: GrammarSpec) -> "LLMatcher":
    from llguidance import LLMatcher

    inner = LLMatcher(vocabulary, source, log_level=0)
    if inner.is_error():
        raise _refusal(spec, inner.get_error())
    return inner


def _refuse_empty(inner: "LLMatcher", vocabulary: "LLTokenizer", spec: GrammarSpec) -> None:
    """A grammar under which nothing can be written would give an empty answer, as if that were one."""
    possible = bytearray(inner.compute_bitmask())
    for token_id in vocabulary.eos_tokens:
        possible[token_id // 8] &= ~(1 << token_id % 8)
    if not any(possible):
        raise _refusal(spec, "no text but the empty one, if any, is allowed by it.")


def _alone(spec: GrammarSpec) -> str:
    return json.dumps({"grammars": [_answer_of(spec)]})


def _source(spec: GrammarSpec, vocabulary: "LLTokenizer") -> str:
    """The grammar in llguidance's words: JSON that names one grammar, or more where there is something beside it."""
    if not (spec.after or spec.instead):
        return _alone(spec)
    named = [{"name": "answer", **_answer_of(spec)}]
    named += [{"name": "other", **_answer_of(spec.instead)}] if spec.instead else []
    answer = "(@answer | @other)" if spec.instead else "@answer"
    lead = _lead(spec, vocabulary) if spec.after else f"start: {answer}"
    return json.dumps({"grammars": [{"lark_grammar": lead.replace("@answer", answer)}, *named]})


def _lead(spec: GrammarSpec, vocabulary: "LLTokenizer") -> str:
    """Free text before the answer. A string that is a token of its own is no text to the grammar."""
    opening, closing = _token(spec.opening, vocabulary), _token(spec.after, vocabulary)
    free = f"free {closing}" if closing else "free"
    thinking = f"{opening or json.dumps(spec.opening)} {free}" if spec.opening else free
    start = f"start: ({thinking} blanks?)? @answer" if spec.opening else f"start: {thinking} blanks? @answer"
    suffix = "" if closing else f"[suffix={json.dumps(spec.after)}]"
    return f"{start}\nfree{suffix}: /(?s:.*)/\nblanks: /[ \\n]{{1,4}}/"


def _token(text: str, vocabulary: "LLTokenizer") -> str:
    ids = vocabulary.tokenize_str(text, parse_special=True) if text else []
    return f"<[{ids[0]}]>" if len(ids) == 1 else ""


def _answer_of(spec: GrammarSpec) -> dict[str, object]:
    try:
        return _answer(spec)
    except Exception as error:  # llguidance's converters raise plain Exception
        raise _refusal(spec, str(error)) from error


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
            choices = " | ".join(map(json.dumps, _choices(spec.text)))
            return {"lark_grammar": f"start: CHOICE\nCHOICE: {choices}"}  # as one terminal, thousands are no burden
        case GrammarKind.LARK:
            return {"lark_grammar": _from_gbnf(spec.text) if _is_gbnf(spec.text) else spec.text}
        case GrammarKind.NATIVE:
            return {"lark_grammar": spec.text}


def _is_gbnf(text: str) -> bool:
    from llguidance.gbnf_to_lark import is_lark_syntax

    return not is_lark_syntax(text)


def _from_gbnf(text: str) -> str:
    """Raises, in the words of GBNF, where it is none."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(_CODE_POINT.sub(_as_character, text)))
    except IndexError:
        raise ValueError("it ends inside an escape sequence.") from None


def _as_character(escape: "re.Match[str]") -> str:
    """The converter writes code points in a way that Lark does not read."""
    digits = escape["four"] or escape["eight"]
    if digits is None or int(digits, 16) > sys.maxunicode:
        return escape[0]
    character = chr(int(digits, 16))
    if character in '"\\[]':
        return f"\\{character}"
    return character if character.isprintable() or ord(character) > 0xFF else f"\\x{ord(character):02x}"


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


def _refusal(spec: GrammarSpec, reason: str) -> BadGrammar:
    reason, kind = reason.partition("\n<state>")[0], f"{spec.kind.replace('_', ' ')} "
    is_gbnf = spec.kind is GrammarKind.LARK and _is_gbnf(spec.text)
    if is_gbnf or spec.kind is GrammarKind.NATIVE:  # lines and places in Lark are not the caller's
        reason, kind = _PLACE.sub("", reason.partition("\n")[0]), "GBNF " if is_gbnf else ""
    words = " ".join(reason.split())
    shown = words if len(words) <= _MAX_REASON else words[: _MAX_REASON - 1] + "…"
    return BadGrammar(f"The {kind}grammar cannot be served: {shown}")
