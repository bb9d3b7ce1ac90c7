"""The page's rooms beside the chat, as a person uses them: a real Chromium against the page as the server puts it
together, over a hub of our own and scripted engines. Screenshots go to tests/artifacts/.
"""

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from app.api.keys import ApiKey, Keyring
from app.api.metrics import Metrics
from app.chat.service import TurnRecord
from app.errors import AppError
from app.models.hub.download import fetch
from app.models.hub.downloads import Downloads
from app.models.library import Library
from app.models.manager import ModelManager
from app.models.shelf import ModelShelf
from app.page_rooms import Behind, build_page
from app.server import loading
from app.settings import load
from app.ui.lately import Lately
from engine.types import EngineStats, RequestClass, Standing
from tests.app.models import fake_nvml
from tests.app.models.fake_hub import FakeHub
from tests.app.models.scripted import Engines
from tests.app.models.small_hub import TINY, small_hub
from tests.app.ui.rooms import ADMIN, USER, Known
from tests.app.ui.scripted import ScriptedService
from tests.e2e.tabs import ARTIFACTS, CHROMIUM, axe_findings, wait_until
from tests.fakes import memory_report

playwright_api = pytest.importorskip("playwright.sync_api")
expect = playwright_api.expect

_BATCH = Standing(request_class=RequestClass.BATCH)
HERE = "qwen3-8b-awq"

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]


class Service(ScriptedService):
    turns: tuple[TurnRecord, ...] = ()

    def under_way(self) -> tuple[TurnRecord, ...]:
        return self.turns


class House:
    """The page, asked by whoever has `key`, in a thread of its own."""

    def __init__(self, home: Path, key: ApiKey = ADMIN) -> None:
        settings = load({"home": home, "max_models": 1, "gpu_memory_gb": 24.0}, {})
        self.home = home
        self.library = Library(settings)
        self.library.downloads = Downloads(settings.models_folder, fetch)
        self.engines = Engines()
        self.engines.gate.set()
        self.manager = ModelManager(
            settings, ModelShelf(settings.models_folder), self.engines, needs=lambda folder, config, kind: 0
        )
        self.metrics, self.lately, self.keys = Metrics(self.manager.stats), Lately(), Keyring()
        self.service = Service()
        page = build_page(
            Behind(
                settings=settings,
                service=self.service,  # type: ignore[arg-type]
                manager=self.manager,
                library=self.library,
                metrics=self.metrics,
                lately=self.lately,
                keys=self.keys,
            )
        )
        page.add_middleware(Known, key=key)
        self._server = uvicorn.Server(uvicorn.Config(page, port=0, log_level="warning", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self.library.downloads.on_wanted = loading(self.manager, self._loop)
            await self._server.serve()

        asyncio.run(serve())

    def __enter__(self) -> "House":
        self._thread.start()
        wait_until(lambda: self._server.started)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/"
        return self

    def on_loop(self, work: Callable[[], object]) -> None:
        """Run it on the server's event loop, and wait until it has run."""
        has_run = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (work(), has_run.set()))
        assert has_run.wait(10)

    def drop_connections(self) -> None:
        """As when the server was away for a moment."""
        state = self._server.server_state
        self.on_loop(lambda: [connection.transport.close() for connection in [*state.connections]])

    def __exit__(self, *_: object) -> None:
        self.library.downloads.close()
        self._server.should_exit = True
        self._thread.join(timeout=30)


@pytest.fixture(scope="module")
def hub(tiny_files: dict[str, bytes]) -> Iterator[FakeHub]:
    with pytest.MonkeyPatch.context() as patch, small_hub({TINY: tiny_files}, patch) as hub:
        yield hub


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, hub: FakeHub, tiny_files: dict[str, bytes]) -> Iterator[House]:
    """With one model of the catalogue that lies there whole, whatever is in it."""
    home = tmp_path_factory.mktemp("home")
    folder = home / "models" / HERE
    folder.mkdir(parents=True)
    for name, content in tiny_files.items():
        (folder / name).write_bytes(content)
    with House(home) as made:
        yield made


