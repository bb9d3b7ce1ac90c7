"""Grammars over a tiny random model that would write noise: every answer is what its grammar says, and nobody else's
answer changes. Bad grammars are refused by name, one request at a time.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadRequest
from engine.loading import load_runner
from engine.sampling.grammar import GrammarCompiler, GrammarMasks
from engine.types import FinishReason, GrammarKind, GrammarSpec, SamplingParams, TokenEvent
from tests.checkpoints import tiny_checkpoint
from tests.fakes import EOS, byte_model_folder

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", None]},
        "scores": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}, "maxItems": 2},
        "inner": {"$ref": "#/$defs/flag"},
    },
    "required": ["name", "age", "kind", "scores", "inner"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}},
}
PERSON["$defs"]["flag"]["additionalProperties"] = False  # type: ignore[index]


def _schema(schema: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def _is_person(answer: Any) -> bool:
    """The schema by hand."""
    return (
        set(answer) == set(PERSON["properties"])  # type: ignore[arg-type]
        and isinstance(answer["name"], str)
        and 1 <= len(answer["name"]) <= 8
        and type(answer["age"]) is int
        and 0 <= answer["age"] <= 150
        and answer["kind"] in ("cat", "dog", None)
        and len(answer["scores"]) <= 2
        and all(isinstance(score, int | float) and 0 <= score <= 1 for score in answer["scores"])
        and list(answer["inner"]) == ["on"]
        and isinstance(answer["inner"]["on"], bool)
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Tokens are bytes, 256 to 258 control tokens; the end id is one of these."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder, "llama")
    byte_model_folder(folder, generation_config={"eos_token_id": EOS})
    config = EngineConfig(model=str(folder), device="cpu", kv_gb=0.02, max_num_seqs=50)
    return Engine(load_runner(config, lambda stage, fraction: None), config)


def _run(engine: Engine, requests: dict[str, SamplingParams]) -> dict[str, list[TokenEvent]]:
    for request_id, params in requests.items():
        engine.add(request_id, (70, 71, 72), params)
    events: dict[str, list[TokenEvent]] = {request_id: [] for request_id in requests}
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check()
    return events


def _answers(engine: Engine, spec: GrammarSpec | None, count: int, **options: Any) -> list[str]:
    """`count` seeded answers at temperature 1, computed together; all must end by themselves."""
    options = {"max_tokens": 240, **options}
    requests = {str(seed): SamplingParams(seed=seed, grammar=spec, **options) for seed in range(count)}
    events = _run(engine, requests)
    assert {of_one[-1].finish_reason for of_one in events.values()} <= {FinishReason.GRAMMAR, FinishReason.STOP}
    return [_text(of_one) for of_one in events.values()]


def _text(events: list[TokenEvent]) -> str:
    token_ids = [event.token_id for event in events if event.finish_reason is not FinishReason.STOP]
    assert all(token_id is not None and token_id < 256 for token_id in token_ids), "a control token came"
    return bytes(token_ids).decode()  # type: ignore[arg-type]


def test_fifty_answers_under_a_schema_parse_and_validate(engine: Engine) -> None:
    answers = _answers(engine, _schema(PERSON), 50)
    assert len(set(answers)) == 50
    assert all(_is_person(json.loads(answer)) for answer in answers)


def test_a_json_object_is_one(engine: Engine) -> None:
    """Without an end to its strings a random model would write for ever: a bias makes it close them."""
    spec = GrammarSpec(GrammarKind.JSON_OBJECT)
    answers = _answers(engine, spec, 8, logit_bias={ord('"'): 12.0, ord("}"): 12.0})
    assert all(isinstance(json.loads(answer), dict) for answer in answers)


@pytest.mark.parametrize("pattern", [r"\d{3}-[a-f]{2,6}!", r"(ab|cd)*x", r"[äöü]{2}z?", r"[0-9]+"])
def test_an_answer_matches_its_regex_as_a_whole(engine: Engine, pattern: str) -> None:
    answers = _answers(engine, GrammarSpec(GrammarKind.REGEX, pattern), 8)
    assert len(set(answers)) > 1
    assert all(re.fullmatch(pattern, answer) for answer in answers)


def test_an_answer_is_one_of_the_choices(engine: Engine) -> None:
    choices = ["yes", "no", "no way", 'say "é"\n', "yes\\"]
    answers = _answers(engine, GrammarSpec(GrammarKind.CHOICE, json.dumps(choices)), 50)
    assert set(answers) <= set(choices) and len(set(answers)) >= 4


def test_thousands_of_choices_are_no_burden(engine: Engine) -> None:
    choices = [f"word {number}" for number in range(5000)]
    answers = _answers(engine, GrammarSpec(GrammarKind.CHOICE, json.dumps(choices)), 8)
    assert set(answers) <= {*choices} and len(set(answers)) > 1


@pytest.mark.parametrize("text", ['start: "a" item+\nitem: /[xy]/ "."', 'root ::= "a" ([xy] ".")+'])
def test_ebnf_in_both_spellings(engine: Engine, text: str) -> None:
    answers = _answers(engine, GrammarSpec(GrammarKind.LARK, text), 8)
    assert all(re.fullmatch(r"a([xy]\.)+", answer) for answer in answers)


def test_a_grammar_may_begin_after_free_text(engine: Engine) -> None:
    spec = GrammarSpec(GrammarKind.REGEX, "[0-9]{3}", after="#")
    answers = _answers(engine, spec, 20, logit_bias={ord("#"): 6.0})
    assert all(re.fullmatch(r"(?s:[^#]*)#[ \n]{0,4}[0-9]{3}", answer) for answer in answers)
    assert len({answer.partition("#")[0] for answer in answers}) > 3


def test_free_text_may_be_left_out_where_it_has_a_beginning_of_its_own(engine: Engine) -> None:
    spec = GrammarSpec(GrammarKind.REGEX, "[0-9]{3}", after="#", opening="$")
    answers = _answers(engine, spec, 20, logit_bias={ord("#"): 6.0, ord("$"): 3.0})
    assert all(re.fullmatch(r"(?s:\$[^#]*#[ \n]{0,4})?[0-9]{3}", answer) for answer in answers)
    assert {answer[0] == "$" for answer in answers} == {True, False}


def test_an_answer_has_one_form_or_the_other(engine: Engine) -> None:
    letters = GrammarSpec(GrammarKind.NATIVE, 'start: "ab" %json {"const": 7}')
    answers = _answers(engine, GrammarSpec(GrammarKind.REGEX, "[0-9]{3}", instead=letters), 20)
    assert all(re.fullmatch(r"ab7|[0-9]{3}", answer) for answer in answers)
    assert "ab7" in answers and len(set(answers)) > 1


def test_code_points_in_gbnf(engine: Engine) -> None:
    spec = GrammarSpec(GrammarKind.LARK, r'root ::= "\u00e9\u005c" [\u00e0-\u00e2] "\U0001F600"')
    assert all(re.fullmatch(r"é\\[à-â]😀", answer) for answer in _answers(engine, spec, 4))


def test_a_complete_grammar_ends_the_answer_whatever_else_is_asked(engine: Engine) -> None:
    spec = GrammarSpec(GrammarKind.REGEX, "abc")
    for params in (SamplingParams(grammar=spec, min_tokens=9), SamplingParams(grammar=spec, ignore_eos=True)):
        events = _run(engine, {"r": params})["r"]
        assert [event.token_id for event in events] == list(b"abc")
        assert events[-1].finish_reason is FinishReason.GRAMMAR


def test_max_tokens_ends_an_answer_inside_its_grammar_and_says_length(engine: Engine) -> None:
    spec = GrammarSpec(GrammarKind.REGEX, "abcdef")
    events = _run(engine, {"r": SamplingParams(grammar=spec, max_tokens=3)})["r"]
    assert (bytes(event.token_id or 0 for event in events), events[-1].finish_reason) == (b"abc", FinishReason.LENGTH)
    exact = _run(engine, {"r": SamplingParams(grammar=spec, max_tokens=6)})["r"]
    assert exact[-1].finish_reason is FinishReason.GRAMMAR


def test_grammars_and_free_answers_in_one_batch_do_not_touch_each_other(engine: Engine) -> None:
    requests = {
        "schema": SamplingParams(seed=1, max_tokens=240, grammar=_schema(PERSON)),
        "regex": SamplingParams(seed=2, max_tokens=60, grammar=GrammarSpec(GrammarKind.REGEX, "[a-z ]{40}")),
        "free": SamplingParams(seed=3, max_tokens=60, ignore_eos=True),
        "penalised": SamplingParams(seed=4, max_tokens=60, ignore_eos=True, presence_penalty=1.0),
        "greedy": SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    }
    together = _run(engine, requests)
    for name, params in requests.items():
        alone = _run(engine, {name: params})[name]
        assert [event.token_id for event in together[name]] == [event.token_id for event in alone]
    assert _is_person(json.loads(_text(together["schema"])))
    assert re.fullmatch("[a-z ]{40}", _text(together["regex"]))


def test_a_grammar_goes_on_after_a_preemption(engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_checkpoint(folder, "llama")
    byte_model_folder(folder, generation_config={"eos_token_id": EOS})
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4
    config = EngineConfig(model=str(folder), device="cpu", kv_gb=20 * block_bytes / 1e9)
    small = Engine(load_runner(config, lambda stage, fraction: None), config)
    pattern = "([a-z]{5} ){30}"
    requests = {
        str(seed): SamplingParams(seed=seed, max_tokens=200, grammar=GrammarSpec(GrammarKind.REGEX, pattern))
        for seed in range(4)
    }
    preempted = _run(small, requests)
    assert small.stats().num_preemptions > 0
    assert {name: _text(events) for name, events in preempted.items()} == {
        name: _text(events) for name, events in _run(engine, requests).items()
    }
    assert all(re.fullmatch(pattern, _text(events)) for events in preempted.values())


_BAD = {
    "keyword": (_schema({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}), '"not"'),
    "type": (_schema({"type": "objekt"}), "objekt"),
    "reference": (_schema({"$ref": "#/$defs/missing"}), "/$defs/missing"),
    "not a schema": (_schema([1]), "a schema is a JSON object"),
    "not JSON": (GrammarSpec(GrammarKind.JSON_SCHEMA, "{"), "Expecting"),
    "pattern": (_schema({"type": "string", "pattern": "("}), "unclosed group"),
    "regex": (GrammarSpec(GrammarKind.REGEX, "(ab"), "unclosed group"),
    "look-around": (GrammarSpec(GrammarKind.REGEX, "(?<=a)b"), "look-around"),
    "no choice": (GrammarSpec(GrammarKind.CHOICE, "[]"), "one string or more"),
    "name": (GrammarSpec(GrammarKind.LARK, "start: foo"), '"foo"'),
    "empty": (GrammarSpec(GrammarKind.LARK, ""), "No 'root' rule"),
    "name in GBNF": (GrammarSpec(GrammarKind.LARK, "root ::= foo-bar"), "GBNF grammar cannot be served: Rule"),
    "range in GBNF": (GrammarSpec(GrammarKind.LARK, "root ::= [z-a]"), 'invalid regex "[z-a]"'),
    "cut in GBNF": (GrammarSpec(GrammarKind.LARK, 'root ::= "\\'), "ends inside an escape"),
    "no text": (GrammarSpec(GrammarKind.REGEX, r"[^\s\S]"), "no text but the empty one"),
    "the empty text": (GrammarSpec(GrammarKind.LARK, 'root ::= ""'), "no text but the empty one"),
    "no text after thoughts": (GrammarSpec(GrammarKind.REGEX, "", after="#"), "no text but the empty one"),
    "keyword of a tool": (
        GrammarSpec(GrammarKind.NATIVE, 'start: a\na: %json {"type": "array", "uniqueItems": true}'),
        'The grammar cannot be served: failed to compile JSON schema: Unimplemented keys: ["uniqueItems"]',
    ),
    "no value": (_schema({"enum": []}), "anyOf is empty"),
}


@pytest.mark.parametrize("name", _BAD)
def test_a_bad_grammar_fails_its_request_alone_and_says_what_is_wrong(engine: Engine, name: str) -> None:
    spec, reason = _BAD[name]
    requests = {"bad": SamplingParams(grammar=spec, max_tokens=5), "free": SamplingParams(seed=1, max_tokens=20)}
    events = _run(engine, requests)
    assert [(event.token_id, event.finish_reason) for event in events["bad"]] == [(None, FinishReason.ERROR)]
    error = events["bad"][0].error
    assert isinstance(error, BadRequest)
    assert reason in error.message and len(error.message) < 500
    assert events["free"][-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_a_model_without_a_tokenizer_takes_no_grammars_and_serves_the_rest(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path, 259, (EOS,))
    with pytest.raises(BadRequest, match=r"takes no grammars: its folder has no tokenizer\.json"):
        compiler.compile(GrammarSpec(GrammarKind.REGEX, "a"))


@pytest.mark.parametrize("vocab_size", [300, 259, 257])
def test_logits_and_vocabulary_may_differ_in_size(tmp_path: Path, vocab_size: int) -> None:
    """Embeddings are often padded, and now and then a tokenizer names more tokens than there are logits."""
    byte_model_folder(tmp_path)
    matchers = [
        GrammarCompiler(tmp_path, vocab_size, (EOS,)).compile(GrammarSpec(GrammarKind.REGEX, pattern))
        for pattern in ("[ab]", "c*", "[ab]")
    ]
    matchers[2].accept(ord("a"))
    logits = torch.zeros(4, vocab_size)
    GrammarMasks(torch.device("cpu")).apply(logits, torch.tensor([0, 2, 3]), matchers)
    possible = [row.isfinite().nonzero().squeeze(1).tolist() for row in logits]
    end = [EOS] if vocab_size > EOS else []
    assert possible == [[97, 98], list(range(vocab_size)), [99, *end], end]


def test_a_token_that_the_grammar_does_not_allow_is_an_error_of_that_request(tmp_path: Path) -> None:
    byte_model_folder(tmp_path)
    matcher = GrammarCompiler(tmp_path, 259, (EOS,)).compile(GrammarSpec(GrammarKind.REGEX, "ab"))
    matcher.accept(ord("a"))
    assert not matcher.is_complete
    with pytest.raises(BadRequest, match="doesn't satisfy the grammar"):
        matcher.accept(ord("x"))
