"""Downloads in processes of their own: paused, resumed, cancelled, killed, and what is known of them afterwards."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import psutil
import pytest

from app.errors import AppError
from app.models.catalog import CatalogEntry
from app.models.hub import downloader
from app.models.hub.download import fetch
from app.models.hub.downloader import fetch_apart
from app.models.hub.downloads import Download, Downloads
from app.models.hub.manifest import growing_folder
from app.models.hub.report import Report, Transfer
from app.models.store import is_whole, problems
from tests.app.models.fake_hub import FakeHub, led_here, running
from tests.app.models.hub.test_download import REPO, model_files

ROOT = Path(__file__).parents[4]
ENTRY = CatalogEntry(id=REPO, repo=REPO)
NAME = "org--tiny-AWQ"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running(FakeHub(files={REPO: model_files()}, commits={REPO: "a" * 40})) as hub:
        led_here(hub, monkeypatch)
        yield hub


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


class Scripted:
    """A fetch that reports until it is told how to end."""

    def __init__(self) -> None:
        self.ends_with: Exception | None = None
        self.may_end = False
        self.started: list[str] = []

    def __call__(self, repo: str, revision: str | None, folder: Path, on_report: object) -> Path:
        self.started.append(repo)
        while not self.may_end:
            on_report(Report(repo, "downloading", (Transfer("w", 100, 40),), 10.0))  # type: ignore[operator]
            time.sleep(0.005)
        if self.ends_with:
            raise self.ends_with
        folder.mkdir(exist_ok=True)
        return folder


def until(condition: object, timeout_s: float = 100) -> None:
    begun = time.monotonic()
    while not condition():  # type: ignore[operator]
        assert time.monotonic() - begun < timeout_s, "it never came to be"
        time.sleep(0.01)


def state_of(found: Downloads, name: str = NAME) -> str | None:
    download = found.find(name)
    return download and download.state


def test_one_comes_after_the_other(models: Path) -> None:
    fetch = Scripted()
    queue = Downloads(models, fetch)
    for name in ("a", "b"):
        queue.add(name, CatalogEntry(id=name, repo=f"org/{name}"))
    until(lambda: state_of(queue, "a") == "downloading")
    assert state_of(queue, "b") == "queued"
    fetch.may_end = True
    until(lambda: state_of(queue, "b") == "ready")
    assert fetch.started == ["org/a", "org/b"]
    queue.close()


def test_a_pause_ends_the_work_and_resume_takes_it_up(models: Path) -> None:
    fetch = Scripted()
    queue = Downloads(models, fetch)
    queue.add(NAME, ENTRY)
    until(lambda: state_of(queue) == "downloading")
    assert queue.pause(NAME).state == "paused"
    with pytest.raises(AppError, match="is paused, not under way"):
        queue.pause(NAME)
    until(lambda: queue._halting is None)
    fetch.may_end = True
    queue.resume(NAME)
    until(lambda: state_of(queue) == "ready")
    assert len(fetch.started) == 2
    queue.close()


def test_a_failure_is_told_with_its_reason_and_can_be_resumed(models: Path) -> None:
    fetch = Scripted()
    fetch.may_end, fetch.ends_with = True, AppError(507, "disk_full", "The disk is full.", hint="Free some.")
    queue = Downloads(models, fetch)
    queue.add(NAME, ENTRY)
    until(lambda: state_of(queue) == "failed")
    (failed,) = Downloads(models, fetch).all()
    assert failed.error == {"status": 507, "code": "disk_full", "message": "The disk is full.", "hint": "Free some."}
    fetch.ends_with = None
    queue.resume(NAME)
    until(lambda: state_of(queue) == "ready")
    assert Downloads(models, fetch).all() == []
    queue.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [("queued", "ready"), ("downloading", "ready"), ("verifying", "ready"), ("paused", "paused"), ("failed", "failed")],
)
def test_states_outlive_a_crash_and_what_was_under_way_goes_on(models: Path, before: str, after: str) -> None:
    record = {"repo": REPO, "revision": None, "state": before, "error": None, "owner": [2**22 + 1, 0.0]}
    (models / f".{NAME}.download.json").write_text(json.dumps(record))
    fetch = Scripted()
    fetch.may_end = True
    queue = Downloads(models, fetch)
    assert state_of(queue) == ("failed" if before == "failed" else "paused"), "nobody downloads it now"
    queue.take_up()
    until(lambda: state_of(queue) == after)
    queue.close()


def test_a_download_whose_model_was_deleted_is_known_no_more(models: Path) -> None:
    fetch = Scripted()
    fetch.may_end = True
    downloads = Downloads(models, fetch)
    downloads.add(NAME, ENTRY)
    until(lambda: state_of(downloads) == "ready")
    shutil.rmtree(models / NAME)
    assert downloads.all() == []


def test_a_cancelled_download_leaves_nothing(models: Path) -> None:
    queue = Downloads(models, Scripted())
    queue.add(NAME, ENTRY)
    until(lambda: state_of(queue) == "downloading")
    growing_folder(models / NAME).mkdir()
    (growing_folder(models / NAME) / "model.safetensors.partial").write_bytes(b"half")
    queue.cancel(NAME)
    assert (list(models.iterdir()), queue.all()) == ([], [])
    queue.close()


def test_a_child_fetches_reports_and_tells_errors_in_our_words(hub: FakeHub, models: Path) -> None:
    seen: list[Report] = []
    assert problems(fetch_apart(REPO, None, models / NAME, seen.append)) == []
    assert seen[-1].fraction == 1.0
    with pytest.raises(AppError, match="does not exist") as refused:
        fetch_apart("org/nothing", None, models / "nothing", seen.append)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_a_child_that_is_killed_is_told_and_goes_on_where_it_stopped(hub: FakeHub, models: Path) -> None:
    hub.pause_s = 0.03
    children: list[subprocess.Popen[str]] = []
    start = downloader._start

    def remembered(task: str) -> "subprocess.Popen[str]":
        children.append(start(task))
        return children[-1]

    def kill(report: Report) -> None:
        if report.done_bytes > 500_000:
            children[-1].kill()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(downloader, "_start", remembered)
        with pytest.raises(AppError, match=r"ended by itself \(signal 9\)"):
            fetch_apart(REPO, None, models / NAME, kill)
    assert not (models / NAME).exists()
    hub.pause_s = 0
    hub.served.clear()
    assert problems(fetch_apart(REPO, None, models / NAME, lambda report: None)) == []
    assert hub.served_from("model.safetensors")[0] >= 400_000


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_a_child_ends_with_its_parent(hub: FakeHub, models: Path) -> None:
    hub.pause_s = 0.2
    code = (
        "import sys; from pathlib import Path; from app.models.hub.downloader import fetch_apart;"
        f"fetch_apart({REPO!r}, None, Path(sys.argv[1]), lambda r: print(r.done_bytes, flush=True))"
    )
    command = [sys.executable, "-c", code, str(models / NAME)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        next(line for line in parent.stdout if int(line) > 100_000)
        parent.send_signal(signal.SIGKILL)
    partial = growing_folder(models / NAME) / "model.safetensors.partial"
    sizes = [partial.stat().st_size]

    def stands_still() -> bool:
        time.sleep(0.7)
        sizes.append(partial.stat().st_size)
        return sizes[-1] == sizes[-2]

    until(stands_still)
    assert sizes[-1] < 3_000_000


def _killed_at_random(hub: FakeHub, models: Path, kills: int, seed: int) -> int:
    """Kill the downloader so many times at random moments; returns at how many of them bytes had come."""
    moments, told = random.Random(seed), 0
    original = {name: content for name, content in hub.files[REPO].items() if name.endswith((".json", "l.safetensors"))}
    for _ in range(kills):
        task = json.dumps([REPO, None, str(models / NAME), False])
        with downloader._start(task) as child:
            assert child.stdout is not None
            if moments.random() < 0.9:  # else while it starts
                next((line for line in child.stdout if '"downloading"' in line), "")
            Thread(target=child.stdout.read, daemon=True).start()
            time.sleep(moments.uniform(0.0, 0.7))
            child.kill()
        growing = growing_folder(models / NAME)
        told += any(growing.glob("*.partial")) if growing.exists() else 0
        if (models / NAME).exists():  # it had come to its end: it must be right, then it begins anew
            assert is_whole(models / NAME)
            _check(models / NAME, original)
            for path in (models / NAME).iterdir():
                path.unlink()
            (models / NAME).rmdir()
    hub.pause_s = 0
    _check(fetch_apart(REPO, None, models / NAME, lambda report: None), original)
    return told


def _check(folder: Path, original: dict[str, bytes]) -> None:
    wanted = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")
    assert {name: (folder / name).read_bytes() == original[name] for name in wanted} == dict.fromkeys(wanted, True)


def test_killed_at_random_moments_nothing_is_lost_and_nothing_false(hub: FakeHub, models: Path) -> None:
    hub.pause_s = 0.03
    _killed_at_random(hub, models, kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_50_random_moments_nothing_is_lost_and_nothing_false(hub: FakeHub, models: Path) -> None:
    hub.pause_s = 0.04
    assert _killed_at_random(hub, models, kills=50, seed=2) > 10


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_disk_that_fills_up_is_told_and_the_download_goes_on_once_there_is_room(
    hub: FakeHub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(models)], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        from app.models import making
        from app.models.hub import download

        monkeypatch.setattr(making, "_SPARE_BYTES", -10_000_000)  # another program took the space in between
        with pytest.raises(AppError, match="is full") as refused:
            download.fetch(REPO, None, models / NAME, lambda report: None)
        assert refused.value.code == "disk_full"
        assert not (models / NAME).exists()
        subprocess.run(["mount", "-o", "remount,size=20m", str(models)], check=True)
        hub.served.clear()
        assert problems(download.fetch(REPO, None, models / NAME, lambda report: None)) == []
        assert hub.served_from("model.safetensors")[0] > 1_000_000
    finally:
        subprocess.run(["umount", str(models)], check=True)


def test_another_process_sees_what_this_one_downloads(models: Path) -> None:
    queue = Downloads(models, Scripted())
    queue.add(NAME, ENTRY)
    until(lambda: state_of(queue) == "downloading")
    code = (
        "import sys, pathlib; from app.models.hub.downloads import Downloads\n"
        "print(Downloads(pathlib.Path(sys.argv[1])).all())"
    )
    seen = subprocess.run(
        [sys.executable, "-c", code, str(models)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "state='downloading'" in seen
    queue.close()


@pytest.fixture
def of_another(models: Path) -> Iterator[Path]:
    """The record of a download that a living process has, which is not this one."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        owner = [other.pid, psutil.Process(other.pid).create_time()]
        record = {"repo": REPO, "revision": None, "state": "downloading", "error": None, "owner": owner}
        path = models / f".{NAME}.download.json"
        path.write_text(json.dumps(record))
        yield path
        other.kill()


