"""The running Fireside as commands see it: found by the note in its home, asked over its API, started where needed."""

import argparse
import contextlib
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx

from app.errors import AppError
from app.running import noted_url
from app.settings import Settings

_START = (
    "import sys; from app.running import end_with_starter; from app.server import main; "
    "end_with_starter(); sys.exit(main(sys.argv[1:]))"
)
_ROOT = Path(__file__).parents[2]
_LOOK_EVERY_S = 0.2
_PATIENCE_S = 10.0  # for an answer that computes nothing


def server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="of the running Fireside (default: the one of this home folder)")
    parser.add_argument("--key", help="where it asks for one (default: FIRESIDE_ADMIN_KEY or FIRESIDE_API_KEY)")


class Server:
    """Raises AppError where it does not answer, or refuses."""

    def __init__(self, url: str, key: str, certificate: Path) -> None:
        self.url = url
        trust: ssl.SSLContext | bool = True
        if url.startswith("https") and certificate.is_file():  # the one that Fireside made for itself
            trust = ssl.create_default_context(cafile=str(certificate))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, headers=headers, verify=trust, timeout=_PATIENCE_S, trust_env=False)

    def is_there(self) -> bool:
        try:
            return self._http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def get(self, path: str, **params: Any) -> Any:
        with self._told():
            return _body(self._http.get(path, params=params))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Waits as long as it takes: an unload returns when the memory is free."""
        with self._told():
            return _body(self._http.post(path, json=body, timeout=None))

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of a streamed answer. Closing the iterator ends the answer."""
        with self._told(), self._http.stream("POST", path, json=body, timeout=None) as reply:
            if reply.status_code != 200:
                reply.read()
                _body(reply)
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise _refusal(200, chunk)
                    yield chunk

    def until_loaded(self, show: Callable[[str], None], model: str = "") -> str:
        """Follow the load of a model ("" the one in hand); its id. Raises AppError with why it failed."""
        model = model or self.get("/health")["model"]
        while True:
            now = self.get("/health")
            if now["model"] != model:
                return self._without_hand(model, now["model"])
            if now["state"] == "failed":
                raise AppError(503, "load_failed", now["detail"])
            if now["state"] == "empty":
                raise AppError(503, "no_model", "No model is loaded.", hint="`python launch.py models load` loads one.")
            if now["state"] == "ready":
                return str(now["model"])
            show(now["detail"])
            time.sleep(_LOOK_EVERY_S)

    def _without_hand(self, model: str, in_hand: str) -> str:
        """The id of one that is loaded, though another is in hand. Raises AppError with why it is not."""
        found = next((each for each in self.get("/models")["data"] if each["id"] == model), None)
        if found is not None and found["state"] == "loaded":
            return model
        if found is not None and found["state"] == "failed":
            why = found["status"].get("message") or f"{model} could not be loaded."
            hint = f"{in_hand} is in hand as before." if in_hand else ""
            raise AppError(503, "load_failed", why, hint=hint)
        raise AppError(409, "replaced", f"{in_hand or 'No model'} was chosen instead meanwhile.")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise AppError(503, "no_server", f"{self.url} does not answer: {error}.", hint=_HOW_TO_START) from None


_HOW_TO_START = "Start Fireside with `python launch.py`, or name another with --url."


def server_if_there(arguments: argparse.Namespace, settings: Settings) -> Server | None:
    """The running one. Raises AppError where one is named that does not answer."""
    server = _noted(arguments, settings)
    if server is not None and server.is_there():
        return server
    if arguments.url:
        raise AppError(503, "no_server", f"{arguments.url} does not answer.", hint=_HOW_TO_START)
    return None


def running_server(arguments: argparse.Namespace, settings: Settings) -> Server:
    """Raises AppError where none runs."""
    server = server_if_there(arguments, settings)
    if server is None:
        raise AppError(503, "no_server", f"No Fireside runs at {settings.home}.", hint=_HOW_TO_START)
    return server


@contextlib.contextmanager
def any_server(arguments: argparse.Namespace, settings: Settings, *flags: str) -> Iterator[Server]:
    """The running one; where none runs, one of our own with these flags, which ends with us."""
    server = server_if_there(arguments, settings)
    if server is not None:
        yield server
        return
    log = settings.home / "logs" / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as written:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, "--no-browser", "--port", "0", "--home", str(settings.home), *flags],
            cwd=_ROOT,
            stdin=subprocess.PIPE,  # closed with us: then it ends, also where we were killed
            stdout=written,
            stderr=written,
            start_new_session=True,  # Ctrl-C stops an answer here, not the server
        )
    try:
        yield _until_up(process, arguments, settings, log)
    finally:
        process.terminate()
        process.wait()


def _until_up(
    process: "subprocess.Popen[bytes]", arguments: argparse.Namespace, settings: Settings, log: Path
) -> Server:
    while process.poll() is None:
        server = _noted(arguments, settings)
        if server is not None and server.is_there():
            return server
        time.sleep(_LOOK_EVERY_S)
    raise AppError(503, "no_server", f"Fireside could not be started: {log.read_text('utf-8').strip()[-2000:]}")


def _noted(arguments: argparse.Namespace, settings: Settings) -> Server | None:
    url = arguments.url or noted_url(settings.home)
    keys = [*settings.admin_key, *settings.api_key]
    key = arguments.key or (keys[0].rpartition(":")[2] if keys else "")
    return Server(url, key, settings.home / "tls" / "certificate.pem") if url else None


def _body(reply: httpx.Response) -> Any:
    try:
        body = reply.json()
    except ValueError:
        raise AppError(502, "no_fireside", f"{reply.request.url} answers, but is no Fireside.") from None
    if reply.status_code >= 400:
        raise _refusal(reply.status_code, body)
    return body


def _refusal(status: int, body: Any) -> AppError:
    error = body.get("error", {}) if isinstance(body, dict) else {}
    return AppError(status, error.get("code"), str(error.get("message") or f"It was refused with {status}."))
