"""The API over the scripted engine, behind a real server on a loopback port, in a thread: a client here may block.

    with Stage(folder) as stage:
        client = openai.OpenAI(base_url=f"{stage.url}/v1", ...)

`folder` comes from `model_folder`.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from tests.app.api.house import House
from tests.clients.scenes import TEMPLATE, play, text_of
from tests.fakes import byte_model_folder, model_info

MODEL = "fake-model"
_PATIENCE_S = 100.0


def model_folder(folder: Path) -> Path:
    """Of a model that can do all there is: call tools, fill gaps, make vectors."""
    gap = ("<|fim_prefix|>", "<|fim_suffix|>")
    made = byte_model_folder(folder, chat_template=TEMPLATE, words=gap)
    (made / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Pooling"}]))
    return made


class Stage:
    """
    script   as FakeEngine takes it; the scenes, unless another is given
    """

    def __init__(self, folder: Path, script: Any = play) -> None:
        self.house = House(folder, script)
        self.engine = self.house.engine
        self.house.source.model.info = model_info(max_model_len=200_000, context_length=200_000)
        config = uvicorn.Config(self.house.app, host="127.0.0.1", port=0, log_level="warning")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve()

    def __enter__(self) -> "Stage":
        self._thread.start()
        until(lambda: self._server.started)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(_PATIENCE_S)

    def num_tasks(self) -> int:
        """Under way in the server now."""

        async def count() -> int:
            return len(asyncio.all_tasks())

        return asyncio.run_coroutine_threadsafe(count(), self._loop).result(_PATIENCE_S)

    def last_params(self) -> Any:
        """What the engine was asked to sample with, in the latest request."""
        return self.engine.submitted[-1][2]

    def last_prompt(self) -> str:
        return text_of(self.engine.submitted[-1][1])

    def num_left(self) -> int:
        """Requests for the endless scene that were aborted."""
        endless = {name for name, prompt, _ in self.engine.submitted if "scene:endless" in text_of(prompt)}
        return len(endless & {*self.engine.aborted})

    def until_left(self, count: int) -> None:
        until(lambda: self.num_left() == count and not self.engine.running)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)