def test_what_another_process_downloads_is_left_to_it(models: Path, of_another: Path) -> None:
    fetch, before = Scripted(), of_another.read_text()
    queue = Downloads(models, fetch)
    queue.take_up()
    assert queue.add(NAME, ENTRY).state == queue.resume(NAME).state == "downloading"
    for deed in (queue.pause, queue.cancel):
        with pytest.raises(AppError, match="by another Fireside") as refused:
            deed(NAME)
        assert refused.value.status == 409
    assert (queue.known(), fetch.started, of_another.read_text()) == ([], [], before)
    queue.close()


def test_whoever_waits_for_it_sees_how_it_ends_there(models: Path, of_another: Path) -> None:
    queue, seen = Downloads(models, Scripted()), []

    def then_it_ends(now: Download) -> None:
        seen.append(now.state)
        of_another.unlink(missing_ok=True)

    assert queue.wait(NAME, then_it_ends).state == "paused", "nothing of it is here"
    assert seen == ["downloading", "paused"]


def test_what_a_load_or_a_repair_left_in_the_middle_is_paused_and_can_be_taken_up_or_cancelled(
    hub: FakeHub, models: Path
) -> None:
    def stop(report: Report) -> None:
        if report.done_bytes > 500:
            seen.extend(Downloads(models).all())
            raise KeyboardInterrupt

    seen: list[Download] = []
    with pytest.raises(KeyboardInterrupt):
        fetch(REPO, None, models / NAME, stop)
    assert [found.state for found in seen] == ["downloading"], "while somebody holds its lock"
    (found,) = Downloads(models).all()
    assert (found.name, found.repo, found.state) == (NAME, REPO, "paused")
    assert found.report is not None and found.report.done_bytes > 500
    queue = Downloads(models, fetch)
    queue.resume(NAME)
    until(lambda: is_whole(models / NAME))
    queue.close()
    growing_folder(models / NAME).mkdir()
    shutil.copy(models / NAME / ".fireside-origin.json", growing_folder(models / NAME))
    queue = Downloads(models, fetch)
    queue.cancel(NAME)
    assert not growing_folder(models / NAME).exists()
    queue.close()


