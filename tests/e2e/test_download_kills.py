"""kill -9 of the whole app while it downloads: what has come stays, nothing half is a model, no process is left."""

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from app.models.hub.download import bytes_there
from app.models.hub.manifest import growing_folder, read_manifest, record_file
from app.models.store import is_whole
from tests.app.models.fake_hub import FakeHub, led_here, running
from tests.app.models.hub.test_download import REPO, model_files
from tests.app.test_server import LoneServer, posix_only, until

NAME = "org--tiny-AWQ"
WANTED = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running(FakeHub(files={REPO: model_files()}, commits={REPO: "a" * 40}, pause_s=0.15)) as hub:
        led_here(hub, monkeypatch)
        yield hub


def is_the_original(hub: FakeHub, folder: Path) -> bool:
    return is_whole(folder) and all((folder / name).read_bytes() == hub.files[REPO][name] for name in WANTED)


def have(models: Path) -> int:
    manifest = read_manifest(growing_folder(models / NAME))
    return bytes_there(growing_folder(models / NAME), manifest.files) if manifest else 0


def kill_once(hub: FakeHub, home: Path, after_s: float) -> None:
    """A start, which takes the download up by itself; without one it is asked for. The end comes so long after it began
    to ask for bytes.
    """
    asked, is_new = len(hub.served), not record_file(home / "models", NAME).exists()
    server = LoneServer(home)
    try:
        url = server.wait_until_ready()
        if is_new:
            assert httpx.post(f"{url}/models", json={"model": REPO}, timeout=60).status_code == 200
        until(lambda: len(hub.served) > asked, "the first bytes")
        time.sleep(after_s)
        family = {psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)}
    finally:
        server.process.kill()
        server.process.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, "a process is left"


def kills_during_downloads(hub: FakeHub, home: Path, num_kills: int) -> list[int]:
    """Bytes that lay there after each kill."""
    moments, models, told = random.Random(5), home / "models", [0]
    for _ in range(num_kills):
        kill_once(hub, home, moments.uniform(0, 1.5))
        if (models / NAME).exists():
            assert is_the_original(hub, models / NAME), "a half file is shown as a model"
            shutil.rmtree(models / NAME)
            told.append(0)
            continue
        told.append(have(models))
        assert told[-1] >= told[-2], "what had come is lost"
    hub.pause_s = 0.0
    server = LoneServer(home)
    try:
        url = server.wait_until_ready()
        if not record_file(models, NAME).exists():
            httpx.post(f"{url}/models", json={"model": REPO}, timeout=60)
        until(lambda: is_whole(models / NAME), "the whole model")
        assert is_the_original(hub, models / NAME)
        until(lambda: not record_file(models, NAME).exists(), "the download to be ready")
    finally:
        server.kill()
    return told[1:]


@posix_only
def test_a_kill_of_the_app_while_it_downloads_costs_no_byte(hub: FakeHub, tmp_path: Path) -> None:
    kills_during_downloads(hub, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@posix_only
def test_fifty_kills_of_the_app_while_it_downloads_cost_no_byte(hub: FakeHub, tmp_path: Path) -> None:
    told = kills_during_downloads(hub, tmp_path, 50)
    print(f"\n50 kills of the app while it downloads: {sum(map(bool, told))} with a part on the disk: {told}")
    assert sum(map(bool, told)) > 25