class Tab:
    """One browser tab; what it logged, and what it asked of others than the server."""

    def __init__(self, browser: Any, url: str, room: str, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.strangers: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on(
            "request", lambda r: None if r.url.startswith((url, "data:", "blob:")) else self.strangers.append(r.url)
        )
        self.page.goto(f"{url}#/{room}")
        self.room = self.page.locator(f"#fs-room-{room}")
        self.room.get_by_role("heading").first.wait_for()

    def shoot(self, name: str) -> None:
        ARTIFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=ARTIFACTS / f"{name}.png")

    def row(self, model: str) -> Any:
        return self.room.locator("li.fr-row").filter(has=self.page.get_by_text(model, exact=True))


@pytest.fixture
def tab(browser: Any, house: House) -> Iterator[Callable[..., Tab]]:
    opened: list[Tab] = []

    def open_tab(room: str, **context: Any) -> Tab:
        opened.append(Tab(browser, house.url, room, **context))
        return opened[-1]

    yield open_tab
    for each in opened:
        each.context.close()
        assert each.strangers == [] and each.complaints == []


# Models


def test_a_model_of_the_list_is_loaded_and_unloaded(tab: Callable[..., Tab]) -> None:
    models = tab("models", viewport={"width": 1200, "height": 900})
    row = models.row(HERE)
    expect(row).to_contain_text("On this machine")
    row.get_by_role("button", name="Load: ").click()
    expect(row).to_contain_text("In memory and in use")
    expect(models.page.locator(".fs-model")).to_have_value(HERE)
    models.shoot("models")
    row.get_by_role("button", name="Unload").click()
    expect(row).to_contain_text("On this machine")


def test_a_model_is_loaded_and_unloaded_by_the_keyboard_alone(tab: Callable[..., Tab]) -> None:
    """Where the button that was pressed makes room for another, that one has the focus."""
    models = tab("models")
    row, label = models.row(HERE), "document.activeElement.getAttribute('aria-label')"
    expect(row).to_contain_text("On this machine")
    for _ in range(100):
        models.page.keyboard.press("Tab")
        if models.page.evaluate(label) == f"Load: {HERE}":
            break
    models.page.keyboard.press("Enter")
    expect(row).to_contain_text("In memory and in use")
    expect(row.get_by_role("button", name="Unload")).to_be_focused()
    models.page.keyboard.press("Enter")
    expect(row).to_contain_text("On this machine")
    expect(row.get_by_role("button", name="Load: ")).to_be_focused()


def test_a_row_that_is_opened_shows_the_forecast_and_keeps_defaults(tab: Callable[..., Tab], house: House) -> None:
    models = tab("models", viewport={"width": 1200, "height": 1400})
    row = models.row(HERE)
    row.get_by_text("Forecast, defaults and files").click()
    expect(row.get_by_role("img")).to_have_count(1)
    expect(row).to_contain_text("Largest context")
    row.get_by_label("Temperature").fill("0.3")
    row.get_by_label("Context (tokens)").fill("128")
    row.get_by_role("button", name="Keep as this model's own").click()
    expect(row).to_contain_text("Kept in your models.yaml")
    entry = house.library.shelf.resolve(HERE)
    assert (entry.sampling["temperature"], entry.load["max_model_len"]) == (0.3, 128)
    models.shoot("models-opened")
    row.get_by_role("button", name="Check every file").click()
    expect(row).to_contain_text("no hash is known")


