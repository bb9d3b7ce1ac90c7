"""The running app: one listening socket, one FastAPI with the API and the page, one ModelManager.

Start-up goes by what a person waits for: bind the port, start the engine's child (it imports torch on its own), serve
the API and a loading page, import Gradio beside it, put the page in its place. So heavy imports are inside functions.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import multiprocessing
import os
import signal
import socket
import ssl
import sys
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from app import running
from app import settings as settings_module
from app.background import in_daemon_thread
from app.errors import AppError
from app.settings import Settings, SettingsError, with_source

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from app.models.hub.downloads import Download
    from app.models.manager import ModelManager
    from app.models.status import ModelStatus
    from app.page_slot import PageSlot

_log = logging.getLogger("fireside")

END_DEADLINE_S = 1.5  # from the first Ctrl-C; the system then takes some tenths to end the children: 2 s in all


def main(argv: Sequence[str]) -> int:
    """Exit code of a whole run with these flags."""
    try:
        settings = settings_module.load(settings_module.read_flags(argv), os.environ)
        settings_module.make_home(settings.home)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        check_access(settings)
        _check_memory(settings)
    except SettingsError as error:
        print(with_source(error, settings), file=sys.stderr)
        return 2
    return serve(settings)


def _check_memory(settings: Settings) -> None:
    if settings.kv_gb is not None:
        from app.startable import check_memory

        check_memory(settings)


def serve(settings: Settings) -> int:
    """Run until Ctrl-C or SIGTERM. Ends the process itself where it served: a thread in a download cannot be joined."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("uvicorn", "httpx", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.DEBUG if settings.log_level == "debug" else logging.WARNING)
    try:
        listener = bind(settings.host, settings.port)
    except OSError as error:
        print(with_source(explain_bind_error(settings, error), settings), file=sys.stderr)
        return 1
    try:
        asyncio.run(_Run(settings, listener).until_ended())
    except AppError as error:  # a models.yaml that cannot be read, a model that does not exist
        from app.startable import of_settings

        print(with_source(of_settings(error), settings), file=sys.stderr)
        _exit(1)
    _exit(0)


def check_access(settings: Settings) -> None:
    """Raises SettingsError where strangers would be let in unasked, or HTTPS has no certificate that can be used."""
    from app.api.keys import Keyring

    if settings.ssl_self_signed and settings.ssl_certfile:
        raise SettingsError(
            "--ssl-self-signed makes a certificate, --ssl-certfile names one. Give one of the two.", "ssl_self_signed"
        )
    if settings.ssl_keyfile and not settings.ssl_certfile:
        what = f"--ssl-keyfile {settings.ssl_keyfile} needs its certificate: --ssl-certfile FILE."
        raise SettingsError(what, "ssl_keyfile")
    if settings.ssl_certfile is not None:
        _check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    if not Keyring.of(settings) and not settings.allow_no_key and not is_loopback(settings.host):
        raise SettingsError(
            f"At {settings.host} other machines can reach Fireside, and no key is asked of them. Make a key first, in "
            "the page's Settings or with `python -m app.api.keys new NAME`; or let everybody in with `allow_no_key` "
            "(--allow-no-key).",
            "host",
        )


def _check_certificate(certfile: Path, keyfile: Path | None) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except OSError as error:  # ssl's own errors are OSErrors too
        raise SettingsError(
            f"HTTPS with {certfile} and {keyfile or 'the key in it'} is not possible: "
            f"{_certificate_fault(certfile, keyfile, error)}. "
            "Both must be PEM files that belong together, the key without a password.",
            "ssl_certfile",
        ) from None


def _certificate_fault(certfile: Path, keyfile: Path | None, error: OSError) -> str:
    for path in (certfile, keyfile):
        if path is not None and not path.is_file():
            return f"there is no file {path}"
    if isinstance(error, ssl.SSLError):
        is_of_another = error.reason == "KEY_VALUES_MISMATCH"
        return "the key is another certificate's" if is_of_another else "they hold no certificate and key to be read"
    return error.strerror or str(error)


