"""What tests of the chat in a browser stand on: the page's server in a thread, a tab, and Chromium's flags."""

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from app.history.book import Book
from app.ui.chat_room import chat_room
from app.ui.live import Hub, State
from app.ui.page import mount
from app.ui.status import Answerer, ModelStatus
from tests.app.ui.rooms import ADMIN, Known
from tests.app.ui.scripted import ScriptedService

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
ARTIFACTS = Path(__file__).parents[1] / "artifacts"
PATIENCE_MS = 60_000
_AXE = Path(__file__).parents[1] / "vendor" / "axe-core" / "axe.min.js"
READY = ModelStatus(model_id="smollm2-135m-instruct", state="ready", max_model_len=8192)


class House:
    """The server under test, in a thread: the scripted service and the status that the page is told."""

    def __init__(
        self, history: Path, port: int = 0, answerer: Answerer | None = None, app: FastAPI | None = None
    ) -> None:
        """answerer: who answers in place of the script. app: what is served before the page."""
        self.service = ScriptedService(piece_s=0.02)
        self.status = READY
        self.in_memory: list[dict[str, Any]] = []  # models, beside the one in hand
        answerer = answerer or self.service
        if app is None:
            app = FastAPI()
            app.add_middleware(Known, key=ADMIN)
        self.book = Book(history)
        rooms = (chat_room(answerer, self._status, self.book, _count), self._models)
        mount(app, answerer, self._status, rooms)
        config = uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def _status(self, model_id: str = "") -> ModelStatus:
        """Of another model than the one in hand it is only known that it answers."""
        return self.status if model_id in ("", self.status.model_id) else replace(READY, model_id=model_id)

    def _models(self, app: FastAPI, hub: Hub) -> None:
        """What the choice of a model asks."""

        def load(body: dict[str, str]) -> dict[str, str]:
            self.status = ModelStatus(model_id=body["model"], state="loading", stage="reading weights", fraction=0.5)
            return body

        shelf = [{"id": name, "state": "ready", "is_embedded": False} for name in (READY.model_id, "other-model")]
        app.add_api_route("/ui/models/shelf", lambda: {"models": shelf})
        app.add_api_route("/ui/models/best", lambda: {"model": None})
        app.add_api_route("/ui/me", lambda: {"name": "", "is_admin": True})
        app.add_api_route("/ui/models/load", load, methods=["POST"])
        hub.add("models", State(lambda: {"models": self.in_memory}), every_s=0.1)

    def __enter__(self) -> "House":
        self._thread.start()
        wait_until(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=30)


async def _count(text: str) -> int:
    return len(text.split())


class Tab:
    """One browser tab, and what it logged and asked for."""

    def __init__(self, page: Any, house: House) -> None:
        self.page = page
        self.house = house
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
        return self.page.locator(".fs-answer")

    @property
    def finished(self) -> Any:
        return self.page.locator('.fs-answer:not([data-state="writing"])')

    @property
    def writing(self) -> Any:
        return self.page.locator('.fs-answer[data-state="writing"]')

    def press(self, name: str, which: int = -1) -> None:
        self.page.get_by_role("button", name=name, exact=True).nth(which).click()

    @property
    def stop(self) -> Any:
        return self.page.get_by_role("button", name="Stop", exact=True)

    def cost_of_an_update(self, num_drawn: str, seconds: float) -> float:
        """Milliseconds of CPU of the tab's main thread, whatever else runs on this machine, in so many seconds.

        num_drawn  what tells in the page how many updates there were
        """
        session = self.page.context.new_cdp_session(self.page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        before, num_before = _busy_s(session), self.page.evaluate(num_drawn)
        time.sleep(seconds)
        busy_s, num_updates = _busy_s(session) - before, self.page.evaluate(num_drawn) - num_before
        return 1000 * busy_s / max(num_updates, 1)

    def shown(self) -> str:
        return str(self.page.locator("#fs-pane").inner_text())

    def shoot(self, name: str) -> None:
        ARTIFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=ARTIFACTS / f"{name}.png")


def _busy_s(session: Any) -> float:
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


def axe_findings(page: Any) -> list[str]:
    """All that axe-core, which reads the page as a screen reader would, has against it."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(_AXE.read_text(encoding="utf-8"))
    found = page.evaluate("async () => (await axe.run()).violations")
    return [f"{each['impact']} {each['id']}: {node['html'][:200]}" for each in found for node in each["nodes"]]


def wait_until(is_so: Callable[[], bool], seconds: float = PATIENCE_MS / 1000) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.05)
