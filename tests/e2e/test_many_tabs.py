"""Many tabs of one real browser: none starves, none is slower than the API, an update costs the same in a long chat.

Speeds are compared within one run: a tab with another, the page with the API, a long chat with a short one.
"""

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.history.exchange import WholeChat, WholeMessage
from app.ui.talk import NUM_AT_ONCE
from tests.app.api.house import House as Api
from tests.app.history.test_size import fill
from tests.e2e.tabs import CHROMIUM, House, Tab, wait_until
from tests.fakes import Script, byte_model_folder, ids

playwright_api = pytest.importorskip("playwright.sync_api")
expect = playwright_api.expect

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]

# Notes, in the tab, each time the growing answer has been drawn: [milliseconds, characters]. It looks at the last
# message alone, so that its own work does not grow with the chat.
_WATCH = """() => {
    window.drawn = [];
    new MutationObserver(() => {
        const last = document.querySelector("#fs-pane > .fs-list").lastElementChild;
        const text = last?.dataset.state === "writing" ? last.querySelector("[data-testid]") : null;
        const length = text?.textContent.length ?? 0;
        if (length > (window.drawn.at(-1)?.[1] ?? 0)) window.drawn.push([performance.now(), length]);
    }).observe(document.getElementById("fs-pane"), { subtree: true, childList: true, characterData: true });
}"""


# Asks for earlier messages until so many are there.
_SHOW_ALL = """async (number) => {
    const count = () => document.querySelectorAll(".fs-message").length;
    for (let asked = 0; count() < number; await new Promise((resolve) => setTimeout(resolve, 20))) {
        if (count() > asked) {
            asked = count();
            document.querySelector("#fs-pane > .fs-quiet").click();
        }
    }
}"""


def test_eight_tabs_of_one_browser_stream_at_once_and_none_starves(browser: Any, tmp_path: Path) -> None:
    with House(tmp_path / "history.db") as house:
        context = browser.new_context()
        tabs = [Tab(context.new_page(), house) for _ in range(8)]
        for tab in tabs:
            tab.page.evaluate(_WATCH)
        for number, tab in enumerate(tabs):
            tab.send(f"count: 4000 every 0.01 as tab{number}x")
        wait_until(lambda: house.service.num_open == 8)
        for number, tab in enumerate(tabs):
            expect(tab.writing).to_contain_text(f"tab{number}x9 ")
        counts = [tab.page.evaluate("drawn.length") for tab in tabs]
        time.sleep(6)
        grown = [tab.page.evaluate("drawn.length") - count for tab, count in zip(tabs, counts, strict=True)]
        for tab in tabs:
            tab.stop.click()
        for number, tab in enumerate(tabs):
            expect(tab.finished).to_have_count(1)
            assert set(tab.finished.get_by_test_id("bot").inner_text().split()) <= {
                f"tab{number}x{i}" for i in range(4000)
            }
            assert tab.complaints == []
        print(f"updates of each tab in the same 6 s: {grown}")
        assert min(grown) > max(grown) / 2
        context.close()