def test_the_hub_is_searched_and_a_hit_fetched_and_deleted_again(tab: Callable[..., Tab], house: House) -> None:
    models = tab("models", viewport={"width": 1200, "height": 1000})
    models.room.get_by_label("Words").fill("qwen")
    models.room.get_by_role("button", name="Search", exact=True).click()
    expect(models.row("big/Qwen3-235B-AWQ")).to_contain_text("too large")
    expect(models.row("big/Qwen3-235B-AWQ")).to_contain_text("gated")
    models.row("big/Qwen3-235B-AWQ").scroll_into_view_if_needed()
    models.shoot("models-search")
    models.room.get_by_label("Repository or folder").fill(TINY)
    models.room.get_by_role("button", name="Add", exact=True).click()
    row = models.row("tiny-gptq")
    row.get_by_role("button", name="Download").click()
    expect(row).to_contain_text("On this machine")
    row.get_by_role("button", name="Delete", exact=True).click()
    row.get_by_role("button", name=re.compile(r"^Delete it now, [\d.]+ kB$")).click()
    expect(row).to_have_count(0)
    expect(models.room).to_contain_text(re.compile(r"tiny-gptq is deleted: [\d.]+ kB are free again\."))
    assert not (house.library.shelf.folder(house.library.shelf.resolve(TINY))).exists()


# Monitor


def test_the_monitor_shows_requests_the_pool_latencies_and_what_went_wrong(
    tab: Callable[..., Tab], house: House
) -> None:
    reading = TurnRecord(request_id="r1", model=HERE, prompt_tokens=900, cached_tokens=300)
    writing = TurnRecord(
        request_id="r2", model=HERE, standing=_BATCH, prompt_tokens=20, completion_tokens=7, ttft_s=0.2
    )
    house.service.turns = (reading, writing)
    for gap_s in (0.011, 0.012, 0.03):
        house.metrics.token(gap_s)
    house.lately.failed(TurnRecord(request_id="r0", model=HERE, error=AppError(503, "engine_died", "It died.")))
    house.lately.emit(logging.LogRecord("fireside", logging.INFO, "", 0, "A line of the log", (), None))
    monitor = tab("monitor", viewport={"width": 1200, "height": 1300})
    expect(monitor.room.get_by_role("row")).to_have_count(4)
    expect(monitor.room).to_contain_text("900 (300 cached)")
    expect(monitor.room).to_contain_text("batch")
    expect(monitor.room).to_contain_text("Of 3, half within about 12 ms, 99 % within about 30 ms.")
    expect(monitor.room).to_contain_text("engine_died")
    log = monitor.room.get_by_label("Log", exact=True).last
    expect(log).to_contain_text("A line of the log")
    monitor.shoot("monitor-empty")
    house.lately.emit(logging.LogRecord("fireside", logging.INFO, "", 0, "Another one", (), None))
    expect(log).to_contain_text("Another one")
    monitor.room.get_by_label("Filter the log").fill("ANOTHER")
    expect(log).not_to_contain_text("A line of the log")
    expect(log).to_contain_text("Another one")
    monitor.room.get_by_label("Filter the log").fill("")
    monitor.room.get_by_role("button", name="Pause", exact=True).click()
    house.lately.emit(logging.LogRecord("fireside", logging.INFO, "", 0, "A third one", (), None))
    monitor.page.wait_for_timeout(3500)
    expect(log).not_to_contain_text("A third one")
    monitor.room.get_by_role("button", name="Pause", exact=True).click()
    expect(log).to_contain_text("A third one")


