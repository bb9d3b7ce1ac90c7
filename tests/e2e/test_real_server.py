"""The openai package against the whole thing: server process, engine child, real weights, real socket."""

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import openai
import psutil
import pytest

_PATIENCE_S = 240.0  # a start on a machine that is busy with other tests
_START = "import sys; from app.server import main; sys.exit(main(sys.argv[1:]))"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."  # greedy, from the source weights


class Server:
    """One run of Fireside in a process of its own."""

    def __init__(self, home: Path, *flags: str) -> None:
        command = [sys.executable, "-c", _START, "--home", str(home), "--port", "0", "--no-browser", *flags]
        self.process = subprocess.Popen(
            [*command, "--max-num-seqs", "16", "--kv-gb", "0.2"],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        told: Queue[str | None] = Queue()
        threading.Thread(target=self._read, args=(told,), daemon=True).start()
        self.url = self._address(told)

    def _read(self, told: "Queue[str | None]") -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            told.put(line)
        told.put(None)

    def _address(self, told: "Queue[str | None]") -> str:
        deadline = time.monotonic() + _PATIENCE_S
        while (line := told.get(timeout=max(1.0, deadline - time.monotonic()))) is not None:
            if found := re.search(r"Fireside is ready: (http://\S+)", line):
                return found.group(1)
        raise AssertionError("the server ended before it was ready:\n" + "".join(self.lines))

    def engine_process(self) -> psutil.Process:
        """The child that has the model (multiprocessing's resource tracker is a child too)."""
        children = psutil.Process(self.process.pid).children()
        (engine,) = (child for child in children if any("spawn_main" in word for word in child.cmdline()))
        return engine

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=_PATIENCE_S)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        return float(next(line for line in text.splitlines() if line.startswith(f"fireside_{name} ")).split()[-1])

    async def until_idle(self) -> None:
        """No request runs or waits, and every block is free."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        async with asyncio.timeout(60):
            while any(self.metric(name) for name in names):
                await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def server(embedded_home: Path) -> Iterator[Server]:
    running = Server(embedded_home)
    yield running
    running.process.terminate()
    running.process.wait(timeout=30)


async def chat(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    asked = {"model": "", "messages": FRANCE, "temperature": 0, "max_tokens": 16} | fields
    return await client.chat.completions.create(**asked)


async def text_of(stream: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def test_a_chat_is_right_whole_and_streamed_with_true_numbers(server: Server) -> None:
    async with server.client() as client:
        whole = await chat(client)
        again = await chat(client)
        stream = [chunk async for chunk in await chat(client, stream=True, stream_options={"include_usage": True})]
    assert whole.choices[0].message.content == ANSWER
    assert (whole.choices[0].finish_reason, whole.model) == ("stop", "smollm2-135m-instruct")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (37, 8)
    assert again.usage.prompt_tokens_details.cached_tokens == 32  # two full blocks of sixteen
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == ANSWER
    assert stream[-1].usage == again.usage


async def test_a_stop_string_across_tokens_and_max_tokens(server: Server) -> None:
    async with server.client() as client:
        stopped = await chat(client, stop=["rance is", "zzz"])
        cut = await chat(client, max_tokens=3)
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("The capital of F", "stop")
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("The capital of", "length")
    await server.until_idle()


async def test_an_answer_can_be_continued(server: Server) -> None:
    async with server.client() as client:
        answer = await chat(client, messages=[*FRANCE, {"role": "assistant", "content": "The capital"}])
    assert answer.choices[0].message.content == " of France is Paris."


async def test_completions_by_text_and_by_ids_agree(server: Server) -> None:
    async with server.client() as client:
        options: dict[str, Any] = {"model": "", "max_tokens": 6, "temperature": 0, "echo": True}
        by_text = await client.completions.create(prompt="The capital of France is", **options)
        by_ids = await client.completions.create(prompt=[[504, 3575, 282, 4649, 314]], **options)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.choices[0].text.startswith("The capital of France is Paris")
    assert by_text.usage == by_ids.usage or by_ids.usage.prompt_tokens == by_text.usage.prompt_tokens == 5


async def test_a_seed_repeats_and_n_answers_differ(server: Server) -> None:
    story = [{"role": "user", "content": "Write one odd sentence about the sea."}]
    async with server.client() as client:
        first = await chat(client, messages=story, temperature=1.5, seed=11, n=3)
        second = await chat(client, messages=story, temperature=1.5, seed=11, n=3)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3


async def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(server: Server) -> None:
    async with server.client() as client:
        room = (await client.models.retrieve("smollm2-135m-instruct")).model_extra["max_model_len"]
        with pytest.raises(openai.BadRequestError, match=f"maximum context length is {room} tokens") as caught:
            await chat(client, messages=[{"role": "user", "content": "word " * 9000}])
    assert caught.value.code == "context_length_exceeded"


async def test_answers_at_once_are_the_answers_alone(server: Server) -> None:
    countries = ["France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Kenya", "Norway"]
    questions = [[{"role": "user", "content": f"What is the capital of {country}?"}] for country in countries]
    async with server.client() as client:
        alone = [(await chat(client, messages=question)).choices[0].message.content for question in questions]
        streams = await asyncio.gather(*(chat(client, messages=question, stream=True) for question in questions))
        together = await asyncio.gather(*map(text_of, streams))
    assert together == alone
    assert len(set(alone)) == len(alone)


async def test_clients_that_leave_free_everything(server: Server) -> None:
    long_answer = {
        "messages": [{"role": "user", "content": "Count to one thousand."}],
        "max_tokens": 2000,
        "extra_body": {"ignore_eos": True},
    }
    async with server.client() as client:

        async def leave(number: int) -> None:
            stream = await chat(client, **long_answer, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content or number % 2:  # some before the first token, some after
                    break
            await stream.close()

        for start in range(0, 24, 12):
            await asyncio.gather(*map(leave, range(start, start + 12)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await chat(client, **long_answer)
        await server.until_idle()
        assert (await chat(client)).choices[0].message.content == ANSWER


async def test_a_killed_engine_is_an_error_event_and_the_next_request_gets_a_fresh_one(server: Server) -> None:
    async with server.client() as client:
        stream = await chat(
            client,
            messages=[{"role": "user", "content": "Count to one thousand."}],
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        killed = server.engine_process()
        with pytest.raises(openai.APIError) as caught:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    with suppress(psutil.NoSuchProcess):
                        killed.kill()
        assert not isinstance(caught.value, openai.APIConnectionError)  # an event, not a broken line
        assert (await chat(client)).choices[0].message.content == ANSWER
    assert server.engine_process().pid != killed.pid


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


async def test_a_forced_call_has_arguments_of_its_schema_streamed_or_not(server: Server) -> None:
    """The embedded model's template knows no tools: they are told in words, and a grammar keeps the form."""
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    options: Any = {"tools": [WEATHER], "tool_choice": named, "temperature": 0, "max_tokens": 80}
    async with server.client() as client:
        whole = (await client.chat.completions.create(model="", messages=FRANCE, **options)).choices[0]
        stream = await client.chat.completions.create(model="", messages=FRANCE, stream=True, **options)
        deltas = [chunk.choices[0] async for chunk in stream]
    (call,) = whole.message.tool_calls or []
    pieces = [piece.function.arguments or "" for choice in deltas for piece in choice.delta.tool_calls or []]  # type: ignore[union-attr]
    arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
    assert "".join(pieces) == call.function.arguments  # type: ignore[union-attr]
    assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("C", "F") and len(arguments["city"]) <= 12
    assert whole.finish_reason == deltas[-1].finish_reason == "tool_calls" and whole.message.content is None


