"""The grammars of tool calls let through what the format's parser reads, and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest

from app.chat.channels import THINK
from app.chat.grammars import after_thinking, chat_options
from app.chat.tools.choose import FORMATS
from app.chat.types import ChatRequest, Message, NamedTool, SamplingOptions, ToolSpec
from app.errors import AppError
from engine.errors import BadRequest
from engine.sampling.grammar import GrammarCompiler
from engine.types import GrammarKind, GrammarSpec
from tests.app.chat.tools.test_formats import (
    HERMES,
    HERMES_NOW,
    LLAMA,
    MISTRAL,
    NAMED,
    NOW,
    TOOLS,
    WEATHER,
    XML,
    XML_NOW,
)
from tests.fakes import EOS, byte_model_folder

WORDS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
IDS = {word: 259 + index for index, word in enumerate(WORDS)}
WRITTEN = {
    "hermes": f"{HERMES}\n{HERMES_NOW}",
    "qwen3_xml": f"{XML}\n{XML_NOW}",
    "mistral": MISTRAL,
    "mistral_v11": NAMED,
    "llama3_json": LLAMA,
    "pythonic": '[get_weather(city="Paris", days=3), now()]',
}
BEGUN_WELL = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"ci',
    "qwen3_xml": "<tool_call>\n<function=get_weather>\n<parameter=ci",
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"ci',
    "mistral_v11": '[TOOL_CALLS]get_weather[ARGS]{"ci',
    "llama3_json": '{"name": "get_weather", "parameters": {"ci',
    "pythonic": "[get_weather(ci",
}


class Vocabulary:
    """Bytes, and maybe the formats' tags as tokens of their own."""

    def __init__(self, folder: Path, *, has_tags: bool) -> None:
        byte_model_folder(folder, words=WORDS if has_tags else ())
        self.ids = IDS if has_tags else {}
        self._compiler = GrammarCompiler(folder, 300, (EOS,))

    def tokens(self, text: str) -> list[int]:
        tokens = []
        while text:
            tag = next((tag for tag in self.ids if text.startswith(tag)), None)
            tokens += [self.ids[tag]] if tag else list(text[0].encode())
            text = text[len(tag or text[0]) :]
        return tokens

    def takes(self, spec: GrammarSpec | None, text: str, *, whole: bool = True) -> bool:
        """The grammar lets the text through; `whole`: and an answer may end there."""
        assert spec is not None
        matcher = self._compiler.compile(spec)
        for token in self.tokens(text):
            try:
                matcher.accept(token)
            except BadRequest:
                return False
        return not whole or matcher.inner.is_accepting()


@pytest.fixture(scope="module", params=[True, False], ids=["tags are tokens", "tags are text"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(tmp_path_factory.mktemp("vocabulary"), has_tags=request.param)


def asked(**changes: object) -> ChatRequest:
    request = ChatRequest(request_id="r", model="", messages=(Message(role="user", content="x"),), tools=TOOLS)
    return replace(request, **changes)  # type: ignore[arg-type]


def grammar(vocabulary: Vocabulary, format: str, **changes: object) -> GrammarSpec | None:
    return chat_options(asked(**changes), FORMATS[format], vocabulary.ids.get).grammar


@pytest.mark.parametrize("format", FORMATS)
def test_required_lets_calls_through_and_no_other_word(vocabulary: Vocabulary, format: str) -> None:
    spec = grammar(vocabulary, format, tool_choice="required")
    assert vocabulary.takes(spec, WRITTEN[format])
    assert vocabulary.takes(spec, BEGUN_WELL[format], whole=False)
    assert not vocabulary.takes(spec, BEGUN_WELL[format])
    assert not vocabulary.takes(spec, "It is", whole=False)
    assert not vocabulary.takes(spec, WRITTEN[format].replace("get_weather", "get_whether"), whole=False)


@pytest.mark.parametrize("format", FORMATS)
def test_a_tool_without_parameters_is_called_with_none(vocabulary: Vocabulary, format: str) -> None:
    spec = grammar(vocabulary, format, tools=(ToolSpec(name="now"),), tool_choice="required")
    assert vocabulary.takes(spec, FORMATS[format].written([("now", {})]))
    assert not vocabulary.takes(spec, FORMATS[format].written([("now", {"zone": 1})]), whole=False)


@pytest.mark.parametrize("format", FORMATS)
def test_a_named_tool_is_called_once_and_no_other(vocabulary: Vocabulary, format: str) -> None:
    spec = grammar(vocabulary, format, tool_choice=NamedTool("now"))
    now = FORMATS[format].written([("now", {})])
    assert vocabulary.takes(spec, now)
    assert not vocabulary.takes(spec, BEGUN_WELL[format], whole=False)
    assert not vocabulary.takes(spec, now + now, whole=False) and not vocabulary.takes(
        spec, f"{now}\n{now}", whole=False
    )


@pytest.mark.parametrize("format", FORMATS)
def test_none_lets_any_text_through_but_a_call(vocabulary: Vocabulary, format: str) -> None:
    spec = grammar(vocabulary, format, tool_choice="none")
    assert vocabulary.takes(spec, "Of [1] and {2}: <b>")
    assert not vocabulary.takes(spec, WRITTEN[format], whole=False)


@pytest.mark.parametrize("format", FORMATS)
def test_auto_binds_the_calls_of_strict_tools_and_no_text(vocabulary: Vocabulary, format: str) -> None:
    assert grammar(vocabulary, format) is None
    spec = grammar(vocabulary, format, tools=(replace(WEATHER, is_strict=True), NOW))
    assert vocabulary.takes(spec, "It is warm.") and vocabulary.takes(spec, WRITTEN[format])
    assert not vocabulary.takes(spec, WRITTEN[format].replace("get_weather", "get_whether"), whole=False)
    if not FORMATS[format].at_start:
        assert vocabulary.takes(spec, f"Let me see.\n{WRITTEN[format]}")


def test_with_a_form_the_answer_is_a_call_or_of_that_form(vocabulary: Vocabulary) -> None:
    form = GrammarSpec(GrammarKind.REGEX, "[0-9]+")
    spec = grammar(vocabulary, "hermes", sampling=SamplingOptions(grammar=form))
    assert vocabulary.takes(spec, "42") and vocabulary.takes(spec, HERMES)
    assert not vocabulary.takes(spec, "It is", whole=False)


def test_thinking_comes_first_where_the_model_opens_it(vocabulary: Vocabulary) -> None:
    options = chat_options(asked(tool_choice="required"), FORMATS["hermes"], vocabulary.ids.get)
    spec = after_thinking(options, THINK, is_open=False).grammar
    assert vocabulary.takes(spec, HERMES) and vocabulary.takes(spec, f"<think>so {{</think>\n\n{HERMES}")
    assert not vocabulary.takes(spec, "so", whole=False)
    inside = after_thinking(options, THINK, is_open=True).grammar
    assert vocabulary.takes(inside, f"so</think>\n{HERMES}") and not vocabulary.takes(inside, HERMES)


def test_bad_words_come_nowhere(vocabulary: Vocabulary) -> None:
    words = ("bad", "(x)", "a/b", "ü\n")
    spec = grammar(vocabulary, "hermes", tools=(), sampling=SamplingOptions(bad_words=words), tool_choice="none")
    assert vocabulary.takes(spec, "ba d (x] a-b ü.")
    assert not any(vocabulary.takes(spec, f"so {word}", whole=False) for word in words)
    with pytest.raises(AppError, match="`bad_words` cannot be kept together"):
        grammar(vocabulary, "hermes", tool_choice="required", sampling=SamplingOptions(bad_words=words))