def test_a_card_shows_its_memory_and_how_much_it_works(
    tab: Callable[..., Tab], house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml.install(monkeypatch)
    monitor = tab("monitor", viewport={"width": 1200, "height": 1000})
    device = monitor.room.get_by_role("region", name="The machine")
    expect(device).to_contain_text("fast: 2 GB of 4 GB")
    expect(device).to_contain_text("37 % busy · 64 °C · 215 W")
    expect(device).to_contain_text(re.compile(r"\(pid \d+\): 250 MB"))
    expect(device.get_by_role("img", name="How busy")).to_be_visible()
    monitor.shoot("monitor-card")


def test_memory_is_given_back_with_a_slider(tab: Callable[..., Tab], house: House) -> None:
    report = replace(memory_report(), total_bytes=24 * 10**9, weights_bytes=6 * 10**9, kv_bytes=10 * 10**9)
    house.engines.on_card = report
    house.on_loop(lambda: house.manager.load(HERE))
    wait_until(lambda: house.manager.status().state == "ready")
    house.engines.children[-1].stats = EngineStats(
        num_requests_running=2,
        num_blocks_total=4000,
        num_blocks_used=900,
        num_blocks_cached=1500,
        prefix_cache_queries=1000,
        prefix_cache_hits=450,
        generation_tokens=5000,
    )
    try:
        monitor = tab("monitor", viewport={"width": 1200, "height": 1300})
        expect(monitor.room).to_contain_text("The cache holds 10 GB")
        expect(monitor.room).to_contain_text("45 % of prompt tokens found")
        expect(monitor.room.get_by_role("img", name="900 of 4000 blocks held")).to_be_visible()
        monitor.room.get_by_label("GB of the KV cache for other programs").fill("2.5")
        monitor.room.get_by_role("button", name="Give back").click()
        wait_until(lambda: house.engines.children[-1].lent == [2_500_000_000])
        monitor.shoot("monitor")
    finally:
        house.engines.on_card = None
        house.on_loop(lambda: asyncio.ensure_future(house.manager.unload(HERE)))


# Settings


def test_a_filter_that_finds_no_setting_says_so(tab: Callable[..., Tab]) -> None:
    settings = tab("settings")
    settings.room.get_by_label("Filter the settings").fill("zzz")
    expect(settings.room.get_by_text("No setting is like that.")).to_be_visible()
    settings.room.get_by_label("Filter the settings").fill("port")
    expect(settings.room.get_by_text("No setting is like that.")).to_be_hidden()


def test_a_check_of_what_fits_tells_how_many_could_not_be_asked_and_why(tab: Callable[..., Tab]) -> None:
    models = tab("models")
    asked = []

    def refuse(route: Any) -> None:
        asked.append(route.request.url)
        route.fulfill(status=502, json={"error": {"message": "huggingface.co cannot be reached.", "code": "offline"}})

    models.page.route("**/ui/models/fit?*", refuse)
    models.room.get_by_role("button", name="Check which fit").click()
    told = re.compile(
        r"^0 were judged by their headers; \d\d could not be asked about: huggingface.co cannot be reached"
    )
    expect(models.room.get_by_text(told)).to_be_visible()
    assert len(asked) == 3, "it does not go on in vain"
    models.complaints.clear()


def test_a_setting_is_changed_and_its_file_tells_so(tab: Callable[..., Tab], house: House) -> None:
    settings = tab("settings", viewport={"width": 1200, "height": 1200})
    row = settings.room.locator("[data-setting=port]")
    expect(row).to_contain_text("Default: 8000")
    settings.shoot("settings")
    row.get_by_text("Change", exact=True).click()
    row.get_by_role("textbox").fill("8200")
    row.get_by_role("button", name="Keep").click()
    expect(row).to_contain_text("8200 after a restart")
    assert "port: 8200" in (house.home / "settings.yaml").read_text()
    row.get_by_role("textbox").fill("99999")
    row.get_by_role("button", name="Keep").click()
    expect(row).to_contain_text("it must be a whole number from 0 to 65535")
    row.get_by_role("button", name="Back to the default").click()
    expect(row).not_to_contain_text("8200")
    settings.complaints.clear()  # the browser notes the refusal


def test_programs_are_told_this_address_and_the_snippet_is_copied(tab: Callable[..., Tab], house: House) -> None:
    settings = tab("settings", permissions=["clipboard-read", "clipboard-write"])
    settings.room.get_by_label("Program", exact=True).select_option("Continue")
    snippet = settings.room.get_by_label("What to enter or copy")
    expect(snippet).to_contain_text(f"apiBase: {house.url}v1")
    settings.room.get_by_role("button", name="Copy").click()
    expect(settings.room.get_by_role("button", name="Copied")).to_be_visible()
    assert settings.page.evaluate("navigator.clipboard.readText()") == snippet.inner_text()


def test_theme_and_language_are_kept_by_the_browser(tab: Callable[..., Tab]) -> None:
    settings = tab("settings", viewport={"width": 360, "height": 740}, color_scheme="light")
    settings.room.get_by_label("Theme", exact=True).select_option("dark")
    expect(settings.page.locator("body.dark")).to_have_count(1)
    settings.room.get_by_label("Language", exact=True).select_option("zh")
    expect(settings.page.get_by_role("heading", name="设置", exact=True)).to_be_visible()
    expect(settings.page.locator("body.dark")).to_have_count(1)
    settings.shoot("settings-dark-zh-360")
    settings.room.get_by_label("主题", exact=True).select_option("system")
    expect(settings.page.locator("body.dark")).to_have_count(0)
    settings.page.emulate_media(color_scheme="dark")
    expect(settings.page.locator("body.dark")).to_have_count(1)
    assert settings.page.evaluate("document.documentElement.lang") == "zh"


def test_theme_and_language_chosen_in_one_tab_reach_the_others(tab: Callable[..., Tab]) -> None:
    settings = tab("settings", color_scheme="light")
    other = settings.context.new_page()
    other.goto(settings.page.url)
    theme = other.get_by_label("Theme", exact=True)
    expect(theme).to_have_value("system")
    settings.room.get_by_label("Theme", exact=True).select_option("dark")
    expect(other.locator("body.dark")).to_have_count(1)
    expect(theme).to_have_value("dark")
    settings.room.get_by_label("Language", exact=True).select_option("zh")
    expect(other.get_by_role("heading", name="设置", exact=True)).to_be_visible()


def test_every_sentence_of_the_server_is_found_in_the_pages_language(tab: Callable[..., Tab]) -> None:
    """With a word for each value, no sentence is taken for another one."""
    one = tab("settings", locale="zh-CN")
    wrong = one.page.evaluate("""async () => {
        const { localized } = await import("/ui/static/core.js");
        const tables = await Promise.all(["settings", "chat", "models", "engine"].map((name) => (
            import(`/ui/static/words/server_zh_${name}.js`))));
        const filled = (words, values) => words.replace(/\\{(\\d+)\\}/g, (_, at) => values[at]);
        return tables.flatMap((table) => Object.entries(table.default)).filter(([english, words]) => {
            const letters = english.replaceAll("{}", "").match(/[a-z]/gi)?.length ?? 0;
            if (english.includes("{}{}") || letters < 4) return false; // nobody can see what its values are
            let at = 0;
            const values = [];
            const text = english.replaceAll("{}", () => { values.push(`x${at}`); at += 1; return `x${at - 1}`; });
            const whole = filled(words, values).trim();
            const beside = english.endsWith(".") ? localized(`${text} Try again.`) : `${whole}请重试。`;
            return localized(text) !== whole || beside !== `${whole}请重试。`;
        });
    }""")
    assert wrong == []
    told = one.page.evaluate(
        'async (text) => (await import("/ui/static/core.js")).localized(text)',
        "The model `nope` does not exist here. `small` is in hand. GET /v1/models lists all.",  # a value is a sentence
    )
    assert told == "这里没有模型 `nope`。当前模型是 `small`。GET /v1/models 会列出全部模型。"


@pytest.mark.parametrize(
    ("english", "words"),
    [
        ("Nobody knows this. Nor that.", "Nobody knows this. Nor that."),
        ("Nobody knows this; nor that", "Nobody knows this; nor that"),
        ("Nobody knows this. Try again.", "Nobody knows this.请重试。"),
    ],
)
def test_sentences_that_no_table_has_stay_as_they_were_with_their_blanks(
    tab: Callable[..., Tab], english: str, words: str
) -> None:
    one = tab("settings", locale="zh-CN")
    told = "async (text) => (await import('/ui/static/core.js')).localized(text)"
    assert one.page.evaluate(told, english) == words


# Texts with three English words in a row, outside of code and of the log.
_ENGLISH = """() => {
    const room = document.querySelector("main section:not([hidden])");
    const walker = document.createTreeWalker(room, NodeFilter.SHOW_TEXT);
    const found = [];
    while (walker.nextNode()) {
        const { data, parentElement } = walker.currentNode;
        if (!parentElement.closest("pre, code") && /[A-Za-z]{2,} [a-z]{2,} [a-z]{2,}/.test(data)) found.push(data);
    }
    return found;
}"""


def test_the_page_in_chinese_has_no_english_sentence(tab: Callable[..., Tab], house: House) -> None:
    died = AppError(503, "engine_died", "The engine process ended unexpectedly (killed by SIGKILL).", hint="Try again.")
    house.lately.failed(TurnRecord(request_id="r0", model=HERE, error=died))
    one = tab("models", locale="zh-CN")
    one.row(HERE).locator("summary").click()
    expect(one.row(HERE).get_by_role("img")).to_have_count(1)
    for room, shown in (("models", "本机已有。"), ("monitor", "引擎进程意外结束"), ("settings", "同时计算的请求数")):
        one.page.goto(f"{one.page.url.partition('#')[0]}#/{room}")
        expect(one.page.locator(f"#fs-room-{room}")).to_contain_text(shown)
        assert one.page.evaluate(_ENGLISH) == [], room


@pytest.mark.slow
@pytest.mark.parametrize("room", ["models", "monitor", "settings"])
def test_a_room_fits_a_narrow_screen(tab: Callable[..., Tab], room: str) -> None:
    narrow = tab(room, viewport={"width": 360, "height": 740}, color_scheme="dark")
    narrow.room.locator(".fr-row, .fr-map, .fr-log, .fr-stack").first.wait_for()
    narrow.shoot(f"{room}-dark-360")
    widths = "[document.scrollingElement.scrollWidth, document.querySelector('#fs-frame').scrollWidth]"
    assert max(narrow.page.evaluate(widths)) <= 360


@pytest.mark.parametrize(
    ("scheme", "locale"),
    [
        ("light", "en-US"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("dark", "en-US"), ("dark", "zh-CN"))),
    ],
)
def test_screen_readers_and_weak_eyes_find_their_way(tab: Callable[..., Tab], scheme: str, locale: str) -> None:
    one = tab("models", color_scheme=scheme, locale=locale)
    one.row(HERE).locator("summary").click()
    expect(one.row(HERE).get_by_role("img")).to_have_count(1)
    for room in ("models", "monitor", "settings"):
        one.page.goto(f"{one.page.url.partition('#')[0]}#/{room}")
        one.page.locator(f"#fs-room-{room} :is(.fr-row, .fr-log)").first.wait_for()
        assert axe_findings(one.page) == [], room


