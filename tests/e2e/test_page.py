"""The chat as a person uses it: a real Chromium against the real page, over a service that follows a script.

Each test waits for what it expects to see and asserts no speed. Screenshots go to tests/artifacts/.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.ui.status import ModelStatus
from tests.e2e.tabs import CHROMIUM, READY, House, Tab, axe_findings, wait_until

playwright_api = pytest.importorskip("playwright.sync_api")
expect = playwright_api.expect

_SHOWCASE = """## Two ways to sum a list

The first is **built in**, the second shows what happens inside:

```python
def total(numbers: list[float]) -> float:
    result = 0.0
    for number in numbers:
        result += number
    return result
```

For $n$ numbers the work is \\(O(n)\\):

$$\\sum_{i=1}^{n} x_i = x_1 + x_2 + \\dots + x_n$$

| Way | Lines | Speed |
|---|---|---|
| `sum()` | 1 | fast |
| loop | 5 | slower |
"""

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]


def test_an_answer_streams_and_then_stays_with_its_figures(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    tab.send("count: 50 every 0.1 as n")
    seen = set()
    while tab.finished.count() == 0:
        seen.add(tab.shown())
        tab.page.wait_for_timeout(100)
    expect(tab.finished.last).to_contain_text("n49")
    assert len({text for text in seen if "n0" in text and "n49" not in text}) > 1
    expect(tab.page.locator("#fs-stats")).to_contain_text("42.5 tokens/s")
    expect(tab.page.locator("#fs-stats")).to_contain_text("of 8,192 tokens")
    expect(tab.page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    expect(tab.page.get_by_role("meter", name="Context used")).to_have_attribute("aria-valuemax", "8192")
    assert tab.complaints == []


def test_shift_enter_starts_a_new_line_and_sends_nothing(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    tab.box.fill("one")
    tab.box.press("Shift+Enter")
    tab.box.press_sequentially("two")
    assert not house.service.requests
    tab.box.press("Enter")
    wait_until(lambda: bool(house.service.requests))
    assert house.service.requests[0].messages[-1].content == "one\ntwo"


def test_what_is_typed_while_an_answer_comes_waits_for_its_end(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    tab.send("count: 60 every 0.05 as n")
    expect(tab.box).to_have_value("")
    tab.box.press_sequentially("say: next")
    expect(tab.answers.last).to_contain_text("n3 ")
    tab.box.press("Enter")
    expect(tab.finished.last).to_contain_text("n59")
    expect(tab.box).to_have_value("say: next")
    assert len(house.service.requests) == 1
    expect(tab.page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    tab.box.press("Enter")
    expect(tab.finished.last).to_contain_text("next")
    assert [message.role for message in house.service.requests[1].messages] == ["user", "assistant", "user"]


def test_stop_ends_the_work_and_keeps_what_was_shown(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    ways = (tab.stop.click, lambda: tab.page.keyboard.press("Escape"))
    for times, stop in enumerate(ways, start=1):
        tab.send("count: 5000 every 0.05 as n")
        expect(tab.writing).to_contain_text("n3 ")
        expect(tab.stop).to_be_visible()
        stop()
        wait_until(lambda times=times: len(house.service.closed) == times)
        expect(tab.finished.get_by_text("Stopped.")).to_have_count(times)
        expect(tab.page.locator("#fs-stats")).to_contain_text("of 8,192 tokens")
    tab.send("say: And on it goes")
    expect(tab.finished.last).to_contain_text("And on it goes")
    assert house.service.requests[2].messages[3].content.startswith("n0 n1 n2 n3 ")
    assert tab.complaints == []


def test_an_answer_goes_on_while_another_chat_is_open_and_no_text_gets_into_that(
    open_tab: Callable[..., Tab], house: House
) -> None:
    tab = open_tab()
    tab.send("count: 100 every 0.03 as n")
    expect(tab.answers.last).to_contain_text("n3 ")
    first = tab.page.url
    tab.press("New chat")
    expect(tab.answers).to_have_count(0)
    tab.send("say: Something new")
    expect(tab.finished.last).to_contain_text("Something new")
    assert len(house.service.requests[-1].messages) == 1
    assert "n3" not in tab.shown()
    tab.page.goto(first)
    expect(tab.finished.last).to_contain_text("n99")
    assert tab.complaints == [] and not house.service.closed


def test_a_reload_in_mid_answer_shows_all_that_was_shown_and_goes_on(
    open_tab: Callable[..., Tab], house: House
) -> None:
    tab = open_tab()
    tab.send("think: hm | one two")
    expect(tab.finished).to_have_count(1)
    tab.send("count: 5000 every 0.03 as n")
    expect(tab.writing).to_contain_text("n9 ")
    before = tab.writing.get_by_test_id("bot").inner_text()
    tab.page.reload()
    expect(tab.answers).to_have_count(2)
    expect(tab.answers.last).to_contain_text(before.split()[-1])
    at_first = tab.writing.get_by_test_id("bot").inner_text()
    wait_until(lambda: tab.writing.get_by_test_id("bot").inner_text() != at_first)
    tab.stop.click()
    expect(tab.finished).to_have_count(2)
    words = tab.finished.last.get_by_test_id("bot").inner_text().split()
    assert words == [f"n{i}" for i in range(len(words))] and len(words) > len(before.split())
    other = open_tab()
    expect(other.answers).to_have_count(0)
    assert tab.complaints == [] and other.complaints == []


def test_closing_a_tab_leaves_its_answer_to_go_on(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    tab.send("count: 60 every 0.03 as n")
    expect(tab.answers.last).to_contain_text("n3 ")
    url = tab.page.url
    tab.page.close()
    again = open_tab()
    again.page.goto(url)
    expect(again.finished.last).to_contain_text("n59")
    assert not house.service.closed


def test_tabs_stream_at_once_and_never_show_each_others_text(open_tab: Callable[..., Tab], house: House) -> None:
    words = ("amber", "birch", "cedar")
    tabs = [open_tab() for _ in words]
    for tab, word in zip(tabs, words, strict=True):
        tab.send(f"count: 5000 every 0.02 as {word}")
    for tab, word in zip(tabs, words, strict=True):
        expect(tab.answers.last).to_contain_text(f"{word}9 ")
    assert house.service.num_open == len(tabs)
    before = [tab.shown() for tab in tabs]
    for tab, text in zip(tabs, before, strict=True):
        wait_until(lambda tab=tab, text=text: len(tab.shown()) > len(text))
    for tab in tabs:
        tab.stop.click()
        expect(tab.finished.last).to_contain_text("Stopped.")
    for tab, word in zip(tabs, words, strict=True):
        assert {found for found in words if found in tab.shown()} == {word}


def test_an_error_is_told_in_the_chat_and_the_next_message_works(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    tab.send("fail: The engine ended in mid-answer (exit code -9). A fresh one starts with your next message.")
    expect(tab.finished.last).to_contain_text("exit code -9")
    assert "It began well" in tab.shown()
    tab.send("refuse: Prompt has 9,120 tokens; this model has room for 8,192.")
    expect(tab.finished.last).to_contain_text("9,120 tokens")
    tab.send("say: Fine again")
    expect(tab.finished.last).to_contain_text("Fine again")
    tab.shoot("error")
    assert tab.complaints == []


def test_a_message_sent_while_the_model_loads_waits_and_says_so(open_tab: Callable[..., Tab], house: House) -> None:
    house.service.is_ready = False
    house.status = ModelStatus(
        model_id="smollm2-135m-instruct", state="loading", stage="reading weights", fraction=0.42
    )
    tab = open_tab()
    expect(tab.page.get_by_role("progressbar", name="Loading the model")).to_be_visible()
    expect(tab.page.locator(".fs-stage")).to_have_text("reading weights · 42 %")
    tab.send("say: Here I am")
    expect(tab.answers.last).to_contain_text("as soon as smollm2-135m-instruct is loaded: reading weights · 42 %")
    tab.shoot("loading")
    house.status = READY
    house.service.is_ready = True
    expect(tab.finished.last).to_contain_text("Here I am")
    expect(tab.page.get_by_role("progressbar", name="Loading the model")).to_be_hidden()


def test_an_answer_that_waits_for_another_model_than_the_one_in_hand_says_so(
    open_tab: Callable[..., Tab], house: House
) -> None:
    tab = open_tab()
    tab.press("Compare")
    tab.page.get_by_label("Second model").select_option("other-model")
    house.service.is_ready = False
    tab.send("say: Here I am")
    first, second = tab.page.locator(".fs-column").nth(0), tab.page.locator(".fs-column").nth(1)
    expect(first.get_by_role("heading")).to_have_text(READY.model_id)
    expect(first).to_contain_text("Reading your message")
    expect(second).to_contain_text("Waiting for a model")
    loading = {"model": "other-model", "state": "loading", "stage": "reading weights", "fraction": 0.25}
    house.in_memory = [loading | {"seconds_left": None}]
    expect(second).to_contain_text("as soon as other-model is loaded: reading weights · 25 %")
    house.service.is_ready = True
    expect(tab.finished).to_have_count(2)
    assert tab.complaints == []


def test_a_chosen_model_is_loaded_with_its_progress(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    tab.page.get_by_label("Model", exact=True).select_option("other-model")
    expect(tab.page.locator(".fs-stage")).to_have_text("reading weights · 50 %")
    house.status = ModelStatus(model_id="other-model", state="ready", max_model_len=8192)
    expect(tab.page.locator("#fs-status")).to_have_attribute("data-state", "ready")
    expect(tab.page.get_by_label("Model", exact=True)).to_have_value("other-model")
    assert tab.complaints == []


def test_a_failed_load_is_told_in_words(open_tab: Callable[..., Tab], house: House) -> None:
    words = "model.safetensors is 12 MB short. Delete the folder and start again. <b>"
    house.status = ModelStatus(model_id="tiny", state="failed", error=words)
    expect(open_tab().page.locator(".fs-stage")).to_have_text(words)


_ATTACKS = (
    "<img src=x onerror=\"window.owned='img'\">",
    "<script>window.owned='script'</script>",
    "<svg onload=\"window.owned='svg'\"></svg>",
    "<iframe src=\"javascript:parent.owned='frame'\"></iframe>",
    "[click](javascript:window.owned='link')",
    "![pixel](http://192.0.2.1/pixel.png)",
    "`<img src=x onerror=window.owned='code'>`",
    "$$\\href{javascript:window.owned='latex'}{x}$$",
    "<style>body{display:none}</style>",
)


def test_no_text_becomes_markup_or_reaches_another_host(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    for script in ("say", "fail", "refuse"):
        tab.send(f"{script}: " + "\n\n".join(_ATTACKS))
        expect(tab.page.get_by_role("button", name="Send", exact=True)).to_be_visible()
        expect(tab.finished.last).to_contain_text("<style>")
        expect(tab.finished.last).to_contain_text("<script>")
    tab.send("think: " + " ".join(_ATTACKS) + " | done")
    expect(tab.finished.last).to_contain_text("done")
    for link in tab.page.locator("#fs-pane a").all():
        assert not (link.get_attribute("href") or "").startswith("javascript:")
    assert tab.page.evaluate("window.owned") is None
    assert tab.page.locator("#fs-pane :is(iframe, script, style, svg, form, img)").count() == 0
    with pytest.raises(playwright_api.Error):
        tab.page.evaluate("fetch('http://192.0.2.1/')")


def test_markdown_is_drawn_with_nothing_from_another_host(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    tab.send(f"think: I look at both and decide. | {_SHOWCASE}")
    expect(tab.finished).to_have_count(1)
    answer = tab.finished.last
    expect(answer.locator("pre code .hljs-keyword").first).to_be_visible()
    expect(answer.locator(".fs-code")).to_contain_text("python")
    expect(answer.get_by_role("button", name="Copy code")).to_be_visible()
    expect(answer.locator(".katex")).to_have_count(3)
    expect(answer.locator(".fs-text").get_by_role("table")).to_be_visible()
    thought = tab.page.get_by_text("I look at both and decide.", exact=True)
    expect(thought).to_be_hidden()
    answer.get_by_text(re.compile("^Thought for")).click()
    expect(thought).to_be_visible()
    elsewhere = [url for url in tab.requests if not url.startswith((house.url, "data:", "blob:"))]
    assert len(tab.requests) > 10 and elsewhere == []
    assert tab.complaints == []


def test_a_growing_answer_is_drawn_as_the_whole_one_is(open_tab: Callable[..., Tab]) -> None:
    """Piece by piece only the last block is drawn again; the end must not show it."""
    tab = open_tab()
    tab.send(f"say: {_SHOWCASE}\n1. one\n2. two\n\n   more of two\n\n> said [there][a]\n\n[a]: https://example.org/")
    expect(tab.finished).to_have_count(1)
    expect(tab.finished.locator(".katex").last).to_be_visible()
    text = tab.finished.get_by_test_id("bot")
    plain = "text => text.innerHTML.replace(/<div( class=\"fs-(block|group)\")?>|<\\/div>/g, '').replace(/\\s+/g, ' ')"
    grown = text.evaluate(plain)
    tab.page.reload()
    expect(tab.finished.locator(".katex").last).to_be_visible()
    expect(text.get_by_role("link", name="there")).to_have_attribute("href", "https://example.org/")
    assert text.evaluate(plain) == grown


def test_copy_gives_the_exact_words_of_the_answer(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for times, words in enumerate(("<b>one</b> for $n$", "two"), start=1):
        tab.send(f"think: hm | {words}")
        expect(tab.finished).to_have_count(times)
        tab.finished.last.get_by_role("button", name="Copy", exact=True).click()
        wait_until(lambda words=words: tab.page.evaluate("navigator.clipboard.readText()") == words)


def test_edit_and_answer_again_make_versions_that_can_be_looked_through(
    open_tab: Callable[..., Tab], house: House
) -> None:
    tab = open_tab()
    tab.send("say: first")
    expect(tab.finished.last).to_contain_text("first")
    again = tab.page.get_by_role("button", name="Answer again")
    again.evaluate("button => { for (let i = 0; i < 3; i++) button.click(); }")  # a hasty hand
    expect(tab.finished.get_by_text("2/2")).to_be_visible()
    tab.box.press("ArrowUp")
    tab.page.get_by_role("textbox", name="Edit your message").fill("say: second")
    tab.page.keyboard.press("Enter")
    expect(tab.finished.last).to_contain_text("second")
    assert len(house.service.requests[-1].messages) == 1
    user = tab.page.locator(".fs-user")
    expect(user).to_contain_text("2/2")
    user.get_by_role("button", name="Version before").click()
    expect(tab.finished.last).to_contain_text("first")
    expect(tab.finished.last).to_contain_text("2/2")
    tab.finished.last.get_by_role("button", name="Version before").click()
    expect(tab.finished.last).to_contain_text("1/2")
    assert tab.complaints == []


def test_a_stopped_answer_is_gone_on_with_where_it_ended(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    tab.send("count: 5000 every 0.05 as n")
    expect(tab.answers.last).to_contain_text("n3 ")
    tab.stop.click()
    expect(tab.finished.last).to_contain_text("Stopped.")
    text = tab.finished.last.get_by_test_id("bot")
    before = text.inner_text()
    tab.press("Continue")
    expect(tab.finished.last).to_contain_text("and on")
    assert text.inner_text() == f"{before} and on"
    asked = house.service.requests[-1]
    assert asked.continue_final_message and asked.messages[-1].content.strip() == before


def test_two_ways_are_answered_side_by_side_and_one_is_gone_on_with(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    tab.press("Compare")
    tab.page.get_by_label("Second settings").select_option("Creative")
    tab.page.get_by_label("Second temperature").fill("0.2")
    tab.send("count: 30 every 0.03 as n")
    expect(tab.page.locator(".fs-column")).to_have_count(2)
    expect(tab.finished).to_have_count(2)
    assert {(each.sampling.temperature, each.sampling.min_p) for each in house.service.requests} == {
        (None, None),
        (0.2, 0.05),
    }
    tab.shoot("compare")
    tab.press("Go on with this one")
    expect(tab.page.locator('.fs-column[data-kept="true"]')).to_contain_text("Creative · Temperature 0.2")
    tab.send("say: on")
    expect(tab.finished).to_have_count(3)
    assert [message.role for message in house.service.requests[-1].messages] == ["user", "assistant", "user"]
    assert tab.complaints == []


def test_probabilities_are_told_where_they_were_asked(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    tab.press("Token probabilities")
    tab.send("say: one two")
    expect(tab.finished).to_have_count(1)
    tab.press("Probabilities")
    tab.page.locator(".fs-token").first.hover()
    expect(tab.page.get_by_role("tooltip")).to_contain_text("50.0 %")
    expect(tab.page.get_by_role("tooltip")).to_contain_text('"other" 25.0 %')
    tab.shoot("probabilities")
    tab.page.mouse.move(0, 0)
    expect(tab.page.get_by_role("tooltip")).to_be_hidden()
    tab.page.locator(".fs-token").first.focus()
    tab.page.keyboard.press("ArrowRight")
    expect(tab.page.get_by_role("tooltip")).to_contain_text('"two" 50.0 %')
    tab.page.keyboard.press("Tab")  # the whole text is one stop
    expect(tab.page.locator(".fs-token:focus")).to_have_count(0)
    tab.press("Text")
    expect(tab.finished.last.get_by_test_id("bot")).to_be_visible()
    assert house.service.requests[0].sampling.logprobs == 5


def test_two_tabs_on_one_chat_stay_in_step(open_tab: Callable[..., Tab], house: House) -> None:
    one, two = open_tab(), open_tab()
    one.send("say: hello")
    expect(one.finished).to_have_count(1)
    two.page.goto(one.page.url)
    expect(two.finished).to_have_count(1)
    two.send("count: 5000 every 0.03 as n")
    for tab in (one, two):
        expect(tab.answers.last).to_contain_text("n5 ")
        expect(tab.stop).to_be_visible()
    one.stop.click()
    for tab in (one, two):
        expect(tab.finished.last).to_contain_text("Stopped.")
    assert one.finished.last.inner_text() == two.finished.last.inner_text()
    assert one.complaints == two.complaints == []


def test_the_first_message_is_not_lost_however_early_it_is_sent(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    for times in range(1, 4):
        tab.page.goto("about:blank")
        tab.page.goto(house.url, wait_until="commit")
        tab.box.fill(f"say: early {times}")
        tab.box.press("Enter")
        expect(tab.finished.last).to_contain_text(f"early {times}")
    assert len(house.service.requests) == 3


def test_a_restart_in_mid_answer_loses_nothing_that_was_shown(browser: Any, tmp_path: Path) -> None:
    with House(tmp_path / "history.db") as house:
        tab = Tab(browser.new_context().new_page(), house)
        tab.send("count: 5000 every 0.02 as n")
        expect(tab.answers.last).to_contain_text("n30 ")
        port = house.port
    expect(tab.page.locator(".fs-stage")).to_have_text("Fireside is not running")
    shown = tab.answers.last.get_by_test_id("bot").inner_text()
    with House(tmp_path / "history.db", port) as house:
        expect(tab.finished.last).to_contain_text("Cut: Fireside ended")
        assert tab.finished.last.get_by_test_id("bot").inner_text().startswith(shown)
        tab.press("Continue")
        expect(tab.finished.last).to_contain_text("and on")
        tab.page.context.close()


@contextmanager
def _killable(history: Path, port: int = 0) -> Iterator[Any]:
    """A server in a process of its own; gives its process and port."""
    command = [sys.executable, "-m", "tests.e2e.scripted_server", str(history), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            yield SimpleNamespace(process=process, port=port, url=f"http://127.0.0.1:{port}/")
        finally:
            process.kill()


def test_a_killed_server_loses_nothing_that_was_shown_and_the_tab_goes_on(browser: Any, tmp_path: Path) -> None:
    history = tmp_path / "history.db"
    with _killable(history) as server:
        tab = Tab(browser.new_context().new_page(), server)
        tab.send("say: before it")
        expect(tab.finished).to_have_count(1)
        tab.send("count: 5000 every 0.01 as n")
        expect(tab.writing).to_contain_text("n50 ")
        server.process.kill()
        server.process.wait()
    expect(tab.page.locator(".fs-stage")).to_have_text("Fireside is not running")
    shown = tab.answers.last.get_by_test_id("bot").inner_text()
    tab.box.fill("say: typed meanwhile")
    expect(tab.page.get_by_text("The connection to Fireside is lost")).to_be_visible()
    with _killable(history, server.port):
        expect(tab.finished.last).to_contain_text("Cut: Fireside ended")
        expect(tab.page.get_by_text("The connection to Fireside is lost")).to_be_hidden()
        expect(tab.answers).to_have_count(2)
        words = tab.finished.last.get_by_test_id("bot").inner_text()
        assert words.startswith(shown) and words.split() == [f"n{i}" for i in range(len(words.split()))]
        tab.press("Continue")
        expect(tab.finished.last).to_contain_text("and on")
        expect(tab.box).to_have_value("say: typed meanwhile")
        tab.box.press("Enter")
        expect(tab.finished.last).to_contain_text("typed meanwhile")
        tab.page.context.close()


def test_the_view_follows_the_answer_until_the_reader_scrolls_up(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(height=500)
    pane = tab.page.locator("#fs-pane")
    distance = "pane => pane.scrollHeight - pane.scrollTop - pane.clientHeight"
    tab.send("count: 10000 every 0.01 as word")
    wait_until(lambda: pane.evaluate("pane => pane.scrollHeight > pane.clientHeight + 200"))
    assert pane.evaluate(distance) < 60
    pane.hover()
    tab.page.mouse.wheel(0, -400)
    wait_until(lambda: pane.evaluate(distance) > 100)
    height = pane.evaluate("pane => pane.scrollHeight")
    wait_until(lambda: pane.evaluate("pane => pane.scrollHeight") > height)
    assert pane.evaluate(distance) > 100
    tab.stop.click()


@pytest.mark.parametrize(
    ("name", "look"),
    [
        ("desktop", {}),
        ("dark", {"colors": "dark"}),
        ("narrow", {"width": 360, "height": 720}),
    ],
)
def test_the_page_fits_its_window(open_tab: Callable[..., Tab], name: str, look: dict[str, Any]) -> None:
    tab = open_tab(**look)
    tab.shoot(f"{name}_welcome")
    tab.send(f"think: I look at both and decide. | {_SHOWCASE}")
    expect(tab.finished.last.locator(".fs-text").get_by_role("table")).to_be_visible()
    tab.shoot(name)
    fits = "[document.documentElement.scrollWidth <= innerWidth, document.documentElement.scrollHeight <= innerHeight]"
    assert tab.page.evaluate(fits) == [True, True]
    for control in (tab.box, tab.page.get_by_role("button", name=re.compile("^(Send|New chat|Compare)"))):
        for part in control.all():
            expect(part).to_be_in_viewport(ratio=1)


@pytest.mark.parametrize(
    "look", [{}, {"colors": "dark"}, {"width": 360, "height": 720}], ids=["light", "dark", "narrow"]
)
def test_axe_finds_nothing(open_tab: Callable[..., Tab], look: dict[str, Any]) -> None:
    tab = open_tab(**look)
    assert axe_findings(tab.page) == []
    tab.press("Token probabilities")
    tab.send(f"think: I look at both and decide. | {_SHOWCASE}")
    expect(tab.finished.locator(".katex").last).to_be_visible()
    tab.finished.get_by_text("Why did this take so long?").click()
    tab.press("Compare")
    assert axe_findings(tab.page) == []
    tab.press("Probabilities")
    tab.page.keyboard.press("Control+/")
    expect(tab.page.get_by_role("dialog", name="Keys")).to_be_visible()
    assert axe_findings(tab.page) == []


def test_the_keys_do_what_their_list_says(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    tab.send("say: first chat")
    expect(tab.finished.last).to_contain_text("first chat")
    first = tab.page.url
    tab.page.keyboard.press("Control+Shift+O")
    expect(tab.answers).to_have_count(0)
    tab.send("say: second chat")
    expect(tab.finished.last).to_contain_text("second chat")
    tab.page.keyboard.press("Alt+ArrowDown")
    expect(tab.page).to_have_url(first)
    expect(tab.finished.last).to_contain_text("first chat")
    tab.page.keyboard.press("Control+K")
    expect(tab.page.get_by_role("searchbox", name="Search chats")).to_be_focused()
    tab.page.keyboard.type("second")
    expect(tab.page.get_by_role("link", name=re.compile("second chat"))).to_be_visible()
    assert tab.complaints == []


def test_a_conversation_is_had_by_keys_alone_and_the_focus_is_never_lost(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    keys = tab.page.keyboard
    focused = tab.page.locator(":focus")

    def go_to(name: str, key: str = "Shift+Tab") -> None:
        for _ in range(30):
            if focused.count() and name in (focused.get_attribute("aria-label") or "", focused.inner_text()):
                return
            keys.press(key)
        raise AssertionError(f"{name} is not reached")

    keys.type("count: 5000 every 0.02 as n")  # the page opens in its message box
    keys.press("Enter")
    expect(tab.answers.last).to_contain_text("n3 ")
    keys.press("Escape")
    expect(tab.finished).to_contain_text("Stopped.")
    expect(tab.box).to_be_focused()
    go_to("Continue")
    keys.press("Enter")
    expect(tab.finished).to_contain_text("and on")
    expect(tab.box).to_be_focused()  # the button is gone
    go_to("Answer again")
    keys.press("Enter")
    expect(tab.writing).to_contain_text("n1 ")
    expect(tab.box).to_be_focused()
    keys.press("Escape")
    expect(tab.finished).to_contain_text("2/2")
    go_to("Version before")
    keys.press("Enter")
    expect(tab.finished).to_contain_text("1/2")
    keys.press("Enter")  # the first version: the focus is on the way back
    expect(tab.finished).to_contain_text("2/2")
    go_to("Edit")
    keys.press("Enter")
    expect(focused).to_have_attribute("aria-label", "Edit your message")
    keys.press("Escape")
    expect(focused).to_have_text("Edit")
    keys.press("Enter")
    go_to("Cancel", "Tab")
    keys.press("Enter")
    expect(focused).to_have_text("Edit")
    keys.press("Enter")
    keys.press("Control+A")
    keys.type("say: edited")
    keys.press("Enter")
    expect(tab.finished).to_contain_text("edited")
    expect(tab.box).to_be_focused()
    keys.press("Control+K")
    go_to("What to do with count: 5000 every 0.02 as n", "Tab")
    keys.press("Enter")
    keys.press("End")
    keys.press("Enter")
    expect(focused).to_have_text("Undo")
    keys.press("Enter")
    expect(tab.finished).to_contain_text("edited")
    assert tab.complaints == []


def test_keys_pressed_in_another_room_lead_to_the_chat_and_escape_stops_nothing(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    room, search = tab.page.locator("#fs-room-chat"), tab.page.get_by_role("searchbox", name="Search chats")
    tab.send("count: 400 every 0.05 as n")
    expect(tab.writing.last).to_contain_text("n1")
    tab.page.get_by_role("link", name="Settings").click()
    expect(room).to_be_hidden()
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("Control+K")
    expect(search).to_be_focused()
    expect(tab.writing).to_have_count(1)
    tab.page.get_by_role("link", name="Settings").click()
    expect(room).to_be_hidden()
    tab.page.keyboard.press("Control+Shift+O")
    expect(tab.box).to_be_focused()
    expect(tab.answers).to_have_count(0)
    tab.page.get_by_role("link", name="Settings").click()
    expect(room).to_be_hidden()
    tab.page.keyboard.press("Control+K")
    expect(search).to_be_focused()


def test_keys_work_in_a_room_that_the_page_was_opened_at(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    for keys, focused in (
        ("Control+K", tab.page.get_by_role("searchbox", name="Search chats")),
        ("Control+Shift+O", tab.box),
    ):
        tab.page.goto("about:blank")
        tab.page.goto(f"{house.url}#/settings")
        expect(tab.page.locator("#fs-message")).to_be_attached()
        tab.page.keyboard.press(keys)
        expect(focused).to_be_focused()
        expect(tab.page.locator("#fs-room-settings")).to_be_hidden()


def test_a_theme_that_is_chosen_holds_in_all_tabs(open_tab: Callable[..., Tab]) -> None:
    tab, other = open_tab(), open_tab()
    tab.page.evaluate("import('./ui/static/theme.js').then((theme) => theme.chooseTheme('dark'))")
    for each in (tab, other):
        expect(each.page.locator("body")).to_have_class(re.compile("dark"))


def test_the_drawer_of_a_narrow_screen_closes_when_the_open_chat_is_picked(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(width=360, height=740)
    tab.send("say: on a narrow screen")
    expect(tab.finished.last).to_contain_text("narrow")
    tab.page.get_by_role("button", name="List of chats").click()
    tab.page.locator("#fs-sidebar a[aria-current]").click()
    expect(tab.page.locator("#fs-sidebar")).to_be_hidden()
    tab.page.get_by_role("button", name="List of chats").press("Enter")
    expect(tab.page.get_by_role("searchbox", name="Search chats")).to_be_focused()
    tab.page.keyboard.press("Escape")
    expect(tab.page.locator("#fs-sidebar")).to_be_hidden()
    expect(tab.page.get_by_role("button", name="List of chats")).to_be_focused()