async def test_a_keyword_that_no_grammar_keeps_is_a_400_that_names_it(server: Server) -> None:
    schema = {"type": "array", "uniqueItems": True}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with server.client() as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
                await client.chat.completions.create(model="", messages=FRANCE, response_format=form, stream=stream)
            assert caught.value.param == "response_format"


async def test_progress_of_a_long_prompt_is_told(server: Server) -> None:
    messages = [{"role": "user", "content": "word " * 700}]
    async with server.client() as client:
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            model="",
            messages=messages,
            max_tokens=1,
            stream=True,
            extra_body={"stream_options": {"include_progress": True}},
        )
        told = [progress async for chunk in stream if (progress := (chunk.model_extra or {}).get("prompt_progress"))]
    assert told and [block["processed"] for block in told] == sorted({block["processed"] for block in told})
    assert all(block["processed"] < block["total"] for block in told)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_forms_of_the_model_stay_beside_each_other_and_are_swapped_under_eight_streams(
    embedded_home: Path,
) -> None:
    """Two of the four have room; each answers as it does alone, nothing is cut, and the first is let go of last."""
    running = Server(embedded_home, "--max-models", "2", "--drain-timeout", "120")
    forms = ["smollm2-135m-instruct", *(f"smollm2-135m-instruct-{form}" for form in ("gptq", "awq", "dense"))]
    seconds: list[float] = []
    try:
        async with running.client().with_options(timeout=600) as client:
            alone = {}
            for form in forms:
                alone[form] = (await chat(client, model=form)).choices[0].message.content
            assert alone[forms[0]] == alone[forms[3]] == ANSWER
            for number in range(8):
                old, new = forms[number % 4], forms[(number + 1) % 4]
                streams = await asyncio.gather(*(chat(client, model=old, stream=True) for _ in range(8)))
                texts = [asyncio.create_task(text_of(stream)) for stream in streams]
                began = time.monotonic()
                assert (await chat(client, model=new)).choices[0].message.content == alone[new]
                seconds.append(time.monotonic() - began)
                assert await asyncio.gather(*texts) == [alone[old]] * 8
                models = {model.id: model.model_extra for model in (await client.models.list()).data}
                loaded = {name for name in forms if (models[name] or {})["state"] == "loaded"}
                assert {old, new} == loaded
        print(
            f"\nto the answer of a form that is not loaded, under 8 streams: {sorted(seconds)[4]:.1f} s in the middle"
        )
    finally:
        running.process.terminate()
        running.process.wait(timeout=30)
