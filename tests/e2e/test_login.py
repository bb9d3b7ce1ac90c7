"""The page where keys are asked: a real Chromium, HTTPS with our own certificate, the API's guard before the page."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from app import tls
from app.api.keys import ApiKey, Keyring, digest_of
from app.history.book import Book
from app.ui.chat_room import chat_room
from app.ui.page import mount
from app.ui.status import ModelStatus
from tests.app.api.house import USER, House
from tests.app.ui.scripted import ScriptedService
from tests.e2e.tabs import CHROMIUM, PATIENCE_MS
from tests.fakes import Script, byte_model_folder, ids

playwright_api = pytest.importorskip("playwright.sync_api")
expect = playwright_api.expect

WORDS = "right-key-1"
LAPTOP = ApiKey("laptop", digest_of(WORDS))

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]


@pytest.fixture(scope="module")
def ring() -> Keyring:
    return Keyring([LAPTOP])


@pytest.fixture
def keys(ring: Keyring) -> Keyring:
    ring.take([LAPTOP])
    return ring


@pytest.fixture(scope="module")
def server_url(ring: Keyring, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """API and page as the app has them together."""
    folder = tmp_path_factory.mktemp("login")
    house = House(byte_model_folder(folder / "bytes"), Script(token_ids=ids("Hello")), keys=ring)
    ready = ModelStatus(model_id="fake-model", state="ready", max_model_len=8192)
    service = ScriptedService(piece_s=0.01)
    book = Book(folder / "history.db")
    mount(house.app, service, lambda: ready, [chat_room(service, lambda _: ready, book, _count)])
    certfile, keyfile = tls.self_signed(folder / "tls", "127.0.0.1")
    server = uvicorn.Server(
        uvicorn.Config(
            house.app,
            port=0,
            log_level="warning",
            timeout_graceful_shutdown=1,
            ssl_certfile=certfile,
            ssl_keyfile=keyfile,
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"https://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join(30)


@pytest.fixture
def url(server_url: str, keys: Keyring) -> str:
    return server_url


async def _count(text: str) -> int:
    return len(text)


@pytest.fixture
def page(url: str) -> Iterator[Any]:
    with playwright_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_context(ignore_https_errors=True).new_page()
        opened.set_default_timeout(PATIENCE_MS)
        yield opened
        browser.close()


def test_the_page_opens_with_the_right_key_and_works_as_ever(page: Any, url: str) -> None:
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    box = page.get_by_label("API key")
    box.fill("wrong-key-1")
    box.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("not known here")
    page.get_by_label("API key").fill(WORDS)
    page.get_by_role("button", name="Open").click()
    message = page.get_by_role("textbox", name="Message")
    message.wait_for()
    assert page.url == url
    message.fill("hello there")
    message.press("Enter")
    expect(page.get_by_test_id("bot").first).to_contain_text("hello", timeout=PATIENCE_MS)
    expect(page.locator("#fs-status .fs-stage")).to_have_text("ready", timeout=PATIENCE_MS)
    assert not complaints
    cookies = {cookie["name"]: cookie for cookie in page.context.cookies()}
    assert cookies["fireside_session"]["secure"] and cookies["fireside_session"]["httpOnly"]
    status = page.evaluate("async () => (await fetch('/v1/models')).status")
    assert status == 401, "the cookie opens the page alone"


def test_an_open_page_whose_login_has_ended_asks_again(page: Any, url: str) -> None:
    page.goto(url)
    page.get_by_label("API key").fill(WORDS)
    page.get_by_role("button", name="Open").click()
    page.get_by_role("textbox", name="Message").wait_for()
    page.context.clear_cookies()
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # the reader comes back to the tab
    page.get_by_label("API key").wait_for()


def _enter(page: Any, url: str) -> None:
    page.goto(url)
    page.get_by_label("API key").fill(WORDS)
    page.get_by_role("button", name="Open").click()
    page.get_by_role("textbox", name="Message").wait_for()


def test_an_open_page_whose_key_was_deleted_is_led_to_the_login_by_itself(page: Any, url: str, keys: Keyring) -> None:
    _enter(page, url)
    keys.take([ApiKey("other", digest_of("other-key-1"))])
    expect(page.get_by_role("alert")).to_contain_text("no longer holds", timeout=PATIENCE_MS)
    page.get_by_label("API key").fill("other-key-1")
    page.get_by_role("button", name="Open").click()
    page.get_by_role("textbox", name="Message").wait_for()


def test_a_page_that_was_open_before_the_first_key_is_led_to_the_login(page: Any, url: str, keys: Keyring) -> None:
    keys.take([])
    page.goto(url)
    page.get_by_role("textbox", name="Message").wait_for()
    keys.take([LAPTOP])
    page.get_by_label("API key").wait_for()


def test_a_room_whose_module_is_refused_leads_to_the_login(page: Any, url: str, keys: Keyring) -> None:
    page.add_init_script("window.WebSocket = class { readyState = 0; }")  # which else would be told first
    _enter(page, url)
    keys.take([ApiKey("other", digest_of("other-key-1"))])
    page.get_by_role("link", name="Monitor").click()
    expect(page.get_by_role("alert")).to_contain_text("no longer holds", timeout=PATIENCE_MS)


def test_the_api_beside_it_takes_the_key_itself(url: str) -> None:
    with httpx.Client(base_url=url, verify=False, timeout=60) as client:
        assert client.post("/v1/chat/completions", json={"messages": [USER]}).status_code == 401
        said = client.post("/v1/chat/completions", json={"messages": [USER]}, headers={"x-api-key": WORDS})
        assert said.json()["choices"][0]["message"]["content"] == "Hello"