def test_a_download_is_paused_and_goes_on_from_the_page(tab: Callable[..., Tab], house: House, hub: FakeHub) -> None:
    hub.pause_s = 2.0
    models = tab("models", viewport={"width": 1200, "height": 1000})
    models.room.get_by_label("Repository or folder").fill(TINY)
    models.room.get_by_role("button", name="Add", exact=True).click()
    row = models.row("tiny-gptq")
    row.get_by_role("button", name="Download").click()
    expect(row).to_contain_text(re.compile("Downloading|Waiting for its turn"))
    row.get_by_role("button", name="Pause").click()
    expect(row).to_contain_text("Paused")
    models.shoot("models-paused")
    hub.pause_s = 0.0
    row.get_by_role("button", name="Resume").click()
    expect(row).to_contain_text("On this machine")
    house.library.remove("tiny-gptq")


def test_a_download_that_ended_while_the_server_was_away_is_shown(
    tab: Callable[..., Tab], house: House, hub: FakeHub
) -> None:
    hub.pause_s = 2.0
    models = tab("models")
    models.room.get_by_label("Repository or folder").fill(TINY)
    models.room.get_by_role("button", name="Add", exact=True).click()
    row = models.row("tiny-gptq")
    row.get_by_role("button", name="Download").click()
    expect(row.get_by_role("button", name="Pause")).to_be_visible()
    models.page.route("**/ui/models/downloads", lambda route: route.abort())
    expect(models.room).to_contain_text("Fireside cannot be reached")
    hub.pause_s = 0.0
    wait_until(lambda: all(each.state == "ready" for each in house.library.known_downloads()))
    models.page.unroute("**/ui/models/downloads")
    expect(row.get_by_role("button", name="Pause")).to_be_visible()
    house.drop_connections()
    expect(row).to_contain_text("On this machine")
    expect(models.room).not_to_contain_text("Fireside cannot be reached")
    models.complaints.clear()  # the browser notes what was not reached
    house.library.remove("tiny-gptq")