def is_loopback(host: str) -> bool:
    """Only this machine reaches it. True for a name that cannot be found: `bind` tells that better."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return True
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)


def build_app(settings: Settings, manager: "ModelManager | None" = None) -> "FastAPI":
    """API at /v1, page at /. The lifespan starts the load (where it has not begun), opens the page, and closes both."""
    from fastapi import FastAPI

    from app.api import routes
    from app.chat.service import ChatService
    from app.models.library import Library
    from app.page_rooms import Behind, build_page
    from app.page_slot import PageSlot
    from app.ui.lately import Lately, Noting

    owner = manager or new_manager(settings)
    metrics = routes.Metrics(owner.stats)
    lately = Lately()
    limits = routes.Limits(settings.requests_per_minute, settings.tokens_per_minute)
    service = ChatService(owner, observer=routes.Charging(limits, Noting(lately, metrics)))
    slot = PageSlot(owner.status)
    library = Library(settings)
    keys = routes.Keyring.of(settings)
    behind = Behind(
        settings=settings,
        service=service,
        manager=owner,
        library=library,
        metrics=metrics,
        lately=lately,
        keys=keys,
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if owner.status().state == "empty":
            owner.load(settings.model)
        logging.getLogger("fireside").addHandler(lately)
        page = asyncio.create_task(_run_page(slot, lambda: build_page(behind)))
        library.downloads.on_wanted = loading(owner, asyncio.get_running_loop())
        library.downloads.take_up()
        try:
            yield
        finally:
            page.cancel()
            logging.getLogger("fireside").removeHandler(lately)
            library.downloads.end()
            await asyncio.gather(page, owner.close(), return_exceptions=True)

    app = FastAPI(title="Fireside", version=settings_module.version(), docs_url=None, redoc_url=None, lifespan=lifespan)
    routes.install(
        app,
        service=service,
        shelf=owner,
        metrics=metrics,
        version=settings_module.version(),
        keys=keys,
        limits=limits,
        library=library,
        allowed_hosts=routes.LOOPBACK_HOSTS | own_names(settings),
        allowed_origins=frozenset(settings.allowed_origin),
    )
    app.mount("/", slot)
    return app


def loading(manager: "ModelManager", loop: asyncio.AbstractEventLoop) -> "Callable[[Download], None]":
    """Loads what was downloaded to be used; called in the downloads' thread."""

    def load(download: "Download") -> None:
        def now() -> None:
            with contextlib.suppress(AppError):  # Fireside is ending
                manager.load(download.repo)

        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(now)

    return load


def new_manager(settings: Settings) -> "ModelManager":
    """The manager over the real shelf and the real engine."""
    from app.models.manager import ModelManager
    from app.models.shelf import ModelShelf
    from engine.client import EngineClient

    shelf = ModelShelf(settings.models_folder, aliases=settings.model_alias)
    return ModelManager(settings, shelf, EngineClient.start, text_notes=_text_notes)


def _text_notes(folder: Path) -> Sequence[str]:
    """Imported when a model is there: what reads its text must not delay the start of its engine."""
    from app.chat.model_text import text_notes

    return text_notes(folder)


async def _run_page(slot: "PageSlot", build: "Callable[[], FastAPI]") -> None:
    """Import Gradio beside the API, put the page into the slot, and keep it open until cancelled."""
    try:
        page = await in_daemon_thread(build)
        async with page.router.lifespan_context(page):
            slot.page = page
            await asyncio.Event().wait()
    except Exception:
        _log.exception("the page could not be opened")
        slot.error = "The page could not be opened; the log says why. The endpoint at /v1 is not affected."


def own_names(settings: Settings) -> frozenset[str]:
    """Names in the Host header, beside localhost, under which this server is meant."""
    own = socket.gethostname()
    names = {settings.host, *settings.allowed_host}
    return frozenset(name.lower() for name in (names if is_loopback(settings.host) else {own, f"{own}.local", *names}))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: from here on clients wait in its queue instead of being refused. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "nt":  # there SO_REUSEADDR would let two programs share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)  # type: ignore[attr-defined,unused-ignore]
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def explain_bind_error(settings: Settings, error: OSError) -> SettingsError:
    host, port = settings.host, settings.port
    if isinstance(error, socket.gaierror):
        return SettingsError(
            f"The host {host!r} cannot be found: {error.strerror}. Use 127.0.0.1, or an address of this machine.",
            "host",
        )
    if error.errno == errno.EADDRINUSE:
        return SettingsError(
            f"Port {port} on {host} is taken: another program, or another Fireside, listens there. "
            f"Choose another with --port {port + 1 if port < 65535 else 8000}, or end that program.",
            "port",
        )
    if error.errno == errno.EACCES:
        return SettingsError(f"This user may not listen on port {port}. Choose one above 1023, such as 8000.", "port")
    return SettingsError(f"Cannot listen on {host}, port {port}: {error.strerror}. Check --host and --port.", "host")