def test_a_disk_without_room_for_the_state_of_a_download_stops_no_other(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("app.models.hub.downloads.write_durably", full)
    fetch = Scripted()
    fetch.may_end, fetch.ends_with = True, AppError(507, "disk_full", "The disk is full.")
    queue = Downloads(models, fetch)
    for name in ("a", "b"):
        queue.add(name, CatalogEntry(id=name, repo=f"org/{name}"))
        until(lambda: state_of(queue, name) == "failed")  # noqa: B023
    queue.close()


def test_a_record_that_nobody_can_read_is_no_download(models: Path) -> None:
    (models / f".{NAME}.download.json").write_text("{")
    assert Downloads(models).all() == []


def test_a_wish_to_use_it_lives_over_a_pause_and_a_restart_and_is_told_once(models: Path) -> None:
    scripted, told = Scripted(), list[str]()
    first = Downloads(models, scripted)
    first.on_wanted = lambda download: told.append("first")
    first.add(NAME, ENTRY)
    assert first.add(NAME, ENTRY, is_to_load=True).is_to_load, "one that is under way takes it"
    until(lambda: state_of(first) == "downloading")
    first.pause(NAME)
    first.close()
    second = Downloads(models, scripted)
    second.on_wanted = lambda download: told.append(download.repo)
    found = second.find(NAME)
    assert found is not None and found.state == "paused" and found.is_to_load
    scripted.may_end = True
    second.resume(NAME)
    until(lambda: told)
    second.close()
    assert told == [REPO]


def test_a_download_that_nobody_wants_to_use_is_told_to_nobody(models: Path) -> None:
    scripted, told = Scripted(), list[str]()
    scripted.may_end = True
    downloads = Downloads(models, scripted)
    downloads.on_wanted = lambda download: told.append(download.repo)
    downloads.add(NAME, ENTRY)
    until(lambda: state_of(downloads) == "ready")
    downloads.close()
    assert told == []