def test_a_folder_of_ones_own_is_added_and_a_wrong_one_is_told(
    tab: Callable[..., Tab], house: House, tmp_path: Path, tiny_files: dict[str, bytes]
) -> None:
    for name, content in tiny_files.items():
        (tmp_path / name).write_bytes(content)
    models = tab("models")
    models.room.get_by_label("Repository or folder").fill(str(tmp_path))
    models.room.get_by_label("Name here").fill("of-my-own")
    models.room.get_by_role("button", name="Add", exact=True).click()
    expect(models.row("of-my-own")).to_contain_text("yours")
    models.room.get_by_label("Repository or folder").fill(str(tmp_path / "nothing"))
    models.room.get_by_role("button", name="Add", exact=True).click()
    expect(models.room).to_contain_text("no catalogue id, no alias, no repository (owner/name) and no folder")
    models.complaints.clear()  # the browser notes the refusal
    assert house.library.shelf.resolve("of-my-own").folder == tmp_path


def test_who_has_no_admin_key_sees_all_and_changes_nothing(browser: Any, tmp_path: Path) -> None:
    with House(tmp_path, USER) as house:
        visitor = Tab(browser, house.url, "models")
        expect(visitor.room).to_contain_text("that takes an admin key")
        expect(visitor.row(HERE).get_by_role("button", name="Download")).to_be_disabled()
        for name in ("Check which fit", "Search", "Add"):
            refused = visitor.room.get_by_role("button", name=name, exact=True)
            expect(refused).to_be_disabled()
            expect(refused).to_have_attribute("title", "This takes an admin key.")
        visitor.page.goto(f"{house.url}#/settings")
        port = visitor.page.locator("[data-setting=port]")
        port.get_by_text("Change", exact=True).click()
        expect(port.get_by_role("button", name="Keep")).to_be_disabled()
        expect(visitor.page.get_by_role("button", name="Make a key")).to_be_disabled()
        visitor.context.close()


def test_a_first_visit_is_offered_one_model_and_fetches_it_with_one_button(
    browser: Any, tmp_path: Path, hub: FakeHub, tiny_files: dict[str, bytes]
) -> None:
    with House(tmp_path) as house:
        best = house.library.best()
        assert best is not None and best.repo is not None
        hub.files[best.repo], hub.commits[best.repo] = tiny_files, "c" * 40
        visitor = Tab(browser, house.url, "chat", viewport={"width": 1000, "height": 800})
        offer = visitor.page.get_by_role("region", name="A larger model for this machine")
        expect(offer).to_contain_text(best.id)
        expect(offer.get_by_role("button", name=re.compile(r"^Download and use it \([\d.]+ GB\)$"))).to_be_visible()
        visitor.shoot("first-visit")
        offer.get_by_role("button", name="Download and use it").click()
        wait_until(lambda: house.manager.status().state == "ready")
        assert house.manager.status().model == best.id
        expect(offer).to_have_count(0)
        visitor.page.reload()
        expect(visitor.page.locator(".fs-welcome")).to_be_visible()
        expect(offer).to_have_count(0)
        assert visitor.complaints == [] and visitor.strangers == []
        visitor.context.close()
