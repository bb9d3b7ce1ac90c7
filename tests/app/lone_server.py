"""A whole server in a process of its own, as test_server starts it: the real child, models of bytes, no torch.

`python lone_server.py [flags of launch.py]`. While `<home>/hold` exists the model keeps loading; with
--kv-gb 0.125 it is refused. The page is one word, so that no start waits for Gradio.
"""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from fastapi import FastAPI

from app import page_rooms, server
from app.models.catalog import CatalogEntry
from app.models.making import Progress
from app.models.manager import ModelManager
from app.settings import Settings
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import BadRequest, OutOfMemory
from engine.plan import BatchPlan, FinishedStep, Grammar, StepOutput
from engine.types import GrammarSpec, MemoryReport
from tests.fakes import byte_model_folder, model_info


class EndlessRunner:
    """Samples one letter for ever, a hundred times a second."""

    steps_ahead = 0

    def __init__(self, letter: str) -> None:
        self._letter = letter
        self.info = model_info(max_model_len=100_000)
        self.memory = MemoryReport(
            total_bytes=0,
            free_bytes_at_start=0,
            weights_bytes=0,
            workspace_bytes=0,
            kv_bytes=0,
            reserve_bytes=0,
            num_blocks=8192,
            block_size=16,
        )

    def submit(self, plan: BatchPlan) -> FinishedStep:
        time.sleep(0.01)
        return FinishedStep(StepOutput((ord(self._letter),) * plan.num_sampled))

    def device_memory(self) -> None:
        return None

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        raise BadRequest("this model takes no grammar")


def load(config: EngineConfig, on_progress: Callable[[str, float], None]) -> EndlessRunner:
    if config.kv_gb == 0.125:
        raise OutOfMemory("no room for that")
    while (Path(config.model).parent / "hold").exists():
        on_progress("held", 0.5)
        time.sleep(0.02)
    return EndlessRunner("b" if Path(config.model).name == "others" else "a")


class TwoModels:
    """`letters`, which every other name means too, and `others`, whose letter is `b`."""

    def __init__(self, home: Path) -> None:
        self._folders = {name: byte_model_folder(home / name) for name in ("letters", "others")}
        self._entries = {name: CatalogEntry(id=name) for name in self._folders}

    def entries(self) -> list[CatalogEntry]:
        return list(self._entries.values())

    def find(self, name: str) -> CatalogEntry:
        return self._entries.get(name) or self._entries["letters"]

    def resolve(self, name: str) -> CatalogEntry:
        return self.find(name)

    def is_whole(self, entry: CatalogEntry) -> bool:
        return True

    def ensure(self, entry: CatalogEntry, on_progress: Progress) -> Path:
        return self._folders[entry.id]


def new_manager(settings: Settings) -> ModelManager:
    start = functools.partial(EngineClient.start, load_runner="tests.app.lone_server:load")
    return ModelManager(settings, TwoModels(settings.home), start, needs=lambda folder, config, kind: 0)


def build_page(behind: page_rooms.Behind) -> FastAPI:
    page = FastAPI()
    page.add_api_route("/", lambda: "the page")
    return page


if __name__ == "__main__":
    server.new_manager = new_manager
    page_rooms.build_page = build_page
    sys.exit(server.main(["--no-browser", "--port", "0", *sys.argv[1:]]))
