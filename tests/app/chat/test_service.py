"""ChatService: a whole turn over a scripted engine. What comes out, what the engine was asked, how a turn ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.chat.model_text import ModelText, text_notes
from app.chat.service import ChatService, TurnRecord
from app.chat.tokenizer import Tokenizer
from app.chat.types import ChatDelta, ChatRequest, CompletionRequest, Message, Role, SamplingOptions, ToolSpec
from app.errors import AppError
from engine.errors import ContextTooLong, EngineClosed, EngineDied, TooManyRequests
from engine.types import FinishReason, GrammarKind, GrammarSpec, RequestClass, Standing
from tests.fakes import BOS, EOS, FIM, FakeEngine, FakeModel, FakeSource, Script, byte_model_folder, ids, model_info


class Turns:
    """TurnObserver that remembers."""

    def __init__(self) -> None:
        self.records: list[TurnRecord] = []
        self.first: list[float] = []
        self.gaps: list[float] = []

    def first_token(self, ttft_s: float) -> None:
        self.first.append(ttft_s)

    def token(self, gap_s: float) -> None:
        self.gaps.append(gap_s)

    def ended(self, turn: TurnRecord) -> None:
        self.records.append(turn)


class House:
    def __init__(self, folder: Path, script: Script, **info: Any) -> None:
        self.engine = FakeEngine(script)
        self.turns = Turns()
        self.model = FakeModel(folder, self.engine, info=model_info(**info))
        self.service = ChatService(FakeSource(self.model), observer=self.turns)

    async def chat(self, *, last: Role = "user", text: str = "Hi", **fields: Any) -> list[ChatDelta]:
        return [delta async for delta in self.service.stream(chat_request(last=last, text=text, **fields))]

    async def complete(self, prompt: str | tuple[int, ...], **fields: Any) -> list[ChatDelta]:
        sampling = SamplingOptions(**fields.pop("sampling", {}))
        request = CompletionRequest(request_id="r1", model="", prompt=prompt, sampling=sampling, **fields)
        return [delta async for delta in self.service.complete(request)]


def chat_request(*, last: Role = "user", text: str = "Hi", sampling: Any = None, **fields: Any) -> ChatRequest:
    return ChatRequest(
        request_id="r1",
        model="",
        messages=(Message(role=last, content=text),),
        sampling=SamplingOptions(**(sampling or {})),
        **fields,
    )


def text_of(deltas: list[ChatDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model_folder(tmp_path_factory.mktemp("byte-model"))


async def test_a_turn_streams_text_and_ends_once_with_usage_and_timings(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("Grüß 😀"), num_cached=5))
    deltas = await house.chat()
    assert text_of(deltas) == "Grüß 😀"
    assert deltas[0] == ChatDelta()
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    assert house.engine.aborted == []
    usage, timings = deltas[-1].usage, deltas[-1].timings
    prompt = (BOS, *ids("user\nHi"), EOS, *ids("\n"), BOS, *ids("assistant\n"))
    assert house.engine.submitted[0][1] == prompt
    assert usage is not None and timings is not None
    assert (usage.prompt_tokens, usage.cached_tokens) == (len(prompt), 5)
    assert usage.completion_tokens == len(ids("Grüß 😀")) + 1  # the stop id counts
    assert timings.prompt_per_second == (len(prompt) - 5) / 2.0
    assert timings.predicted_per_second == (usage.completion_tokens - 1) / 4.0


async def test_max_tokens_ends_with_length_and_without_half_a_character(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("aé")))
    deltas = await house.chat(sampling={"max_tokens": 2})
    assert text_of(deltas) == "a"
    assert deltas[-1].finish_reason == "length"


async def test_half_a_character_that_the_model_itself_leaves_is_marked(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("aé")[:2]))
    deltas = await house.chat()
    assert (text_of(deltas), deltas[-1].finish_reason) == ("a�", "stop")


async def test_a_stop_string_ends_the_answer_and_aborts_the_engine(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("one\nUser: two")))
    deltas = await house.chat(sampling={"stop": ("\nUser:",)})
    assert text_of(deltas) == "one"
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].usage is not None and deltas[-1].usage.completion_tokens == len("one\nUser:")
    assert house.engine.aborted == ["r1"]
    assert house.turns.records[0].reason == "stop"


async def test_a_stop_string_completed_by_the_last_token_is_a_stop(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("oneEND")))
    deltas = await house.chat(sampling={"stop": ("END",), "max_tokens": 6})
    assert (text_of(deltas), deltas[-1].finish_reason) == ("one", "stop")


async def test_a_partial_stop_at_the_end_is_given_out(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("the EN")))
    assert text_of(await house.chat(sampling={"stop": ("END",)})) == "the EN"


async def test_a_stop_string_that_is_a_control_token_becomes_a_stop_id(folder: Path) -> None:
    house = House(folder, Script(token_ids=(*ids("mid"), FIM, *ids("dle"))))
    deltas = await house.complete("x", sampling={"stop": ("<|fim_middle|>", "zz")})
    assert text_of(deltas) == "mid"
    assert house.engine.submitted[0][2].stop_token_ids == (FIM,)


async def test_standing_of_a_request_reaches_the_engine(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("a")))
    await house.chat(standing=Standing(priority=2))
    await house.complete("x", standing=Standing(request_class=RequestClass.BATCH))
    assert house.engine.standings == [Standing(priority=2), Standing(request_class=RequestClass.BATCH)]


async def test_thinking_goes_to_its_own_channel(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("<think>\nhm\n</think>\n\nyes")))
    deltas = await house.chat()
    assert text_of(deltas) == "yes"
    assert "".join(delta.reasoning for delta in deltas) == "hm"


async def test_half_a_tag_at_the_end_is_given_out(folder: Path) -> None:
    assert text_of(await House(folder, Script(token_ids=ids("<thi"))).chat()) == "<thi"


async def test_a_template_that_opens_the_thinking_itself(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}<think>\n"
    house = House(byte_model_folder(tmp_path, chat_template=template), Script(token_ids=ids("hm</think>yes")))
    deltas = await house.chat()
    assert (text_of(deltas), "".join(delta.reasoning for delta in deltas)) == ("yes", "hm")


async def test_a_continued_message_ends_the_prompt_and_keeps_its_blank(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids(" of France")))
    deltas = await house.chat(last="assistant", text="The capital", continue_final_message=True)
    assert house.engine.submitted[0][1] == (BOS, *ids("assistant\nThe capital"))
    assert text_of(deltas) == " of France"


async def test_sampling_takes_the_callers_word_then_the_catalogues_then_the_models_then_the_default(
    tmp_path: Path,
) -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": None}
    house = House(byte_model_folder(tmp_path, generation_config=config), Script())
    await house.chat()
    house.model.sampling = {"temperature": 0.2}
    await house.chat()
    await house.chat(sampling={"temperature": 0.0, "top_p": 0.9, "top_k": 0, "seed": 7})
    asked = [params for _, _, params in house.engine.submitted]
    assert [(p.temperature, p.top_p, p.top_k, p.seed) for p in asked] == [
        (0.6, 1.0, 20, None),
        (0.2, 1.0, 20, None),
        (0.0, 0.9, 0, 7),
    ]


async def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers_before_the_engine(folder: Path) -> None:
    house = House(folder, Script(), max_model_len=30)
    with pytest.raises(AppError, match=r"maximum context length is 30 tokens.*requested 31 tokens \(21 in") as caught:
        await house.chat(sampling={"max_tokens": 10})
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert house.engine.submitted == []
    assert (await house.chat(sampling={"max_tokens": 9}))[-1].finish_reason == "stop"


async def test_the_numbers_of_a_refusal_are_those_that_were_asked_for(folder: Path) -> None:
    """Without max_tokens nothing is said to be asked for the answer; `param` is what would have to change."""
    house = House(folder, Script(), max_model_len=30, context_length=2000)
    cases = [
        ("x" * 12, None, "31 tokens (31 in the messages, 0 in the completion)", "prompt"),
        ("x" * 12, 5, "36 tokens (31 in the messages, 5 in the completion)", "prompt"),
        ("x" * 11, None, "30 tokens (30 in the messages, 0 in the completion). An answer needs room", "prompt"),
        ("x" * 10, 5, "34 tokens (29 in the messages, 5 in the completion)", "max_tokens"),
    ]
    for text, max_tokens, said, param in cases:
        with pytest.raises(AppError) as caught:
            await house.complete("y" * 19 + text, sampling={"max_tokens": max_tokens})
        assert f"maximum context length is 30 tokens. However, you requested {said}" in caught.value.text
        assert caught.value.param == param


async def test_a_larger_context_is_offered_only_where_there_is_one(folder: Path) -> None:
    for context_length, is_offered in ((30, False), (64, True)):
        house = House(folder, Script(), max_model_len=30, context_length=context_length)
        with pytest.raises(AppError) as caught:
            await house.complete("x" * 31)
        assert ("`--max-model-len`, at most 64" in caught.value.hint) is is_offered
        assert ("larger context" in caught.value.hint) is is_offered


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(folder, Script(), max_model_len=30)
    await house.complete("x")  # the tokenizer is loaded

    def encode(*_: Any, **__: Any) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    long, fewest = "word " * 100_000, -(-500_000 // len("<|fim_middle|>"))
    for answer in (house.complete(long), house.chat(text=long)):
        with pytest.raises(AppError, match=r"context length is 30 tokens\. However, you requested at least") as caught:
            await answer
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    with pytest.raises(AppError, match=rf"\(at least {fewest} in the messages, 7 in the completion\)"):
        await house.complete(long, sampling={"max_tokens": 7})


async def test_raw_completion_parses_control_tokens_and_echoes(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("<think>!")))
    assert text_of(await house.complete("a<|im_end|>", echo=True)) == "a<|im_end|><think>!"
    assert text_of(await house.complete((*ids("é"), EOS), echo=True)) == "é<|im_end|><think>!"
    assert [prompt for _, prompt, _ in house.engine.submitted] == [(*ids("a"), EOS), (*ids("é"), EOS)]


async def test_a_token_id_outside_the_vocabulary_is_refused(folder: Path) -> None:
    with pytest.raises(AppError, match="Token id 512 is outside"):
        await House(folder, Script()).complete((1, 512))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ContextTooLong("too long"), 400),
        (TooManyRequests("full"), 429),
        (EngineDied("gone"), 503),
        (EngineClosed("closed"), 503),
    ],
)
async def test_an_engine_error_becomes_an_app_error_and_is_counted(folder: Path, error: Exception, status: int) -> None:
    house = House(folder, Script(token_ids=ids("abc"), error=error, error_at=1))
    with pytest.raises(AppError) as caught:
        await house.chat()
    assert caught.value.status == status
    assert (house.turns.records[0].reason, house.turns.records[0].error) == ("error", caught.value)


async def test_an_engine_that_aborts_or_ends_without_a_word_is_an_error_and_not_a_short_answer(folder: Path) -> None:
    for script in (Script(token_ids=ids("ab"), finish=FinishReason.ABORT), SilentEnd()):
        with pytest.raises(AppError) as caught:
            await House(folder, script).chat()
        assert caught.value.status >= 500


class SilentEnd(Script):
    """Tokens that run out without a finish reason."""

    def __init__(self) -> None:
        super().__init__(token_ids=())
        self.finish = None  # type: ignore[assignment]


async def test_closing_the_iterator_aborts_the_request(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("a long answer")))
    async with aclosing(house.service.stream(chat_request())) as deltas:
        async for delta in deltas:
            if delta.text:
                break
    assert house.engine.aborted == ["r1"] and not house.engine.running
    assert house.turns.records[0].reason == "abort"


async def test_cancelling_while_the_engine_is_silent_aborts_the_request(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("x"), gate=asyncio.Event()))
    task = asyncio.create_task(house.chat())
    while not house.engine.running:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert house.engine.aborted == ["r1"] and not house.engine.running


async def test_a_model_without_a_template_says_so_and_still_completes(tmp_path: Path) -> None:
    house = House(byte_model_folder(tmp_path, chat_template=None), Script(token_ids=ids("ok")))
    with pytest.raises(AppError, match="has no chat template") as caught:
        await house.chat()
    assert "/v1/completions" in caught.value.hint
    assert text_of(await house.complete("x")) == "ok"


async def test_a_long_text_does_not_hold_up_the_event_loop(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("ok")), max_model_len=10_000_000)
    turn = asyncio.create_task(house.chat(text="long text " * 100_000))
    turns_of_the_loop = 0
    while not house.engine.submitted and not turn.done():
        await asyncio.sleep(0.001)
        turns_of_the_loop += 1
    await turn
    assert turns_of_the_loop > 10  # tokenising takes some hundred milliseconds; inline, the loop would not turn at all


async def test_the_folder_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, loads = ModelText.load, []

    def counted(path: Path) -> ModelText:
        loads.append(path)
        return read(path)

    monkeypatch.setattr(ModelText, "load", counted)
    house = House(folder, Script(token_ids=ids("x")))
    requests = [CompletionRequest(request_id=str(number), model="", prompt="p") for number in range(5)]
    await asyncio.gather(*(drain(house.service.complete(request)) for request in requests))
    assert loads == [folder]


async def drain(deltas: AsyncIterator[ChatDelta]) -> list[ChatDelta]:
    return [delta async for delta in deltas]


async def test_a_broken_template_refuses_chats_alone_and_is_told_at_the_load(tmp_path: Path) -> None:
    broken = byte_model_folder(tmp_path / "broken", chat_template="{% if %}")
    house = House(broken, Script(token_ids=ids("ok")))
    assert text_of(await house.complete("x")) == "ok"
    with pytest.raises(AppError, match="chat_template cannot be read"):
        await house.chat()
    assert house.engine.running == set() and len(house.engine.submitted) == 1
    (note,) = text_notes(broken)
    assert "chat_template cannot be read" in note and "raw completions work" in note


@pytest.mark.parametrize(
    ("template", "word"), [(None, "has no chat template"), ("{{ raise_exception('Never') }}", "Never")]
)
def test_a_template_that_is_missing_or_takes_nothing_is_told_at_the_load(
    tmp_path: Path, template: str | None, word: str
) -> None:
    (note,) = text_notes(byte_model_folder(tmp_path / "model", chat_template=template))
    assert word in note


def test_a_template_that_works_needs_no_word(folder: Path) -> None:
    assert text_notes(folder) == []


@pytest.mark.parametrize(("effort", "thinks"), [("none", "False"), ("low", "True")])
async def test_effort_reaches_the_template_under_the_names_that_it_may_have(
    tmp_path: Path, effort: Any, thinks: str
) -> None:
    names = "{{ reasoning_effort }} {{ enable_thinking }} {{ messages[0].content }}"
    house = House(byte_model_folder(tmp_path / "model", chat_template=names), Script(token_ids=ids("ok")))
    await house.chat(reasoning_effort=effort)
    await house.chat(reasoning_effort=effort, template_kwargs={"enable_thinking": "mine"})
    prompts = [bytes(prompt).decode() for _, prompt, _ in house.engine.submitted]
    assert prompts == [f"{effort} {thinks} Hi", f"{effort} mine Hi"]


async def test_tags_of_the_catalogue_are_those_of_the_thinking(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("<|im|>hm<|/im|>yes")))
    house.model.reasoning = ("<|im|>", "<|/im|>")
    deltas = await house.chat()
    assert ("".join(delta.reasoning for delta in deltas), text_of(deltas)) == ("hm", "yes")


async def test_a_control_token_that_is_a_tag_is_seen(folder: Path) -> None:
    house = House(folder, Script(token_ids=(BOS, *ids("hm"), FIM, *ids("yes"))))
    house.model.reasoning = ("<|im_start|>", "<|fim_middle|>")
    deltas = await house.chat()
    assert ("".join(delta.reasoning for delta in deltas), text_of(deltas)) == ("hm", "yes")


async def test_a_form_comes_after_thinking_that_the_model_may_open(folder: Path, tmp_path: Path) -> None:
    """Where the template writes both tags, thinking is switched off and nothing may come before."""
    thinker = byte_model_folder(tmp_path / "thinker", chat_template="{{ messages[0].content }}{# </think> #}")
    closed = byte_model_folder(tmp_path / "closed", chat_template="{{ messages[0].content }}<think>\n\n</think>\n\n")
    grammar = GrammarSpec(GrammarKind.REGEX, "[0-9]")
    asked = []
    for model in (folder, thinker, closed):
        house = House(model, Script(token_ids=ids("1")))
        await house.chat(sampling={"grammar": grammar})
        asked.append(house.engine.submitted[0][2].grammar)
    assert asked == [grammar, replace(grammar, after="</think>", opening="<think>"), grammar]


async def test_calls_behind_a_control_token_are_seen(tmp_path: Path) -> None:
    template = (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<|fim_middle|>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
        "{% endfor %}{% endfor %}"
    )
    model = byte_model_folder(tmp_path / "model", chat_template=template)
    house = House(model, Script(token_ids=(FIM, *ids('{"name": "f", "arguments": {"a": 1}}'))))
    deltas = await house.chat(tools=(ToolSpec(name="f"),))
    calls = [piece for delta in deltas for piece in delta.tool_calls]
    assert calls[0].name == "f" and "".join(piece.arguments for piece in calls) == '{"a": 1}'
    assert (text_of(deltas), deltas[-1].finish_reason) == ("", "tool_calls")


async def test_a_turn_can_be_seen_while_it_is_under_way_and_not_after(folder: Path) -> None:
    gate = asyncio.Event()
    house = House(folder, Script(token_ids=ids("Hi"), gate=gate))
    standing = Standing(request_class=RequestClass.BATCH)
    answering = asyncio.create_task(house.chat(standing=standing))
    while not house.engine.running:
        await asyncio.sleep(0)
    (turn,) = house.service.under_way()
    assert (turn.request_id, turn.model, turn.standing, turn.ttft_s) == ("r1", "fake-model", standing, None)
    assert turn.prompt_tokens > 0
    gate.set()
    await answering
    assert house.service.under_way() == []


async def test_the_first_token_is_counted_when_it_comes(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("Hello"), pause_s=60))
    deltas = house.service.stream(chat_request())
    while not text_of([await anext(deltas)]):
        continue
    assert len(house.turns.first) == 1 and house.turns.gaps == [] and house.turns.records == []
    await deltas.aclose()
    assert [turn.ttft_s for turn in house.turns.records] == house.turns.first


async def test_a_turn_whose_caller_left_is_no_longer_under_way(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("Hello"), pause_s=60))
    deltas = house.service.stream(chat_request())
    await anext(deltas)
    assert len(house.service.under_way()) == 1
    await deltas.aclose()
    assert house.service.under_way() == []
