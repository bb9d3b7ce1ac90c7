"""The running app from outside: what is served while it starts, and that every way to end it ends all of it."""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from app import server, settings, tls
from app.models.status import ModelStatus
from app.page_slot import PageSlot

ROOT = Path(__file__).parents[2]
posix_only = pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")


def until(claim: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 150
    while not claim():
        assert time.monotonic() < deadline, f"waited long for: {what}"
        time.sleep(0.02)


class LoneServer:
    """lines   what it printed so far, read by a thread so that its pipe never fills"""

    def __init__(self, home: Path, *flags: str) -> None:
        self.home = home
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("lone_server.py")), "--home", str(home), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a signal here is for the server alone, as from a process manager
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.everyone: set[psutil.Process] = set()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def url(self) -> str:
        until(lambda: "starting at" in self.output, "the first line")
        found = re.search(r"http://127\.0\.0\.1:\d+", self.output)
        assert found is not None
        return found.group()

    def wait_until_ready(self) -> str:
        until(lambda: "Fireside is ready" in self.output, f"ready, got: {self.output}")
        return self.url()

    def wait_for_child(self) -> None:
        me = psutil.Process(self.process.pid)
        until(lambda: any("spawn_main" in " ".join(child.cmdline()) for child in me.children()), "the engine's child")
        self.everyone = {me, *me.children(recursive=True)}

    def leaves_nothing(self) -> None:
        """The server and each process that it ever had are gone."""
        self.process.wait(timeout=60)
        gone, alive = psutil.wait_procs(self.everyone, timeout=60)
        assert not alive and len(gone) >= 2

    def kill(self) -> None:
        for process in (*self.everyone, self.process):
            try:
                process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LoneServer]]:
    started: list[LoneServer] = []

    def begin(*flags: str, is_held: bool = False) -> LoneServer:
        if is_held:
            (tmp_path / "hold").touch()
        started.append(LoneServer(tmp_path, *flags))
        return started[-1]

    yield begin
    for one in started:
        one.kill()


Start = Callable[..., LoneServer]
CHAT = {"model": "", "messages": [{"role": "user", "content": "go on"}], "stream": True}


def test_while_the_model_loads_health_tells_and_a_request_waits_for_it(start: Start) -> None:
    app = start(is_held=True)
    with httpx.Client(base_url=app.url(), timeout=60) as client:
        until(lambda: client.get("/health").json()["detail"].startswith("held (50%"), "the stage of the load")
        assert client.get("/health").json()["state"] == "loading"
        assert client.get("/v1/models").json()["data"][0]["state"] == "loading"
        until(lambda: client.get("/").text == '"the page"', "the page, before the model")
        assert "Fireside is ready" not in app.output
        threading.Timer(0.3, (app.home / "hold").unlink).start()
        answer = client.post("/v1/chat/completions", json={**CHAT, "stream": False, "max_tokens": 3})
        assert answer.json()["choices"][0]["message"]["content"] == "aaa"
        assert client.get("/health").json()["state"] == "ready"
    app.wait_until_ready()
    ready = [line for line in app.lines if "Fireside is ready" in line]
    assert len(ready) == 1
    assert app.url() in ready[0]


