"""What browser tests are given: one Chromium a test file, the page's server, tabs of one window.

The page is imported when a test asks for it: the tests beside those of the browser need not wait for Gradio.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.e2e.tabs import House, Tab


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import expect, sync_playwright

    from tests.e2e.tabs import CHROMIUM, FLAGS, PATIENCE_MS

    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def running_house(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[House]":
    from tests.e2e.tabs import House

    with House(tmp_path_factory.mktemp("page") / "history.db") as house:
        yield house


@pytest.fixture
def house(running_house: "House") -> "House":
    from tests.e2e.tabs import READY

    running_house.status = READY
    running_house.in_memory = []
    running_house.service.is_ready = True
    running_house.service.requests.clear()
    running_house.service.closed.clear()
    return running_house


@pytest.fixture
def open_tab(browser: Any, house: "House") -> "Iterator[Callable[..., Tab]]":
    """Tabs of one browser window: they share its connections, as a user's do."""
    from tests.e2e.tabs import PATIENCE_MS, Tab

    contexts: dict[tuple[int, int, str], Any] = {}

    def open_one(*, width: int = 1280, height: int = 860, colors: str = "light") -> "Tab":
        key = (width, height, colors)
        if key not in contexts:
            viewport = {"width": width, "height": height}
            contexts[key] = browser.new_context(viewport=viewport, color_scheme=colors)
            contexts[key].set_default_timeout(PATIENCE_MS)
        return Tab(contexts[key].new_page(), house)

    yield open_one
    for context in contexts.values():
        context.close()
