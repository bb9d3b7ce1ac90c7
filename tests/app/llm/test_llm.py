"""The offline API on a tiny model with byte tokens, through a real engine child."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.chat.model_text import ModelText
from app.errors import AppError
from app.llm import LLM, SamplingParams
from app.llm.loop import LoopThread
from engine.types import GrammarKind, GrammarSpec
from tests.checkpoints import tiny_checkpoint
from tests.fakes import byte_model_folder, ids

ROOT = Path(__file__).parents[3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder, "llama", "gptq")
    return byte_model_folder(folder, generation_config={"temperature": 0.25, "top_k": 7, "eos_token_id": 257})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(model=str(folder), device="cpu", kv_gb=0.01, max_num_seqs=4, dtype="float32") as llm:
        yield llm


def test_outputs_come_in_the_order_of_the_prompts_and_do_not_depend_on_company(llm: LLM) -> None:
    prompts = [f"prompt {'x' * length}" for length in range(11)]  # more than run at once, and wait
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in together] == prompts
    assert len({output.request_id for output in together}) == len(prompts)
    for prompt, output in zip(prompts[::5], together[::5], strict=True):
        (alone,) = llm.generate(prompt=prompt, sampling_params=GREEDY, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert output.prompt_token_ids == ids(prompt)
        assert len(output.outputs[0].token_ids) == 12 and output.outputs[0].finish_reason == "length"


def test_a_prompt_may_be_text_or_token_ids_in_any_of_vllms_shapes(llm: LLM) -> None:
    shapes = ["Hi", {"prompt": "Hi"}, {"prompt_token_ids": list(ids("Hi"))}, list(ids("Hi"))]
    several = llm.generate(shapes, GREEDY, use_tqdm=False)
    one_each = [llm.generate(shape, GREEDY, use_tqdm=False)[0] for shape in shapes]
    assert len({output.outputs[0].text for output in several + one_each}) == 1
    assert [output.prompt for output in several] == ["Hi", "Hi", None, None]


def test_a_stop_string_ends_the_answer_and_is_no_part_of_it(llm: LLM) -> None:
    free = llm.generate("stop", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    text = free[0].outputs[0].text
    stop = next(char for char in text[5:] if char.isprintable() and char != "\ufffd")
    (output,) = llm.generate("stop", SamplingParams(temperature=0.0, max_tokens=40, stop=stop), use_tqdm=False)
    assert output.outputs[0].text == text[: text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_a_stop_id_is_in_token_ids_and_not_in_the_text(llm: LLM) -> None:
    first = llm.generate("id", GREEDY, use_tqdm=False)[0].outputs[0].token_ids[0]
    params = SamplingParams(temperature=0.0, stop_token_ids=[first])
    output = llm.generate("id", params, use_tqdm=False)[0].outputs[0]
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == ("", (first,), "stop", first)


def test_logprobs_have_each_token_and_the_likeliest_beside_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate("Hello", params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.logprobs is not None and len(answer.logprobs) == 5
    for token_id, found in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(found)) == token_id and len(found) == 3  # greedy: the token is one of the three
        assert found[token_id].rank == 1 and found[token_id].logprob == max(each.logprob for each in found.values())
    chosen = [found[token_id].logprob for token_id, found in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [ids("Hello")[i] in (output.prompt_logprobs[i] or {}) for i in range(1, 5)] == [True] * 4
    assert llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].logprobs is None


def test_n_answers_are_numbered_differ_and_come_again_with_their_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    prompt = "n answers share one prompt, which is computed once"
    first, again = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert [answer.index for answer in first.outputs] == [0, 1, 2]
    assert len({answer.token_ids for answer in first.outputs}) == 3
    assert [a.token_ids for a in first.outputs] == [a.token_ids for a in again.outputs]
    alone = SamplingParams(seed=6, max_tokens=12, ignore_eos=True)
    assert llm.generate(prompt, alone, use_tqdm=False)[0].outputs[0].token_ids == first.outputs[1].token_ids


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (2, 5)]
    outputs = llm.generate(["a", "b"], each, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    with pytest.raises(ValueError, match="3 prompts and 2 sampling_params"):
        llm.generate(["a", "b", "c"], each)
    with pytest.raises(ValueError, match="2 prompts and 1 priority"):
        llm.generate(["a", "b"], GREEDY, priority=[1])


def test_priorities_are_taken_and_outputs_keep_the_order_of_the_prompts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    outputs = llm.generate([f"p{i}" for i in range(6)], params, priority=[3, 2, 1, 0, -1, -2], use_tqdm=False)
    assert [output.prompt for output in outputs] == [f"p{i}" for i in range(6)]


def test_chat_uses_the_models_template(llm: LLM) -> None:
    talk = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    (one,) = llm.chat(talk, GREEDY, use_tqdm=False)
    assert one.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    both = llm.chat([talk, [*talk, {"role": "assistant", "content": "Yes"}, *talk]], GREEDY, use_tqdm=False)
    assert both[0].outputs[0].text == one.outputs[0].text and "Yes<|im_end|>" in (both[1].prompt or "")
    begun = [*talk, {"role": "assistant", "content": "Well"}]
    (output,) = llm.chat(begun, GREEDY, continue_final_message=True, use_tqdm=False)
    assert (output.prompt or "").endswith("assistant\nWell")


def test_without_params_the_models_own_defaults_hold(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.25, 7, 1.0, 16)
    assert len(llm.generate("x", use_tqdm=False)[0].outputs[0].token_ids) <= 16


async def test_it_works_where_a_loop_runs_already(llm: LLM) -> None:
    """As in a notebook's cell."""
    assert asyncio.get_running_loop().is_running()
    assert llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].text