@posix_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ending_with_an_open_stream_tells_the_client_and_leaves_no_process(start: Start, number: int) -> None:
    app = start()
    url = app.wait_until_ready()
    app.wait_for_child()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT, timeout=60) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines), next(lines)
        app.process.send_signal(number)
        last = list(lines)[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_closed"
    app.leaves_nothing()


@posix_only
def test_ending_in_the_middle_of_a_load_says_so_once_and_leaves_no_process(start: Start) -> None:
    app = start(is_held=True)
    app.wait_for_child()
    os.killpg(app.process.pid, signal.SIGINT)  # as a terminal does: to the child too, whose Python has just begun
    app.leaves_nothing()
    until(lambda: "Fireside is ending." in app.output, "the last line")
    assert app.lines.count("Fireside is ending.") == 1
    assert "Traceback" not in app.output


def test_a_load_that_fails_is_told_with_the_way_on_and_leaves_the_server_up(start: Start) -> None:
    app = start("--kv-gb", "0.125")  # which this server's runner refuses
    until(lambda: "tries again" in app.output, "the way on")
    assert "no room for that" in app.output
    assert f"The page is at {app.url()}" in app.output
    until(lambda: httpx.get(f"{app.url()}/health", timeout=60).json()["state"] == "failed", "the server")


@pytest.mark.parametrize("name", ["nosuchid", "/no/such/folder"])
def test_a_model_that_does_not_exist_ends_the_start_with_who_lists_all(name: str, tmp_path: Path) -> None:
    flags = ["--no-browser", "--port", "0", "--home", str(tmp_path), "--model", name]
    code = f"import sys; from app import server; sys.exit(server.main({flags!r}))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert name in ended.stderr and "`python launch.py models list`" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_home_that_cannot_be_written_ends_the_start_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    home = tmp_path / "file" / "home"
    assert server.main(["--home", str(home)]) == 2
    told = capsys.readouterr()
    assert f"{home} cannot be" in told.err and "Choose another with --home" in told.err
    assert len(told.err.splitlines()) == 1 and not told.out


@posix_only
def test_a_second_ctrl_c_ends_at_once_and_leaves_no_process(start: Start) -> None:
    app = start(is_held=True)
    app.wait_for_child()
    app.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    app.process.send_signal(signal.SIGINT)
    app.leaves_nothing()


@posix_only
def test_a_killed_server_leaves_no_child(start: Start) -> None:
    app = start()
    app.wait_until_ready()
    app.wait_for_child()
    app.process.kill()
    app.leaves_nothing()


def test_a_killed_child_is_told_in_the_stream_and_the_next_request_gets_a_new_one(start: Start) -> None:
    app = start()
    url = app.wait_until_ready()
    app.wait_for_child()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT, timeout=60) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines), next(lines)
        for process in app.everyone:
            if "spawn_main" in " ".join(process.cmdline()):
                process.kill()
        last = list(lines)[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_died"
    again = httpx.post(f"{url}/v1/chat/completions", json={**CHAT, "stream": False, "max_tokens": 2}, timeout=60)
    assert again.json()["choices"][0]["message"]["content"] == "aa"


def test_a_taken_port_is_told_before_anything_is_loaded(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        app = start("--port", str(port))
        assert app.process.wait(timeout=60) == 1
    until(lambda: "is taken" in app.output, "the reason")
    assert f"Port {port} on 127.0.0.1 is taken" in app.output
    assert f"--port {port + 1}" in app.output
    assert not (app.home / "letters").exists()


@pytest.mark.parametrize(
    ("host", "told"), [("no.such.host.invalid", "cannot be found"), ("203.0.113.1", "Check --host and --port")]
)
def test_a_host_that_is_not_ours_is_told(host: str, told: str, tmp_path: Path) -> None:
    chosen = settings.load({"host": host, "home": tmp_path, "port": 0}, {})
    with pytest.raises(OSError) as refused:
        server.bind(host, 0)
    assert told in str(server.explain_bind_error(chosen, refused.value))


def test_a_wrong_setting_ends_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert server.main(["--port", "many"]) == 2
    assert "--port is 'many'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8"), ("0.0.0.0", "http://127.0.0.1:8"), ("::1", "http://[::1]:8")],
)
def test_the_address_is_one_that_a_browser_here_can_open(host: str, url: str) -> None:
    assert server.address(host, 8) == url


async def test_the_slot_shows_the_stage_escaped_until_the_page_is_there() -> None:
    now = ModelStatus(state="loading", model="a<b>", stage="reading & weighing", fraction=0.4)
    slot = PageSlot(lambda: now)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(slot), base_url="http://test") as client:
        shown = await client.get("/")
        assert shown.status_code == 200
        assert "a&lt;b&gt;: reading &amp; weighing (40%)" in shown.text
        assert 'http-equiv="refresh"' in shown.text
        assert not re.search(r"(src|href)=\"(?!data:)", shown.text)  # nothing is taken from elsewhere
        chinese = (await client.get("/", headers={"accept-language": "zh-CN,zh;q=0.9,en;q=0.8"})).text
        assert '<html lang="zh">' in chinese and "正在加载 a&lt;b&gt;" in chinese and "reading" not in chinese
        part = await client.get("/gradio_api/queue/data")
        assert (part.status_code, part.headers["retry-after"]) == (503, "1")
        assert part.json()["error"]["code"] == "loading"

        slot.error = "It broke."
        broken = await client.get("/")
        assert (broken.status_code, "refresh" in broken.text) == (500, False)

        slot.page = PageSlot(lambda: ModelStatus(state="failed", error="from the page"))
        assert "from the page" in (await client.get("/")).text


