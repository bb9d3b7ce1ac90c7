"""`llm`, the command line tool, with Fireside in its extra-openai-models.yaml."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llm
import openai
import pytest
import yaml
from click.testing import CliRunner
from llm.cli import cli

from tests.clients.scenes import ADA, ADA_SCHEMA, REPORT, UNICODE
from tests.clients.stage import MODEL, Stage
from tests.clients.table import Client

CLIENT = Client("llm", "llm")
proves = pytest.mark.proves


@pytest.fixture(scope="module")
def user_folder(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's settings of `llm` with one model more."""
    folder = tmp_path_factory.mktemp("llm")
    entry = {"model_id": "fireside", "model_name": MODEL, "api_base": f"{stage.url}/v1"}
    entry |= {"supports_tools": True, "supports_schema": True}
    (folder / "extra-openai-models.yaml").write_text(yaml.safe_dump([entry]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLM_USER_PATH", str(folder))
        yield folder


@pytest.fixture
def model(user_folder: Path) -> Any:
    return llm.get_model("fireside")


def run(*words: str) -> str:
    result = CliRunner().invoke(cli, list(words))
    assert result.exit_code == 0, result.output
    return result.output.rstrip("\n")


@proves("chat", "stream", "unicode")
@pytest.mark.parametrize("flags", [[], ["--no-stream"]])
def test_a_prompt_on_the_command_line(user_folder: Path, flags: list[str]) -> None:
    assert run("prompt", "scene:unicode", "-m", "fireside", "--no-log", *flags) == UNICODE


@proves("usage")
def test_the_three_counts_are_told(model: Any) -> None:
    for stream in (True, False):
        response = model.prompt("scene:plain", stream=stream)
        assert response.text() == "Paris."
        assert response.usage().output == 7


@proves("stop")
def test_nothing_of_a_stop_string_is_seen(model: Any) -> None:
    assert model.prompt("scene:stop", stop="</s>").text() == "one"


@proves("schema")
def test_a_schema_without_strict_reaches_the_engine(model: Any, stage: Stage) -> None:
    assert json.loads(model.prompt("scene:json", schema=ADA_SCHEMA).text()) == ADA
    assert "integer" in stage.last_params().grammar.text


def get_weather(city: str) -> str:
    """Weather of a city."""
    return REPORT


@proves("tools", "tool_stream", "parallel")
def test_a_chain_of_calls_ends_in_the_answer(model: Any) -> None:
    for stream in (True, False):
        for scene in ("tool", "tools"):
            chain = model.chain(f"scene:{scene}", tools=[get_weather], stream=stream)
            assert chain.text() == f"It is {REPORT}."


@proves("errors")
def test_an_error_says_which_option_is_wrong(model: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="`seed`"):
        model.prompt("scene:plain", seed=-(2**70)).text()
