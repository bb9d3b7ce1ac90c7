"""The handlers of the chat, driven without a browser: what each event gives to which widget."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr
import pytest

from app.chat.types import Timings, Usage
from app.ui.chat_tab import ChatTab, figures, finished, waiting_for
from app.ui.sampling import read_sampling
from app.ui.status import ModelStatus
from app.ui.transcript import load
from app.ui.turn import Answer
from tests.app.ui.scripted import ScriptedService

_READY = ModelStatus(model_id="tiny", state="ready", max_model_len=8192)
_DEFAULTS = ("", "", "", "")


class _Browser:
    """One tab: keeps what each widget shows, sends it back, and follows the ticket, as the page does."""

    def __init__(self, tab: ChatTab) -> None:
        self._tab = tab
        self.shown: dict[Any, Any] = {tab.transcript: "", tab.ticket: "", tab.history: [], tab.live: [], tab.stats: ""}

    async def send(self, text: str, system: str = "", sampling: tuple[str, ...] = _DEFAULTS) -> AsyncIterator[Any]:
        """The values of `live`, one an update."""
        transcript = self.shown[self._tab.transcript]
        async for live, ticket in self._tab._answer(text, transcript, self.ticket, system, *sampling):
            await self._draw({self._tab.live: live, self._tab.ticket: ticket})
            yield live

    async def say(self, text: str, **more: Any) -> None:
        async for _ in self.send(text, **more):
            pass

    async def new_chat(self) -> None:
        await self._draw(await self._tab._start_anew(self.ticket))

    async def _draw(self, updates: dict[Any, Any]) -> None:
        before = self.ticket
        self.shown.update({widget: value for widget, value in updates.items() if value != gr.skip()})
        if self.ticket != before:
            self.shown.update(await self._tab._follow(self.ticket, self.shown[self._tab.transcript]))

    def turns(self) -> Any:
        return load(self.shown[self._tab.transcript])

    @property
    def ticket(self) -> str:
        return str(self.shown[self._tab.ticket])


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def tab(service: ScriptedService) -> ChatTab:
    with gr.Blocks():
        return ChatTab(service, lambda: _READY)


async def test_an_update_in_mid_answer_carries_the_live_turn_alone(tab: ChatTab) -> None:
    browser = _Browser(tab)
    await browser.say("say: first")
    updates = [live async for live in browser.send("count: 50 every 0.01 as n")]
    assert len(updates) > 2
    assert all("first" not in str(live) for live in updates)


async def test_a_turn_that_has_not_reached_the_transcript_yet_is_still_sent(
    tab: ChatTab, service: ScriptedService
) -> None:
    late: Any = [update async for update in tab._answer("say: first", "", "", "", *_DEFAULTS)][-1][1]
    [_ async for _ in tab._answer("say: second", "", late, "", *_DEFAULTS)]
    assert [message.content for message in service.requests[1].messages] == ["say: first", "first", "say: second"]


async def test_a_finished_turn_moves_into_the_conversation(tab: ChatTab) -> None:
    browser = _Browser(tab)
    await browser.say("say: one")
    await browser.say("say: two")
    assert [turn.answer for turn in browser.turns()] == ["one", "two"]
    assert len(browser.shown[tab.history]) == 4
    assert browser.shown[tab.live] == []
    assert "42.5 tokens/s" in browser.shown[tab.stats] and "of 8,192" in browser.shown[tab.stats]


async def test_system_prompt_and_sampling_reach_the_request(tab: ChatTab, service: ScriptedService) -> None:
    await _Browser(tab).say("hello", system="Be brief.", sampling=("0.5", " 0.9", "7", "3"))
    request = service.requests[0]
    assert [message.role for message in request.messages] == ["system", "user"]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.5, 0.9, 7, 3)


async def test_a_wrong_setting_is_named_and_nothing_is_sent(tab: ChatTab, service: ScriptedService) -> None:
    browser = _Browser(tab)
    await browser.say("hello", sampling=("<b>", "", "", ""))
    assert "Temperature is &quot;&lt;b&gt;&quot;" in browser.shown[tab.stats]
    assert not service.requests and browser.turns() == ()


@pytest.mark.parametrize("texts", [("3", "", "", ""), ("", "0", "", ""), ("", "", "1.5", ""), ("nan", "", "", "")])
def test_a_setting_out_of_its_range_is_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="it must be"):
        read_sampling(texts)


async def test_empty_text_sends_nothing(tab: ChatTab, service: ScriptedService) -> None:
    await _Browser(tab).say(" \n")
    assert not service.requests


async def test_stop_ends_the_engines_work_and_keeps_the_partial_answer(tab: ChatTab, service: ScriptedService) -> None:
    browser = _Browser(tab)
    async for _ in browser.send("count: 1000 every 0.01 as n"):
        if "n3" in str(browser.shown[tab.live]):
            await tab._stop(browser.ticket)
    assert len(service.closed) == 1
    (turn,) = browser.turns()
    assert turn.note == "Stopped." and turn.answer.startswith("n0 n1 n2 n3 ")
    await browser.say("say: next")
    assert [message.content for message in service.requests[1].messages] == [turn.user, turn.answer, "say: next"]


async def test_closing_the_handler_ends_the_engines_work(tab: ChatTab, service: ScriptedService) -> None:
    updates = tab._answer("count: 1000 every 0.01 as n", "", "", "", *_DEFAULTS)
    async for live, _ in updates:
        if "n0" in str(live):
            break
    await updates.aclose()  # type: ignore[attr-defined]
    assert len(service.closed) == 1 and service.num_open == 0 and not tab._running


async def test_new_chat_in_mid_answer_ends_it_and_nothing_of_it_comes_back(
    tab: ChatTab, service: ScriptedService
) -> None:
    browser = _Browser(tab)
    await browser.say("say: old")
    clearing: asyncio.Task[Any] | None = None
    async for _ in browser.send("count: 1000 every 0.01 as n"):
        if clearing is None and "n0" in str(browser.shown[tab.live]):
            clearing = asyncio.create_task(browser.new_chat())
            await asyncio.sleep(0)
    assert clearing is not None
    await clearing
    assert len(service.closed) == 1
    assert browser.turns() == () and browser.shown[tab.history] == [] and browser.shown[tab.live] == []


async def test_a_failed_turn_is_told_and_the_next_works_without_it(tab: ChatTab, service: ScriptedService) -> None:
    browser = _Browser(tab)
    await browser.say("refuse: Prompt has 9,120 tokens; there is room for 8,192.")
    (turn,) = browser.turns()
    assert turn.note_kind == "error" and "9,120" in turn.note and "will not know of it" in turn.note
    await browser.say("say: fine")
    assert len(service.requests[1].messages) == 1
    assert browser.turns()[1].answer == "fine"


async def test_two_tabs_run_at_once_and_hold_only_their_own_text(tab: ChatTab, service: ScriptedService) -> None:
    one, two = _Browser(tab), _Browser(tab)
    await asyncio.gather(one.say("count: 20 every 0.01 as amber"), two.say("count: 20 every 0.01 as birch"))
    assert "birch" not in str(one.shown) and "amber" not in str(two.shown)
    assert one.turns()[0].answer.split()[-1] == "amber19" and two.turns()[0].answer.split()[-1] == "birch19"


async def test_a_tab_cannot_stop_a_turn_whose_id_it_was_not_told(tab: ChatTab, service: ScriptedService) -> None:
    browser = _Browser(tab)
    async for _ in browser.send("count: 30 every 0.01 as n"):
        await tab._stop("")
    assert not service.closed


async def test_a_kept_conversation_is_drawn_again_and_an_unreadable_one_is_told(tab: ChatTab) -> None:
    browser = _Browser(tab)
    await browser.say("say: one")
    kept = browser.shown[tab.transcript]
    assert await tab._restore(kept) == {tab.history: browser.shown[tab.history], tab.transcript: kept}
    told = await tab._restore('[{"who": "me"}]')
    assert set(told) == {tab.stats} and "cannot be read" in told[tab.stats]


def test_an_answer_cut_at_its_limit_says_so() -> None:
    assert "limit of tokens" in finished("id", "a", Answer(text="b", finish_reason="length")).note
    assert finished("id", "a", Answer(text="b", finish_reason="stop")).note == ""


def test_waiting_tells_what_for() -> None:
    loading = ModelStatus(model_id="tiny", state="loading", stage="reading weights", fraction=0.42)
    assert waiting_for(loading) == "Your message is sent as soon as tiny is loaded: reading weights (42%)"


def test_figures_that_are_not_known_are_left_out() -> None:
    usage = Usage(prompt_tokens=1000, completion_tokens=234, cached_tokens=0)
    assert figures(Answer(usage=usage), ModelStatus()) == "1,234 tokens of context used"
    nothing = Timings(queue_s=0, prefill_s=0, decode_s=0, prompt_per_second=0, predicted_per_second=0)
    assert figures(Answer(timings=nothing), _READY) == ""
