"""The page as a person uses it: a real Chromium against the real Gradio app, over a service that follows a script.

Each test waits for what it expects to see and asserts no speed. Screenshots go to tests/artifacts/.
"""

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from app.ui.page import mount
from app.ui.status import ModelStatus
from tests.app.ui.scripted import ScriptedService

playwright_api = pytest.importorskip("playwright.sync_api")
expect = playwright_api.expect

_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
_ARTIFACTS = Path(__file__).parents[1] / "artifacts"
_PATIENCE_MS = 60_000
_READY = ModelStatus(model_id="smollm2-135m-instruct", state="ready", max_model_len=8192)
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

pytestmark = [pytest.mark.browser, pytest.mark.skipif(_CHROMIUM is None, reason="no Chromium on this machine")]


class House:
    """The server under test, in a thread: the scripted service and the status that the page is told."""

    def __init__(self) -> None:
        self.service = ScriptedService(piece_s=0.02)
        self.status = _READY
        app = FastAPI()
        mount(app, self.service, lambda: self.status)
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> "House":
        self._thread.start()
        wait_until(lambda: self._server.started)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=30)


class Tab:
    """One browser tab, and what it logged and asked for."""

    def __init__(self, page: Any, house: House) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._hear)
        page.goto(house.url)
        self.box = page.get_by_role("textbox", name="Message")
        self.box.wait_for()

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def send(self, text: str) -> None:
        self.box.fill(text)
        self.box.press("Enter")

    @property
    def answers(self) -> Any:
        return self.page.get_by_test_id("bot")

    @property
    def finished(self) -> Any:
        return self.page.locator("#fs-history").get_by_test_id("bot")

    @property
    def stop(self) -> Any:
        return self.page.get_by_role("button", name="Stop", exact=True)

    def shown(self) -> str:
        return str(self.page.locator("#fs-pane").inner_text())

    def shoot(self, name: str) -> None:
        _ARTIFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=_ARTIFACTS / f"{name}.png")


def wait_until(is_so: Callable[[], bool], seconds: float = _PATIENCE_MS / 1000) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    expect.set_options(timeout=_PATIENCE_MS)
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def running_house() -> Iterator[House]:
    with House() as house:
        yield house


@pytest.fixture
def house(running_house: House) -> House:
    running_house.status = _READY
    running_house.service.is_ready = True
    running_house.service.requests.clear()
    running_house.service.closed.clear()
    return running_house


@pytest.fixture
def open_tab(browser: Any, house: House) -> Iterator[Callable[..., Tab]]:
    """Tabs of one browser window: they share its connections, as a user's do."""
    contexts: dict[tuple[int, int, str], Any] = {}

    def open_one(*, width: int = 1280, height: int = 860, colors: str = "light") -> Tab:
        key = (width, height, colors)
        if key not in contexts:
            viewport = {"width": width, "height": height}
            contexts[key] = browser.new_context(viewport=viewport, color_scheme=colors)
            contexts[key].set_default_timeout(_PATIENCE_MS)
        return Tab(contexts[key].new_page(), house)

    yield open_one
    for context in contexts.values():
        context.close()


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
        expect(tab.page.locator("#fs-live").get_by_test_id("bot")).to_contain_text("n3 ")
        expect(tab.stop).to_be_visible()
        stop()
        wait_until(lambda times=times: len(house.service.closed) == times)
        expect(tab.finished.get_by_text("Stopped.")).to_have_count(times)
    tab.send("say: And on it goes")
    expect(tab.finished.last).to_contain_text("And on it goes")
    assert house.service.requests[2].messages[3].content.startswith("n0 n1 n2 n3 ")
    assert tab.complaints == []