def test_the_server_can_be_started_as_a_module() -> None:
    command = [sys.executable, "-m", "app.server", "--port", "many"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "--port is 'many'" in done.stderr


def test_importing_the_server_loads_neither_torch_nor_gradio() -> None:
    code = "import sys, app.server; sys.exit(bool({'torch', 'gradio', 'fastapi', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# Who may come in


@pytest.mark.parametrize(
    ("host", "flags", "is_told"),
    [
        ("127.0.0.1", [], False),
        ("::1", [], False),
        ("localhost", [], False),
        ("0.0.0.0", [], True),
        ("::", [], True),
        ("192.0.2.1", [], True),
        ("0.0.0.0", ["--allow-no-key"], False),
        ("0.0.0.0", ["--api-key", "some-key-1"], False),
        ("0.0.0.0", ["--admin-key", "some-key-1"], False),
    ],
)
def test_without_a_key_other_machines_are_let_in_only_when_that_is_said(
    host: str, flags: list[str], is_told: bool, tmp_path: Path
) -> None:
    chosen = settings.load(settings.read_flags(["--host", host, "--home", str(tmp_path), *flags]), {})
    if not is_told:
        server.check_access(chosen)
        return
    with pytest.raises(settings.SettingsError, match=r"other machines can reach Fireside.*--allow-no-key"):
        server.check_access(chosen)
    assert server.main(["--host", host, "--home", str(tmp_path)]) == 2


def test_the_server_answers_under_its_own_names_and_those_that_are_allowed(tmp_path: Path) -> None:
    def names(*flags: str) -> frozenset[str]:
        return server.own_names(settings.load(settings.read_flags([*flags, "--home", str(tmp_path)]), {}))

    own = socket.gethostname().lower()
    assert names() == {"127.0.0.1"}
    assert names("--host", "0.0.0.0", "--allowed-host", "NAS.local") == {"0.0.0.0", own, f"{own}.local", "nas.local"}


# HTTPS


def test_a_self_signed_certificate_is_served_kept_and_made_anew_when_it_must_be(start: Start) -> None:
    app = start("--ssl-self-signed")
    until(lambda: "Fireside is ready: https://127.0.0.1:" in app.output, f"the address, got: {app.output}")
    certfile, keyfile = app.home / "tls" / "certificate.pem", app.home / "tls" / "key.pem"
    trusted = ssl.create_default_context(cafile=str(certfile))
    port = app.output.rpartition("https://127.0.0.1:")[2].split()[0]
    for name in ("127.0.0.1", "localhost"):
        assert httpx.get(f"https://{name}:{port}/health", verify=trusted, timeout=60).json()["status"] == "ok"
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"https://127.0.0.1:{port}/health", timeout=60)
    if os.name != "nt":
        assert keyfile.stat().st_mode & 0o077 == 0
    before = certfile.read_bytes()
    assert tls.self_signed(app.home / "tls", "127.0.0.1") == (certfile, keyfile)
    assert certfile.read_bytes() == before
    tls.self_signed(app.home / "tls", "fireside.example")
    assert certfile.read_bytes() != before, "another name needs another certificate"


def test_a_certificate_that_cannot_be_used_is_told_before_the_start(tmp_path: Path) -> None:
    certfile, keyfile = tls.self_signed(tmp_path / "a", "127.0.0.1")
    _, other = tls.self_signed(tmp_path / "b", "127.0.0.1")
    wrong = [
        (["--ssl-certfile", str(certfile)], "is not possible"),
        (["--ssl-certfile", str(certfile), "--ssl-keyfile", str(other)], "is not possible"),
        (["--ssl-certfile", str(tmp_path / "none.pem")], "is not possible"),
        (["--ssl-keyfile", str(keyfile)], "needs its certificate"),
        (["--ssl-self-signed", "--ssl-certfile", str(certfile)], "one of the two"),
    ]
    for flags, told in wrong:
        chosen = settings.load(settings.read_flags([*flags, "--home", str(tmp_path)]), {})
        with pytest.raises(settings.SettingsError, match=told):
            server.check_access(chosen)
    fine = ["--ssl-certfile", str(certfile), "--ssl-keyfile", str(keyfile), "--home", str(tmp_path)]
    server.check_access(settings.load(settings.read_flags(fine), {}))