def test_the_bar_shows_prompts_and_tokens_a_second(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown and "tokens/s" in shown
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_asked_of_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(llm._engine, "submit", lambda *request, **more: asked.append(request))
    room = llm.info.max_model_len
    with pytest.raises(ValueError, match=rf"Prompt 1 has {room} tokens and its answer up to 12; .* room for {room}"):
        llm.generate(["short", "x" * room], GREEDY, use_tqdm=False)
    assert asked == []


def test_a_refused_request_gives_up_the_others_and_leaves_the_model_usable(llm: LLM) -> None:
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    with pytest.raises(AppError, match="top_p"):
        llm.generate(["a", "b"], [long, SamplingParams(top_p=7.0)], use_tqdm=False)
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: SamplingParams(temprature=0.0), "SamplingParams has no keyword temprature. It has n, max_tokens"),
        (lambda llm: LLM("x", swap_space=4), "LLM has no keyword swap_space. It has model, quantization, dtype"),
        (lambda llm: llm.generate("x", lora_request=1), "LLM.generate has no keyword lora_request. It has prompts"),
        (lambda llm: llm.chat([], tools=[]), "LLM.chat has no keyword tools"),
    ],
)
def test_an_unknown_keyword_is_an_error_that_lists_the_known_ones(llm: LLM, call, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call(llm)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: LLM("x", tensor_parallel_size=2), "tensor_parallel_size is 2"),
        (lambda llm: SamplingParams(n=0), "n is 0"),
        (
            lambda llm: SamplingParams(structured_outputs={"yaml": ""}),
            "has yaml; .* json, json_object",
        ),
        (lambda llm: llm.generate(), "Give prompts or prompt"),
        (lambda llm: llm.generate({"text": "x"}), "A prompt has text"),
        (lambda llm: llm.chat([{"role": "robot", "content": "x"}]), "the role 'robot'"),
        (lambda llm: llm.chat([{"role": "user", "content": [{"type": "image_url"}]}]), "text parts only"),
        (lambda llm: llm.chat([{"role": "user", "content": "x", "tool_calls": []}]), "tool_calls, which Fireside"),
        (lambda llm: llm.chat([[{"role": "user", "content": "x"}, "y"]]), "A message is 'y'"),
    ],
)
def test_arguments_without_sense_are_refused_in_words(llm: LLM, call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(llm)


def test_a_quantization_that_the_checkpoint_is_not_is_an_error(folder: Path) -> None:
    with pytest.raises(AppError, match=r"quantization is 'awq', but .* is gptq"):
        LLM(model=str(folder), quantization="awq", device="cpu", kv_gb=0.01)


def test_a_model_that_cannot_be_had_or_computed_says_so(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(AppError, match="dtype is 'int4'; it must be one of"):
        LLM(model=str(folder), dtype="int4")
    with pytest.raises(AppError, match=r"no config\.json"):
        LLM(model=str(tmp_path))


def test_closing_ends_the_process_and_later_calls_say_so(folder: Path) -> None:
    with LLM(model=str(folder), quantization="gptq", dtype="half", device="cpu", kv_gb=0.01) as llm:
        pid = llm._engine.pid
        assert pid is not None and psutil.pid_exists(pid)
        assert (llm.info.dtype, llm.info.quantization) == ("float16", "gptq")
        assert llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert not psutil.pid_exists(pid)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x", GREEDY, use_tqdm=False)


def test_dropping_the_last_reference_frees_everything(folder: Path) -> None:
    llm = LLM(model=str(folder), device="cpu", kv_gb=0.01)
    pid = llm._engine.pid
    del llm
    assert pid is not None and not psutil.pid_exists(pid)


def test_an_interruption_gives_up_the_work() -> None:
    loop, was_cancelled = LoopThread(), threading.Event()

    async def endless() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            was_cancelled.set()

    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            loop.run(endless())
    finally:
        signal.signal(signal.SIGINT, before)
    assert was_cancelled.wait(timeout=30)
    loop.close()


def test_every_word_of_the_params_reaches_the_engine(folder: Path) -> None:
    text = ModelText.load(folder)
    params = SamplingParams(
        n=2,
        seed=3,
        min_tokens=2,
        min_p=0.1,
        top_k=-1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={5: 1.0},
        allowed_token_ids=[5, 6],
        stop=["<|im_end|>", "END"],
        structured_outputs={"choice": ["a", "b"]},
    )
    asked = params.for_engine(text, index=1)
    assert (asked.seed, asked.min_tokens, asked.min_p, asked.top_k) == (4, 2, 0.1, 0)
    assert (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (asked.logit_bias, asked.allowed_token_ids, asked.stop_token_ids) == ({5: 1.0}, (5, 6), (257,))
    assert asked.grammar == GrammarSpec(GrammarKind.CHOICE, '["a", "b"]')


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("logit_bias['a'] is 'a'", {"logit_bias": {"a": 1}}),
        ("logit_bias[28] is 'x'", {"logit_bias": {28: "x"}}),
        ("logprobs is 1.5", {"logprobs": 1.5}),
        ("min_p is 'x'", {"min_p": "x"}),
        ("n is 2.5", {"n": 2.5}),
        ("n is 129; it must be from 1 to 128", {"n": 129}),
        ("top_k is -5", {"top_k": -5}),
        ("allowed_token_ids is empty", {"allowed_token_ids": []}),
        ("stop_token_ids[0] is 'a'", {"stop_token_ids": ["a"]}),
        ("stop", {"stop": 5}),
        ("structured_outputs is 'x'", {"structured_outputs": "x"}),
        ("the regex 5; it must be a string", {"structured_outputs": {"regex": 5}}),
    ],
)
def test_a_param_of_another_kind_is_refused_by_name(words: str, given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        SamplingParams(**given)  # type: ignore[arg-type]


def test_numbers_written_as_text_are_taken_as_over_http() -> None:
    params = SamplingParams(max_tokens="5", logit_bias={"28": 100})  # type: ignore[arg-type, dict-item]
    assert (params.max_tokens, params.logit_bias) == (5, {28: 100.0})


def _run_script(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    command, environment = [sys.executable, str(script)], {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)


def test_a_script_without_a_guard_is_told_and_starts_no_second_engine(tmp_path: Path, folder: Path) -> None:
    runs = tmp_path / "runs"
    done = _run_script(
        tmp_path,
        f"""
        open({str(runs)!r}, "a").write("run\\n")
        from app.llm import LLM
        llm = LLM(model={str(folder)!r}, device="cpu", kv_gb=0.01)
        """,
    )
    assert done.returncode != 0
    assert 'if __name__ == "__main__":' in done.stderr
    assert runs.read_text().count("run") == 2  # the script, and its engine's process reading it


@pytest.mark.slow
def test_the_readmes_script_runs_as_shown(tmp_path: Path, embedded_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## From Python")[1]
    monkeypatch.setenv("FIRESIDE_HOME", str(embedded_home))
    done = _run_script(tmp_path, section.split("```python\n")[1].split("```")[0])
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.strip().splitlines()
    assert first.startswith("The capital of France is ->") and "Paris" in first
    assert last.endswith(("stop", "length")) and "tokens/s" in done.stderr


def test_a_script_with_a_guard_runs(tmp_path: Path, folder: Path) -> None:
    done = _run_script(
        tmp_path,
        f"""
        from app.llm import LLM, SamplingParams
        if __name__ == "__main__":
            llm = LLM(model={str(folder)!r}, device="cpu", kv_gb=0.01)
            print(len(llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))
        """,
    )
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
