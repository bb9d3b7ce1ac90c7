"""A long answer while it comes: what was drawn stays, and an update costs the same however much there is already."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.chat.types import ChatDelta, ChatRequest
from tests.e2e.tabs import CHROMIUM, House, Tab, wait_until

playwright_api = pytest.importorskip("playwright.sync_api")
expect = playwright_api.expect

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]

SENTENCE = "some words of a model that go on and on "
SCRIPT = "\n".join(f"const v{i} = '{i}'; // a remark" for i in range(160))
ROWS = "\n".join(f"| {i} | **b{i}** \\| x |" for i in range(40))
LINES = "\n".join(f"row {i}" for i in range(200))
LONG = " ".join(f"**b{i}** and `c{i}`, plain words, it goes on" for i in range(200))
EVERY_KIND = f"""Words before.

1. one
2. two

   more of two

3. three
   - a
   - b
     deeper

- x
- y
* another list

```js
{SCRIPT}
```

| a | b |
|---|---|
{ROWS}

> quoted

```
plain **code**

{LINES}
```
    indented code

Long {LONG} end, \\(x^2\\).

10. ten
11. eleven
"""


class Repeater:
    """Gives `text`: its first `num_at_once` characters, then `size` at a time."""

    def __init__(self) -> None:
        self.text = ""
        self.num_at_once = 0
        self.size = 4
        self.pause_s = 0.01

    async def stream(self, request: ChatRequest) -> AsyncIterator[ChatDelta]:
        if self.num_at_once:
            yield ChatDelta(text=self.text[: self.num_at_once])
            await asyncio.sleep(0.5)
        for start in range(self.num_at_once, len(self.text), self.size):
            await asyncio.sleep(self.pause_s)
            yield ChatDelta(text=self.text[start : start + self.size])


@pytest.fixture
def repeater() -> Repeater:
    return Repeater()


@pytest.fixture
def tab(browser: Any, tmp_path: Path, repeater: Repeater) -> Iterator[Tab]:
    with House(tmp_path / "history.db", answerer=repeater) as house:
        page = browser.new_page()
        yield Tab(page, house)
        page.close()


# What is drawn, less what only says how: groups, and the parts of a long paragraph.
_DRAWN = """() => document.querySelector(".fs-answer .fs-text").innerHTML
    .replace(/<div( class="fs-(block|group)")?( data-goes-on="")?>|<\\/div>/g, "")
    .replace(/\\s+/g, " ").replace(/ ?<\\/p> ?<p>/g, " ")"""


@pytest.mark.parametrize("size", [13])
def test_a_text_of_every_kind_is_drawn_as_the_whole_one_is(tab: Tab, repeater: Repeater, size: int) -> None:
    repeater.text, repeater.size, repeater.pause_s = EVERY_KIND, size, 0.001
    tab.send("go")
    expect(tab.finished).to_have_count(1)
    expect(tab.finished.locator(".hljs-keyword").first).to_be_attached()
    expect(tab.finished.locator(".katex")).to_have_count(1)
    grown = tab.page.evaluate(_DRAWN)
    tab.page.reload()
    expect(tab.finished.locator(".hljs-keyword").first).to_be_attached()
    expect(tab.finished.locator(".katex")).to_have_count(1)
    assert tab.page.evaluate(_DRAWN) == grown
    assert tab.complaints == []


_MISLEADING = {
    "rows of a list that are parted late": "- a\n- b\n- c\n\n- d\n- e\n\nThe end of it all.",
    "a row that looks like a paragraph until its dot": "14. a\n\n15. b\n\n16. c\n\nThe end of it all.",
    "a list of another mark": "- a\n- b\n* c\n* d",
    "a formula with an empty line in it": "Look:\n\n$$\nx\n\ny\n$$\n\nThe end of it all.",
    "a long paragraph": "plain words " * 400 + "and **bold** ones\n\nThe end of it all.",
    "tasks": "- [ ] to do\n- [x] done\n- [x]no task\n- [ ] more of it\n\n[x] no task either, the end of it all.",
    "a link that is defined at last": "See [there][a].\n\n- one\n- two\n\n[a]: https://example.org/",
    "a table after words": "Words\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\nThe end of it all.",
}

# A text drawn while it comes, and drawn at once.
_BOTH = """async ([text, size]) => {
    const { GrowingText } = await import("/ui/static/growing.js");
    const [one, other] = [document.createElement("div"), document.createElement("div")];
    const [grown, whole] = [new GrowingText(one), new GrowingText(other)];
    for (let end = size; end < text.length + size; end += size) grown.set(text.slice(0, end));
    whole.set(text);
    for (const each of [grown, whole]) each.finish();
    const bare = (root) => root.innerHTML
        .replace(/<div( class="fs-(block|group)")?>|<\\/div>/g, "").replace(/\\s+/g, " ");
    return [bare(one), bare(other)];
}"""


def test_what_looked_otherwise_while_it_came_is_drawn_as_the_whole_is(tab: Tab) -> None:
    for kind, text in _MISLEADING.items():
        for size in (1, 2, 7) if len(text) < 1000 else (40,):
            grown, whole = tab.page.evaluate(_BOTH, [text, size])
            assert grown == whole, (kind, size)
        if kind == "tasks":
            assert all(words in grown for words in ("☐ to do", "☑ done", "[x]no task", "[x] no task either"))


# Selects the words "first words" in the paragraph or the code that grows.
_SELECT = """() => {
    const walker = document.createTreeWalker(document.querySelector(".fs-answer .fs-text"), NodeFilter.SHOW_TEXT);
    while (!walker.nextNode().data.includes("first words"));
    const at = walker.currentNode.data.indexOf("first words");
    getSelection().setBaseAndExtent(walker.currentNode, at, walker.currentNode, at + 11);
}"""


@pytest.mark.parametrize("before", ["", "- ", "```\n"], ids=["paragraph", "list", "code"])
def test_what_the_reader_has_selected_stays_selected_while_the_block_grows(
    tab: Tab, repeater: Repeater, before: str
) -> None:
    repeater.text = f"{before}Here are the first words of " + "one block that **grows** " * 60
    tab.send("go")
    expect(tab.writing.get_by_test_id("bot")).to_contain_text("first words of one")
    tab.page.evaluate(_SELECT)
    length = _length(tab)
    wait_until(lambda: _length(tab) > length + 200)
    assert tab.page.evaluate("getSelection().toString()") == "first words"


def _length(tab: Tab) -> int:
    return int(tab.page.evaluate("document.querySelector('.fs-answer .fs-text').textContent.length"))


def test_a_tab_that_nobody_touches_asks_for_no_frames(tab: Tab) -> None:
    tab.page.evaluate("""() => {
        window.numAsked = 0;
        const ask = window.requestAnimationFrame.bind(window);
        window.requestAnimationFrame = (draw) => { window.numAsked += 1; return ask(draw); };
    }""")
    time.sleep(1.5)  # whatever asks again and again has asked by now
    assert tab.page.evaluate("numAsked") < 5
    assert tab.page.locator("gradio-app").count() == 0


def _mixed(i: int) -> str:
    parts = (
        f"## Part {i}\n\n",
        f"{SENTENCE * 6} **bold**, `code` and \\(x^2_{{{i}}}\\).\n\n",
        f"- {SENTENCE}\n" * 5 + "\n",
        "```python\n" + f"def f{i}(x):\n    return x + {i}\n" * 6 + "```\n\n",
        "| a | b |\n|---|---|\n" + f"| some | {i} |\n" * 5 + "\n",
        f"$$\\sum_{{i=0}}^{{{i}}} \\frac{{x^i}}{{i!}}$$\n\n",
    )
    return parts[i % len(parts)]


KINDS: dict[str, tuple[str, Callable[[int], str]]] = {
    "mixed": ("", _mixed),
    "code": ("```python\n", lambda i: f"def f{i}(x):\n    return x + {i}  # some words\n"),
    "list": ("", lambda i: f"{i + 1}. {SENTENCE}\n"),
    "paragraph": ("", lambda i: SENTENCE),
    "formulas": ("", lambda i: f"so $x_{{{i}}}^2 + \\frac{{a}}{{b}}$ it is, {SENTENCE}" + "\n\n" * (i % 5 == 4)),
    "table": ("| a | b | c |\n|---|---|---|\n", lambda i: f"| some words | {i} | **more** |\n"),
}
# Chromium lays a table out as a whole, which grows with its rows, and looks at more than it must once a page has
# formulas. Others must not grow: what is left is noise.
AT_MOST = {"table": 3.0, "formulas": 4.0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_costs_the_same_in_a_long_answer(tab: Tab, repeater: Repeater, kind: str) -> None:
    """CPU of the tab's main thread for each update after 2,000 and after 40,000 characters of one answer, in turns."""
    begin, part = KINDS[kind]
    costs: dict[int, list[float]] = {2_000: [], 40_000: []}
    for number in [*costs] * 3:
        text, i = begin, 0
        while len(text) < number + 2_000:
            text, i = text + part(i), i + 1
        repeater.text, repeater.num_at_once = text, number
        costs[number].append(_cost_of_an_update(tab))
    short, long = (statistics.median(each) for each in costs.values())
    print(f"{kind}: {short:.2f} ms an update after 2,000 characters, {long:.2f} ms after 40,000")
    assert long < AT_MOST.get(kind, 2.0) * short


def _cost_of_an_update(tab: Tab) -> float:
    tab.page.goto("about:blank")
    tab.page.goto(tab.house.url)
    tab.send("go")
    expect(tab.writing).to_have_count(1)
    time.sleep(2)  # the first part is drawn, the fonts of its formulas are here
    tab.page.evaluate("""() => {
        window.numDrawn = 0;
        new MutationObserver(() => { window.numDrawn += 1; }).observe(
            document.querySelector(".fs-answer .fs-text"), { subtree: true, childList: true, characterData: true });
    }""")
    cost = tab.cost_of_an_update("numDrawn", seconds=2)
    tab.stop.click()
    expect(tab.writing).to_have_count(0)
    return cost