def address(host: str, port: int, *, is_https: bool = False) -> str:
    """What a person on this machine types into a browser."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if is_https else "http"
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


class _Run:
    """One run of the app, from a bound socket to the last process gone."""

    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        self._settings = settings
        self._listener = listener
        self._url = address(settings.host, listener.getsockname()[1], is_https=settings.is_https)
        self._server: uvicorn.Server | None = None

    async def until_ended(self) -> None:
        ended = asyncio.Event()
        _begin_watch(asyncio.get_running_loop(), ended)
        print(f"Fireside is starting at {self._url} (Ctrl-C ends it).", flush=True)
        running.leave_note(self._settings.home, self._url)
        manager = await in_daemon_thread(lambda: new_manager(self._settings))
        manager.check(self._settings.model)
        manager.load(self._settings.model)  # the child starts now; it has more to import than we have
        told = asyncio.create_task(self._tell(manager))
        serving = asyncio.create_task(self._serve(manager))
        ending = asyncio.create_task(ended.wait())
        await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if ended.is_set():
            _show("Fireside is ending.", passing=False)
        if self._server is None:
            serving.cancel()
        else:
            self._server.should_exit = True
        running.take_note_away(self._settings.home)
        await manager.close()  # open answers end with an error, so the server has nothing to wait for
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    async def _serve(self, manager: "ModelManager") -> None:
        app = await in_daemon_thread(lambda: build_app(self._settings, manager))
        certificate = await in_daemon_thread(lambda: _certificate(self._settings))
        self._server = _make_server(app, certificate)
        if self._settings.browser:
            _open_browser(self._url)
        await self._server.serve(sockets=[self._listener])

    async def _tell(self, manager: "ModelManager") -> None:
        """The start in the terminal: each stage (with its share where a line can be rewritten), then the address."""
        shown = ""
        while not self._is_answering(now := manager.status()):
            line = self._start_line(now)
            if line and line != shown:
                _show(line, passing=now.state == "loading")
                shown = line
            await asyncio.sleep(0.1)
        _show(f"Fireside is ready: {self._url}  ({now.model}, {now.max_model_len:,} tokens of context)", passing=False)

    def _start_line(self, now: "ModelStatus") -> str:
        if now.error:
            return (
                f"{now.error}\nThe page is at {self._url}; the next message there tries again. "
                "To take another model: Ctrl-C, then start with --model."
            )
        return _progress_line(now) if sys.stdout.isatty() else now.stage.split(",")[0]

    def _is_answering(self, now: "ModelStatus") -> bool:
        return now.state == "ready" and self._server is not None and self._server.started


def _certificate(settings: Settings) -> tuple[Path | None, Path | None]:
    """(certificate, key) for HTTPS; None and None for plain HTTP."""
    if not settings.ssl_self_signed:
        return settings.ssl_certfile, settings.ssl_keyfile
    from app import tls

    return tls.self_signed(settings.home / "tls", settings.host)


def _make_server(app: "FastAPI", certificate: tuple[Path | None, Path | None]) -> "uvicorn.Server":
    import uvicorn

    class Server(uvicorn.Server):
        def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
            return contextlib.nullcontext()  # signals end the engine too, so they are ours

    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=65,
        ws_per_message_deflate=False,  # it would cost more than it saves: most pages are on this machine
        ssl_certfile=certificate[0],
        ssl_keyfile=certificate[1],
    )
    return Server(config)


def _progress_line(now: "ModelStatus") -> str:
    if now.fraction is None:
        return now.detail
    done = round(now.fraction * 24)
    return f"[{'#' * done}{'.' * (24 - done)}] {now.detail}"


def _show(line: str, *, passing: bool) -> None:
    """`passing` lines are overwritten by the next where there is a terminal."""
    if sys.stdout.isatty():
        print(f"\r\033[K{line}", end="" if passing else "\n", flush=True)
    else:
        print(line, flush=True)


def _open_browser(url: str) -> None:
    """In a thread, since some browsers keep the call; not where only a text browser could open."""
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


def _begin_watch(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    """The first Ctrl-C or SIGTERM begins an orderly end with a deadline; a second one ends everything at once."""

    is_ending = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal is_ending
        if is_ending:
            _exit(1)
        is_ending = True
        deadline = threading.Timer(END_DEADLINE_S, _exit, (1,))
        deadline.daemon = True
        deadline.start()
        loop.call_soon_threadsafe(ended.set)

    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"):
        number = getattr(signal, name, None)
        if number is not None and (name != "SIGHUP" or signal.getsignal(number) is not signal.SIG_IGN):  # nohup
            signal.signal(number, on_signal)


def _exit(code: int) -> NoReturn:
    """End now, with every child. Threads that are inside a download or an import are not waited for."""
    for child in multiprocessing.active_children():
        child.kill()
    with contextlib.suppress(OSError):  # the terminal may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