def test_new_chat_forgets_even_an_answer_in_progress(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    tab.send("say: Something old")
    expect(tab.finished.last).to_contain_text("Something old")
    tab.send("count: 5000 every 0.05 as n")
    expect(tab.answers.last).to_contain_text("n3 ")
    tab.page.get_by_role("button", name="New chat").click()
    expect(tab.answers).to_have_count(0)
    wait_until(lambda: len(house.service.closed) == 1)
    tab.send("say: Something new")
    expect(tab.finished.last).to_contain_text("Something new")
    assert len(house.service.requests[-1].messages) == 1
    assert "n3" not in tab.shown() and "old" not in tab.shown()


def test_a_reload_keeps_the_conversation_and_a_new_tab_starts_empty(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    tab.send("say: Something to keep")
    expect(tab.finished.last).to_contain_text("Something to keep")
    tab.page.reload()
    expect(tab.finished.last).to_contain_text("Something to keep")
    tab.send("say: And more")
    expect(tab.finished).to_have_count(2)
    assert [message.content for message in house.service.requests[-1].messages][1] == "Something to keep"
    other = open_tab()
    other.send("say: Fresh")
    expect(other.finished.last).to_contain_text("Fresh")
    assert len(house.service.requests[-1].messages) == 1
    assert tab.complaints == [] and other.complaints == []


def test_closing_a_tab_ends_its_answer(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    tab.send("count: 5000 every 0.05 as n")
    expect(tab.answers.last).to_contain_text("n3 ")
    tab.page.close()
    wait_until(lambda: len(house.service.closed) == 1)


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
        assert {found for found in words if found in tab.page.content()} == {word}


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
    expect(tab.page.locator(".fs-stage")).to_have_text("reading weights 42 %")
    tab.send("say: Here I am")
    expect(tab.answers.last).to_contain_text("as soon as smollm2-135m-instruct is loaded: reading weights (42%)")
    tab.shoot("loading")
    house.status = _READY
    house.service.is_ready = True
    expect(tab.finished.last).to_contain_text("Here I am")
    expect(tab.page.get_by_role("progressbar", name="Loading the model")).to_be_hidden()


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
    for link in tab.page.locator("#fs-pane a").all():
        assert not (link.get_attribute("href") or "").startswith("javascript:")
    assert tab.page.evaluate("window.owned") is None
    assert tab.page.locator(".prose :is(iframe, script, style, svg, form)").count() == 0
    assert tab.page.locator("#fs-pane img").evaluate_all("images => images.every(i => i.naturalWidth === 0)")
    with pytest.raises(playwright_api.Error):
        tab.page.evaluate("fetch('http://192.0.2.1/')")


def test_markdown_is_drawn_with_nothing_from_another_host(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    tab.send(f"think: I look at both and decide. | {_SHOWCASE}")
    expect(tab.finished).to_have_count(2)
    answer = tab.finished.last
    expect(answer.locator("pre code .token").first).to_be_visible()
    expect(answer.get_by_role("button", name="copy")).to_be_attached()
    expect(answer.locator(".katex").first).to_be_visible()
    expect(answer.get_by_role("table")).to_be_visible()
    thought = tab.page.get_by_text("I look at both and decide.", exact=True)
    expect(thought).to_be_hidden()
    tab.finished.first.get_by_text("Thinking").click()
    expect(thought).to_be_visible()
    elsewhere = [url for url in tab.requests if not url.startswith((house.url, "data:", "blob:"))]
    assert len(tab.requests) > 10 and elsewhere == []
    assert tab.complaints == []


def test_copy_gives_the_exact_words_of_the_answer(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for times, words in enumerate(("<b>one</b> for $n$", "two"), start=1):
        tab.send(f"think: hm | {words}")
        expect(tab.page.locator("#fs-history .message-buttons-left")).to_have_count(times)
        tab.page.locator("#fs-history .message-buttons-left button").last.click()
        wait_until(lambda words=words: tab.page.evaluate("navigator.clipboard.readText()") == words)


def test_advanced_settings_reach_the_model(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    tab.page.get_by_role("button", name="Advanced").click()
    tab.page.get_by_label("System prompt").fill("Be brief.")
    tab.page.get_by_label("Temperature").fill("warm")
    tab.send("say: Hello")
    expect(tab.page.get_by_role("alert").filter(has_text="Temperature")).to_be_visible()
    expect(tab.box).to_have_value("say: Hello")
    tab.page.get_by_label("Temperature").fill("0.2")
    tab.page.get_by_label("Seed").fill("7")
    tab.box.press("Enter")
    expect(tab.finished.last).to_contain_text("Hello")
    (request,) = house.service.requests
    assert request.messages[0].content == "Be brief."
    assert (request.sampling.temperature, request.sampling.seed, request.sampling.top_p) == (0.2, 7, None)


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
    expect(tab.finished.last.get_by_role("table")).to_be_visible()
    tab.shoot(name)
    fits = "[document.documentElement.scrollWidth <= innerWidth, document.documentElement.scrollHeight <= innerHeight]"
    assert tab.page.evaluate(fits) == [True, True]
    for control in (tab.box, tab.page.get_by_role("button", name=re.compile("^(Send|New chat|Advanced)"))):
        for part in control.all():
            expect(part).to_be_in_viewport(ratio=1)
