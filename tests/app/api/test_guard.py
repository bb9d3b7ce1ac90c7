"""The guard: who is let in with which key, how the page gets in, how much a key may ask."""

import asyncio
import stat
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from app import settings
from app.api import keys as keys_module
from app.api.guard import Guard
from app.api.keys import ApiKey, Keyring, add_key, digest_of, read_key_file
from app.api.limits import Limits, duration
from app.api.login import COOKIE, LOGIN_PATH, Login
from app.settings import SettingsError
from engine.errors import EngineDied
from tests.app.api.house import USER, House
from tests.fakes import Script, byte_model_folder, ids

WORDS, ADMIN_WORDS = "right-key-1", "admin-key-1"
LAPTOP, BOSS = ApiKey("laptop", digest_of(WORDS)), ApiKey("boss", digest_of(ADMIN_WORDS), True)
KEYS = Keyring([LAPTOP, BOSS])
BEARER = {"authorization": f"Bearer {WORDS}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model_folder(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture
def house(folder: Path) -> House:
    """With keys, and a page of one route for each kind of path."""
    made = House(folder, Script(token_ids=ids("Hello")), keys=KEYS)
    for path in ("/", "/ui/status", "/config", "/assets/index.js", "/static/logo.svg", "/theme.css"):
        made.app.add_api_route(path, lambda: "page")
    made.app.add_api_route("/gradio_api/queue/join", lambda: "page", methods=["POST"])
    return made


# Keys of the API


@pytest.mark.parametrize(
    "header", [BEARER, {"api-key": WORDS}, {"x-api-key": WORDS}, {"authorization": f"bearer  {WORDS} "}]
)
async def test_any_of_three_headers_lets_in(house: House, header: dict[str, str]) -> None:
    assert (await house.ask("GET", "/v1/models", headers=header)).status_code == 200
    assert (
        await house.ask("POST", "/v1/chat/completions", json={"messages": [USER]}, headers=header)
    ).status_code == 200


async def test_one_right_key_among_wrong_ones_is_enough(house: House) -> None:
    both = {"authorization": "Bearer none", "x-api-key": WORDS}
    assert (await house.ask("GET", "/v1/models", headers=both)).status_code == 200


@pytest.mark.parametrize(
    "header", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer "}, {"authorization": f"Basic {WORDS}"}]
)
async def test_without_a_right_key_every_route_is_a_401_in_its_dialects_shape(
    house: House, header: dict[str, str]
) -> None:
    posts = ("/v1/chat/completions", "/v1/completions", "/v1/nope")
    gets = ("/v1/models", "/models", "/metrics", "/version", "/openapi.json", "/v1/nope", "/api/nope", "/docs")
    asked = [("GET", path) for path in gets] + [("POST", path) for path in posts]
    for method, path in asked:
        response = await house.ask(method, path, headers={"origin": "http://localhost:3", **header})
        assert response.status_code == 401, path
        assert response.headers["www-authenticate"] == "Bearer" and response.headers["x-should-retry"] == "false"
        assert response.headers["access-control-allow-origin"] == "http://localhost:3"
        error = response.json()["error"]
        if path != "/api/nope":
            assert all(f"`{name}: " in error["message"] for name in ("Authorization", "api-key", "x-api-key"))
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    response = await house.ask("POST", "/v1/messages", headers=header)
    assert response.json()["type"] == "error" and response.json()["error"]["type"] == "authentication_error"
    assert isinstance((await house.ask("POST", "/api/chat", headers=header)).json()["error"], str)
    assert not house.engine.submitted


async def test_health_and_a_preflight_ask_for_no_key(house: House) -> None:
    assert (await house.ask("GET", "/health")).status_code == 200
    preflight = {"origin": "http://localhost", "access-control-request-method": "POST"}
    assert (await house.ask("OPTIONS", "/v1/chat/completions", headers=preflight)).status_code == 204


@pytest.mark.parametrize("words", ["", "none", "noop", "DUMMY_KEY", "sk-1"])
async def test_without_keys_whatever_a_client_sends_passes(folder: Path, words: str) -> None:
    house = House(folder, Script(token_ids=ids("x")))
    for header in ({"authorization": f"Bearer {words}"}, {"x-api-key": words}, {"api-key": words}):
        assert (await house.ask("GET", "/v1/models", headers=header)).status_code == 200


async def test_the_log_tells_whose_request_it_was_and_who_was_refused(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for words in (WORDS, "wrong"):
        headers = {"authorization": f"Bearer {words}", "x-request-id": f"mine-{words}"}
        await house.ask("POST", "/v1/chat/completions", json={"messages": [USER]}, headers=headers)
    assert any(f"mine-{WORDS}/" in line and "of key laptop" in line for line in caplog.messages)
    assert any("mine-wrong: refused, invalid_api_key" in line for line in caplog.messages)


# The page


async def test_the_page_asks_for_a_key_once_and_then_its_cookie_opens_the_page_alone(house: House) -> None:
    async with house.client() as browser:
        first = await browser.get("/")
        assert first.status_code == 401 and 'action="/ui/login"' in first.text
        wrong = await browser.post("/ui/login", data={"key": "<wrong>"})
        assert wrong.status_code == 401 and "not known here" in wrong.text and COOKIE not in browser.cookies
        entered = await browser.post("/ui/login", data={"key": WORDS})
        assert (entered.status_code, entered.headers["location"]) == (303, "/")
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and WORDS not in cookie
        for path in ("/", "/ui/status", "/config"):
            assert (await browser.get(path)).text == '"page"', path
        assert (await browser.post("/gradio_api/queue/join")).status_code == 200
        assert (await browser.get("/v1/models")).status_code == 401
        assert (await browser.post("/v1/chat/completions", json={"messages": [USER]})).status_code == 401


async def test_the_page_knows_whose_cookie_it_is_and_other_ports_of_this_machine_cannot_use_it(house: House) -> None:
    async def whose(request: Request) -> dict[str, object]:
        return {"name": request.state.key.name, "is_admin": request.state.key.is_admin}

    house.app.add_api_route("/ui/whose", whose, methods=["GET", "POST"])
    async with house.client() as browser:
        own = {"origin": "http://localhost:8000"}
        await browser.post("/ui/login", data={"key": ADMIN_WORDS})
        boss = {"name": "boss", "is_admin": True}
        assert (await browser.post("/ui/whose", headers=own)).json() == boss
        assert (await browser.get("/ui/whose")).json() == boss, "a browser sends no origin with its own page's GET"
        for origin in ("http://localhost:3000", "http://127.0.0.1:8000", "app://editor"):
            assert (await browser.post("/ui/whose", headers={"origin": origin})).status_code == 401, origin
        await browser.post("/ui/login", data={"key": WORDS})
        assert (await browser.post("/ui/whose", headers=own)).json() == {"name": "laptop", "is_admin": False}


@pytest.mark.parametrize(("origin", "is_let_in"), [("http://localhost:8000", True), ("http://localhost:3000", False)])
async def test_a_websocket_of_our_own_page_is_let_in_by_its_cookie(origin: str, is_let_in: bool) -> None:
    reached: list[str] = []

    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["state"]["key"].name)

    async def send(message: Message) -> None:
        reached.append(message["type"])

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    guard = Guard(page, KEYS, Limits(), lambda scope: False, lambda error: None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://localhost:8000") as browser:
        cookie = f"{COOKIE}={(await browser.post('/ui/login', data={'key': WORDS})).cookies[COOKIE]}"
    headers = [(b"host", b"localhost:8000"), (b"origin", origin.encode()), (b"cookie", cookie.encode())]
    await guard({"type": "websocket", "path": "/ui/live", "headers": headers}, receive, send)
    assert reached == (["laptop"] if is_let_in else ["websocket.close"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([LAPTOP, BOSS], [BOSS], id="its key was deleted"),
        pytest.param([LAPTOP, BOSS], [replace(LAPTOP, digest=BOSS.digest), BOSS], id="another key has its name now"),
        pytest.param([replace(LAPTOP, is_admin=True)], [LAPTOP, BOSS], id="its key is no admin's any more"),
        pytest.param([], [BOSS], id="the first key was made"),
    ],
)
async def test_an_open_socket_ends_soon_when_whom_it_belongs_to_has_changed(
    before: list[ApiKey], after: list[ApiKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.guard._LOOK_EVERY_S", 0.01)
    keys, is_open, sent = Keyring(before), asyncio.Event(), asyncio.Queue[Message]()

    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        is_open.set()
        await receive()

    async def receive() -> Message:
        return await sent.get()

    guard = Guard(page, keys, Limits(), lambda scope: False, lambda error: None)
    headers = [(b"host", b"localhost:8000"), (b"origin", b"http://localhost:8000")]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://localhost:8000") as browser:
        if before:
            await browser.post("/ui/login", data={"key": WORDS})
            headers.append((b"cookie", f"{COOKIE}={browser.cookies[COOKIE]}".encode()))
        serving = asyncio.create_task(guard({"type": "websocket", "path": "/", "headers": headers}, receive, sent.put))
        await is_open.wait()
        await asyncio.sleep(0.05)
        assert not serving.done()
        keys.take(after)
        await asyncio.wait_for(serving, 10)
        told = await browser.get("/")
        assert told.status_code == 401 and ("no longer holds" in told.text) == bool(before)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://localhost:8000", 200),
        ("https://chat.example.org", 200),
        ("http://localhost:3000", 403),
        ("app://editor", 403),
    ],
)
async def test_without_keys_other_pages_of_this_machine_have_the_api_and_not_the_page(
    folder: Path, origin: str | None, status: int
) -> None:
    house = House(folder, Script(token_ids=ids("Hello")), origins=frozenset({"https://chat.example.org"}))
    house.app.add_api_route("/ui/settings", lambda: "changed", methods=["POST"])
    headers = {} if origin is None else {"origin": origin}
    assert (await house.ask("POST", "/ui/settings", headers=headers)).status_code == status
    assert (await house.ask("GET", "/v1/models", headers=headers)).status_code == 200


async def test_without_a_login_only_the_pages_static_files_are_open(house: House) -> None:
    for path in ("/assets/index.js", "/static/logo.svg", "/theme.css"):
        assert (await house.ask("GET", path)).status_code == 200
    for path in ("/ui/status", "/config"):
        assert (await house.ask("GET", path)).status_code == 401
    assert (await house.ask("POST", "/gradio_api/queue/join")).status_code == 401
    assert (await house.ask("GET", "/ui/status", headers=BEARER)).status_code == 200


async def test_a_cookie_is_worth_nothing_when_it_is_changed_forged_or_over() -> None:
    now = 1000.0
    login = Login(KEYS, clock=lambda: now)

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": f"key={WORDS}".encode(), "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/ui/login", "headers": [], "scheme": "https"}
    reply = await login.enter(Request(scope, receive))
    cookie = reply.headers["set-cookie"].partition(";")[0]
    assert "Secure" in reply.headers["set-cookie"]
    who = login.who(Headers({"cookie": cookie}))
    assert who is not None and who.name == "laptop"
    assert login.who(Headers({"cookie": cookie.replace("laptop", "boss")})) is None
    assert login.who(Headers({"cookie": f"{COOKIE}=laptop:99999999999:"})) is None
    assert login.who(Headers({"cookie": "=;;\x00"})) is None
    assert Login(KEYS).who(Headers({"cookie": cookie})) is None, "another process has another secret"
    now += 31 * 24 * 3600
    assert login.who(Headers({"cookie": cookie})) is None


@pytest.mark.parametrize(
    ("accepted", "words", "refusal"),
    [("en-US,zh;q=0.5", "API key", "not known here"), ("zh-CN,en;q=0.5", "API 密钥", "不认识此密钥")],
)
async def test_the_login_speaks_the_browsers_language(folder: Path, accepted: str, words: str, refusal: str) -> None:
    house = House(folder, Script(), keys=KEYS)
    headers = {"accept-language": accepted, "origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}
    assert words in (await house.ask("GET", "/", headers=headers)).text
    assert refusal in (await house.ask("POST", LOGIN_PATH, data={"key": "wrong-key-1"}, headers=headers)).text


# Limits


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def ask(house: House, words: str = WORDS) -> httpx.Response:
    body = {"messages": [USER]}
    return await house.ask("POST", "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {words}"})


async def test_requests_beyond_a_minutes_budget_wait_as_long_as_they_are_told(folder: Path, clock: Clock) -> None:
    house = House(folder, Script(token_ids=ids("x")), keys=KEYS, limits=Limits(2, clock=clock))
    first, second, third = [await ask(house) for _ in range(3)]
    assert [first.status_code, second.status_code, third.status_code] == [200, 200, 429]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in (first, second, third)] == ["1", "0", "0"]
    assert (
        first.headers["x-ratelimit-reset-requests"] == "30s" and second.headers["x-ratelimit-reset-requests"] == "1m0s"
    )
    assert third.headers["retry-after"] == "30" and third.json()["error"]["code"] == "rate_limit_exceeded"
    assert "x-should-retry" not in third.headers and "x-ratelimit-limit-tokens" not in third.headers
    assert (await ask(house, ADMIN_WORDS)).status_code == 200, "each key has its own budget"
    clock.now_s += 29
    assert (await ask(house)).status_code == 429
    clock.now_s += 1
    assert (await ask(house)).status_code == 200
    assert (await house.ask("GET", "/v1/models", headers=BEARER)).status_code == 200, "looking is free"
    await house.ask("GET", "/v1/models")
    counted = (await house.ask("GET", "/metrics", headers=BEARER)).text
    assert 'fireside_admission_rejections_total{reason="rate_limit_exceeded"} 2.0' in counted
    assert 'fireside_admission_rejections_total{reason="invalid_api_key"} 1.0' in counted


async def test_tokens_are_charged_as_they_were_used_and_debts_are_waited_for(folder: Path, clock: Clock) -> None:
    prompt = len("*user\nHi*\n*assistant\n")
    house = House(folder, Script(token_ids=ids("Hello")), keys=KEYS, limits=Limits(None, 30, clock=clock))
    first = await ask(house)
    assert first.headers["x-ratelimit-remaining-tokens"] == str(30 - prompt - 6)
    second = await ask(house)
    assert second.status_code == 200
    third = await ask(house)
    assert third.status_code == 429 and third.headers["x-ratelimit-remaining-tokens"] == "0"
    owed = 2 * (prompt + 6) - 30
    assert third.headers["retry-after"] == str((owed + 1) * 2)
    clock.now_s += (owed + 1) * 2
    assert (await ask(house)).status_code == 200


async def test_a_stream_and_a_broken_answer_are_charged_too(folder: Path, clock: Clock) -> None:
    limits = Limits(None, 1000, clock=clock)
    broken = Script(token_ids=ids("abcd"), error=EngineDied("gone"), error_at=2)
    house = House(folder, lambda _: broken, limits=limits)
    await house.chat(stream=True)
    spent = 21 + 2
    assert limits.headers("")["x-ratelimit-remaining-tokens"] == str(1000 - spent)
    house.engine.script = Script(token_ids=ids("Hello"))
    await house.chat(stream=True, n=2)
    assert limits.headers("")["x-ratelimit-remaining-tokens"] == str(1000 - spent - 2 * (21 + 6))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0199, "20ms"), (0, "0ms"), (1, "1s"), (1.5, "1.5s"), (360, "6m0s"), (61.25, "1m1.25s")]
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# The key file