@pytest.mark.parametrize("rate", [50, 150])
def test_the_page_shows_as_many_tokens_a_second_as_the_api_gives(browser: Any, tmp_path: Path, rate: int) -> None:
    num_tokens = rate * 6
    script = Script(token_ids=ids("ab " * (num_tokens // 3)), pause_s=1 / rate)
    api = Api(byte_model_folder(tmp_path / "bytes"), script, max_model_len=num_tokens + 200)
    with House(tmp_path / "history.db", answerer=api.service, app=api.app) as house:
        tab = Tab(browser.new_page(), house)
        tab.page.evaluate(_WATCH)
        told: list[tuple[float, int]] = []
        asking = threading.Thread(target=_ask_api, args=(house.url, told))
        tab.send("hello")
        asking.start()
        expect(tab.finished).to_have_count(1)
        asking.join(60)
        shown = _rate([(ms / 1000, length) for ms, length in tab.page.evaluate("drawn")])
        given = _rate(told)
        print(f"{rate} tokens/s asked: the API gives {given:.1f}, the page shows {shown:.1f}")
        assert shown == pytest.approx(given, rel=0.05)
        tab.page.close()


def _ask_api(url: str, told: list[tuple[float, int]]) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    length = 0
    with httpx.stream("POST", f"{url}v1/chat/completions", json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                length += len(choices[0]["delta"].get("content") or "") if choices else 0
                told.append((time.perf_counter(), length))


def _rate(points: list[tuple[float, int]]) -> float:
    """Characters a second, which are tokens here, from a fifth of the answer on: the slope of all points."""
    first, last = points[0][1], points[-1][1]
    used = [(at, length) for at, length in points if first + (last - first) / 5 < length < last]
    mean_at = sum(at for at, _ in used) / len(used)
    mean_length = sum(length for _, length in used) / len(used)
    return sum((at - mean_at) * (length - mean_length) for at, length in used) / sum(
        (at - mean_at) ** 2 for at, _ in used
    )


def test_an_update_costs_the_same_in_a_long_chat(browser: Any, tmp_path: Path) -> None:
    """CPU of the tab for each update: in a chat of nothing, and below 200 and 1,000 messages, all looked at."""
    with House(tmp_path / "history.db") as house:
        tab = Tab(browser.new_page(), house)
        costs = {number: _cost_below(number, tab, house) for number in (0, 200, 1000)}
        told = ", ".join(f"{cost:.2f} ms below {number:,} messages" for number, cost in costs.items())
        print(f"CPU of an update: {told}")
        assert max(costs.values()) < 1.5 * costs[0]
        tab.page.close()


def _cost_below(num_messages: int, tab: Tab, house: House) -> float:
    messages = tuple(
        WholeMessage(
            id=str(i),
            parent_id=str(i - 1) if i else None,
            role="assistant" if i % 2 else "user",
            text="Some words of **it**.\n\n" * 9,
        )
        for i in range(num_messages)
    )
    leaf_id = messages[-1].id if messages else None
    whole = WholeChat(title=f"{num_messages} messages", leaf_id=leaf_id, messages=messages)
    chat_id = house.book.kept.import_([whole])[0].id
    tab.page.goto("about:blank")  # not one page after the other in the same document
    tab.page.goto(f"{house.url}#/chat/{chat_id}")
    if num_messages:
        tab.page.locator(".fs-message").first.wait_for()
        tab.page.evaluate(_SHOW_ALL, num_messages)
    return _cost_of_an_update(tab)


def _cost_of_an_update(tab: Tab) -> float:
    tab.page.evaluate(_WATCH)
    tab.send("count: 4000 every 0.01 as n")
    expect(tab.writing).to_contain_text("n100 ")
    cost = tab.cost_of_an_update("drawn.length", seconds=5)
    tab.stop.click()
    expect(tab.writing).to_have_count(0)
    return cost


# Notes when the first message stands in the page: milliseconds since the page was asked for.
_FIRST_DRAWN = """new MutationObserver(() => {
    window.firstAt ??= document.querySelector(".fs-list .fs-message") && performance.now();
}).observe(document, { subtree: true, childList: true })"""


def test_a_chat_of_ten_thousand_messages_opens_as_soon_as_a_short_one(browser: Any, tmp_path: Path) -> None:
    """From asking for the page to its first message, with a history that the server has not opened yet."""
    took_ms: dict[int, list[float]] = {10: [], 10_000: []}
    for number in took_ms:
        fill(tmp_path / f"{number}.db", number)
    for number in [*took_ms] * 3:
        with House(tmp_path / f"{number}.db") as house:
            page = browser.new_page()
            page.add_init_script(_FIRST_DRAWN)
            page.goto(f"{house.url}#/chat/chat0")
            page.wait_for_function("window.firstAt")
            took_ms[number].append(page.evaluate("firstAt"))
            expect(page.locator(".fs-message")).to_have_count(min(number, NUM_AT_ONCE))
            page.close()
    short, long = (min(each) for each in took_ms.values())
    print(f"first message of a chat of 10 after {short:.0f} ms, of 10,000 after {long:.0f} ms")
    assert long < 2 * short
