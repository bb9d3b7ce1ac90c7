"""Raw completions, gaps to fill and progress over HTTP, over a scripted engine."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.types import FinishReason, RequestClass, TokenEvent
from tests.app.api.house import USER, House
from tests.fakes import FakeEngine, Script, byte_model_folder, ids

FIM = ["<|fim_prefix|>", "<|fim_suffix|>"]  # beside the <|fim_middle|> that the folder has anyway


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model_folder(tmp_path_factory.mktemp("code-model"), words=FIM)


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model_folder(tmp_path_factory.mktemp("byte-model"))


def prompt_of(house: House) -> str:
    spelled = {257: "<E>", 258: "<|fim_middle|>", 259: FIM[0], 260: FIM[1]}
    return "".join(spelled.get(token) or chr(token) for token in house.engine.submitted[-1][1])


async def test_echo_with_max_tokens_0_gives_the_prompt_and_its_scores_alone(plain_folder: Path) -> None:
    house = House(plain_folder, Script(token_ids=ids("zzz")))
    answer = (await house.complete(prompt="abc", echo=True, max_tokens=0, logprobs=1)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.098, -0.099]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["prompt_tokens"] == 3
    assert house.engine.submitted[0][2].max_tokens == 1


async def test_echo_before_an_answer(plain_folder: Path) -> None:
    house = House(plain_folder, Script(token_ids=ids("de"), finish=FinishReason.LENGTH))
    choice = (await house.complete(prompt="abc", echo=True, max_tokens=2, logprobs=0)).json()["choices"][0]
    assert choice["text"] == "abcde" and choice["logprobs"]["tokens"] == list("abcde")


async def test_more_than_four_stop_strings(plain_folder: Path) -> None:
    house = House(plain_folder, Script(token_ids=ids("abcXdef")))
    stops = [f"<{number}>" for number in range(20)] + ["X"]
    choice = (await house.complete(stop=stops)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", "X")


async def test_a_prompt_is_cut_only_where_that_was_asked(plain_folder: Path) -> None:
    house = House(plain_folder, Script(token_ids=ids("!")))
    assert (await house.complete(prompt="x" * 500)).status_code == 400
    cut = (await house.complete(prompt="x" * 496 + "tail", truncate_prompt_tokens=6, echo=True)).json()
    assert cut["usage"]["prompt_tokens"] == 6 and cut["choices"][0]["text"] == "xxtail!"
    most = (await house.complete(prompt="x" * 500, truncate_prompt_tokens=-1, max_tokens=50)).json()
    assert most["usage"]["prompt_tokens"] == 150
    assert (await house.complete(prompt="x" * 50_000, truncate_prompt_tokens=6)).status_code == 400


async def test_control_tokens_are_shown_where_that_was_asked(plain_folder: Path) -> None:
    house = House(plain_folder, Script(token_ids=(*ids("a"), 258, *ids("b"))))
    texts = [(await house.complete(skip_special_tokens=skip)).json()["choices"][0]["text"] for skip in (True, False)]
    assert texts == ["ab", "a<|fim_middle|>b"]


async def test_a_suffix_makes_the_prompt_that_the_vocabulary_knows(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("return 1")))
    answer = (await house.complete(prompt="def f():\n", suffix="\n\nf()", echo=False)).json()
    assert answer["choices"][0]["text"] == "return 1"
    assert prompt_of(house) == "<|fim_prefix|>def f():\n<|fim_suffix|>\n\nf()<|fim_middle|>"


async def test_infill_as_llama_cpp_has_it(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("b\nc"), num_cached=2))
    body = {
        "input_prefix": "a = 1\n",
        "prompt": "a",
        "input_suffix": "d",
        "input_extra": [{"filename": "x.py", "text": "X"}],
        "stop": ["\n"],
        "n_predict": 50,
        "samplers": ["top_k"],
    }
    whole = (await house.ask("POST", "/infill", json=body)).json()
    assert (whole["content"], whole["stop_type"], whole["stopping_word"]) == ("b", "word", "\n")
    assert prompt_of(house) == "X\n\n<|fim_prefix|>a = 1\na<|fim_suffix|>d<|fim_middle|>"
    assert house.engine.standings[0].request_class is RequestClass.AUTOCOMPLETE
    stream = (await house.ask("POST", "/infill", json=body | {"stream": True})).text
    pieces = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n\n") if line]
    assert "".join(piece["content"] for piece in pieces) == "b"
    assert [piece["stop"] for piece in pieces][-1] is True and not any(piece["stop"] for piece in pieces[:-1])


async def test_infill_of_no_tokens_warms_the_cache_and_says_nothing(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("zz")))
    whole = (await house.ask("POST", "/infill", json={"input_prefix": "a", "n_predict": 0})).json()
    assert (whole["content"], whole["tokens_predicted"]) == ("", 0) and len(house.engine.submitted) == 1


async def test_fim_as_mistral_has_it(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("b")))
    for path in ("/v1/fim/completions", "/fim/completions"):
        answer = (await house.ask("POST", path, json={"prompt": "a", "suffix": "c", "max_tokens": 5})).json()
        assert answer["choices"][0]["message"]["content"] == "b"
    stream = (await house.ask("POST", path, json={"prompt": "a", "suffix": "c", "stream": True})).text
    assert '"delta":{"content":"b"}' in stream and stream.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/infill", {"input_prefix": "a"}),
        ("/fim/completions", {"prompt": "a"}),
    ],
)
async def test_a_model_that_fills_no_gaps_says_so(plain_folder: Path, path: str, body: dict[str, Any]) -> None:
    reply = await House(plain_folder).ask("POST", path, json=body)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "no_fim_tokens"


class Computing(FakeEngine):
    """Tells the progress of its prompt as the engine does, where that was asked."""

    async def submit(self, request_id: str, prompt: tuple[int, ...], params: Any, *rest: Any) -> Any:
        for done in (8, 16) if params.reports_progress else ():
            yield TokenEvent(request_id, None, None, len(prompt), 4, num_computed_tokens=done)
        async for event in super().submit(request_id, prompt, params, *rest):
            yield event


async def test_progress_of_a_prompt_is_in_the_stream_where_it_was_asked(plain_folder: Path) -> None:
    house = House(plain_folder, Script(token_ids=ids("ok")))
    house.source.model.engine = Computing(Script(token_ids=ids("ok")))
    reply = await house.chat(stream=True, stream_options={"include_progress": True, "include_usage": True})
    frames = _frames(reply)
    told = [frame["prompt_progress"] for frame in frames if "prompt_progress" in frame]
    assert [(block["processed"], block["cache"]) for block in told] == [(8, 4), (16, 4)]
    assert all(frame["choices"][0]["delta"] == {} for frame in frames if "prompt_progress" in frame)
    assert "".join(f["choices"][0]["delta"].get("content", "") for f in frames if f["choices"]) == "ok"
    silent = _frames(await house.chat(stream=True))
    assert not any("prompt_progress" in frame for frame in silent)


async def test_a_grammar_is_compiled_before_a_stream_begins(plain_folder: Path) -> None:
    """Its refusal is a status, however long the compiler takes."""
    gate = asyncio.Event()
    house = House(plain_folder, Script(token_ids=ids("1"), gate=gate))
    body = {"messages": [USER], "stream": True, "structured_outputs": {"regex": "[0-9]"}}
    async with house.client() as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await asyncio.sleep(0.4)  # longer than a refusal is waited for otherwise
        assert not asked.done()
        gate.set()
        reply = await asked
    assert reply.status_code == 200 and '"content":"1"' in reply.text
    assert house.engine.submitted[0][2].reports_progress


def _frames(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in reply.text.split("\n\n") if line.startswith("data: {"))
    return [json.loads(line) for line in lines]