def test_a_made_key_is_shown_once_kept_as_a_hash_and_its_file_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "home" / "api-keys"
    first = add_key(path, "laptop", is_admin=False)
    second = add_key(path, "boss", is_admin=True)
    text = path.read_text()
    assert first not in text and second not in text and len(first) > 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ring = Keyring(read_key_file(path))
    found = ring.find(second)
    assert found is not None and (found.name, found.is_admin) == ("boss", True) and ring.has_admin
    assert ring.find(first + "x") is None and ring.find("") is None
    with pytest.raises(SettingsError, match="already"):
        add_key(path, "laptop", is_admin=True)
    with pytest.raises(SettingsError, match="no name"):
        add_key(path, "two words", is_admin=False)


def test_keys_of_flags_environment_and_file_are_one_ring(tmp_path: Path) -> None:
    words = add_key(tmp_path / "api-keys", "filed", is_admin=False)
    flags = settings.read_flags(["--api-key", "plain-key-1", "--api-key", "named:plain-key-2", "--home", str(tmp_path)])
    chosen = settings.load(flags, {"FIRESIDE_ADMIN_KEY": "root:plain-key-3,plain-key-1"})
    ring = Keyring.of(chosen)
    names = {words: "filed", "plain-key-2": "named", "plain-key-3": "root", "plain-key-1": "admin-2"}
    assert {words: ring.find(words).name for words in names} == names  # type: ignore[union-attr]
    assert settings.load({}, {"FIRESIDE_HOME": str(tmp_path), "FIRESIDE_API_KEY": "none"}).api_key == ()
    assert ring.find("plain-key-1").is_admin  # type: ignore[union-attr]
    assert "plain-key" not in repr(chosen)


@pytest.mark.parametrize("line", ["laptop user abc", "laptop root sha256:" + "0" * 64, "plain-key"])
def test_a_mistake_in_the_key_file_is_told_with_its_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "api-keys"
    path.write_text(f"# mine\n\n{line}\n")
    with pytest.raises(SettingsError, match=r"api-keys:3 is no line"):
        read_key_file(path)


@pytest.mark.parametrize("given", ["short", "has blank inside", "comma,inside-it", "n:a:me:12345678", "ключключключ"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(given: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        settings.read_flags(["--api-key", given])
    assert given not in str(refused.value) and "8 to 512" in str(refused.value)
    (tmp_path / "settings.yaml").write_text("api_key: some-key-123")
    with pytest.raises(SettingsError, match=r"python -m app\.api\.keys new"):
        settings.load({}, {"FIRESIDE_HOME": str(tmp_path)})


def test_the_command_prints_the_key_alone_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    assert keys_module.main(["new", "laptop", "--admin", "--key-file", str(path)]) == 0
    words = capsys.readouterr().out.strip()
    found = Keyring(read_key_file(path)).find(words)
    assert found is not None and found.is_admin
    assert keys_module.main(["new", "laptop", "--key-file", str(path)]) == 2
