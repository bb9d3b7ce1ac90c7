"""The downloads of one models folder: one by one, paused, resumed, cancelled; what they are outlives a restart.

    queued -> downloading -> verifying -> ready
                  |  \\-> failed -> (resume) -> queued
                  \\-> paused -> (resume) -> queued

Each has a small file beside its growing folder, so that another process, or the next, knows it. What was queued or
under way when a process ended, however it ended, is queued again by the next one that calls `take_up`.
"""

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from app.errors import AppError
from app.models.catalog import CatalogEntry
from app.models.hub.downloader import fetch_apart
from app.models.hub.manifest import growing_folder, read_manifest, record_file, write_durably
from app.models.hub.report import Report, Transfer
from app.models.hub.transfer import bytes_there
from app.models.making import is_being_made
from app.models.store import is_whole

_log = logging.getLogger("fireside.downloads")

State = Literal["queued", "downloading", "paused", "verifying", "ready", "failed"]
Fetch = Callable[[str, str | None, Path, Callable[[Report], None]], Path]
_UNDER_WAY = ("queued", "downloading", "verifying")
_STATES = (*_UNDER_WAY, "paused", "failed", "ready")


@dataclass(frozen=True, slots=True)
class Download:
    """error: code, message and hint of a failure. report: of its files, once they are known.

    owner   process id of who has it, and the time that this process began
    is_to_load  somebody wants to use it as soon as it is here: kept over pauses and restarts
    """

    name: str
    repo: str
    revision: str | None
    state: State
    error: dict[str, Any] | None = None
    report: Report | None = None
    owner: tuple[int, float] = (0, 0.0)
    is_to_load: bool = False

    @property
    def is_under_way(self) -> bool:
        return self.state in _UNDER_WAY


class _Halted(Exception):
    """Somebody paused or cancelled it, or the process ends."""


class Downloads:
    """Called from any thread; one of its own does the work, from the first download on.

    on_wanted   hears, in that thread, of a download that is ready and `is_to_load`; set before the first one ends
    """

    def __init__(self, models_dir: Path, fetch: Fetch = fetch_apart) -> None:
        self._models_dir, self._fetch = models_dir, fetch
        self.on_wanted: Callable[[Download], None] = lambda download: None
        self._changed = threading.Condition()
        self._known: dict[str, Download] = {}
        self._halting: str | None = None  # its next report ends it
        self._is_closed = False
        self._worker: threading.Thread | None = None

    def take_up(self) -> None:
        """Queue what an earlier process left under way. For the one that serves; a listing leaves it alone."""
        for found in _read_records(self._models_dir):
            if found.state in _UNDER_WAY and not _is_alive(found.owner):
                self._put(replace(found, state="queued"))

    def known(self) -> list[Download]:
        """Those of this process, from memory."""
        with self._changed:
            return list(self._known.values())

    def all(self) -> list[Download]:
        """Those that are known here, and those that lie on the disk: of other processes, and what was left by them. A
        model that was deleted since its download, by whichever process, is none of them."""
        with self._changed:
            known = {name: found for name, found in self._known.items() if not self._is_deleted(found)}
        for found in _read_records(self._models_dir):
            if found.state in _UNDER_WAY and not _is_alive(found.owner):
                found = replace(found, state="paused")  # whoever had it is gone: it waits to be taken up
            known.setdefault(found.name, found)
        for found in _read_growing(self._models_dir):
            known.setdefault(found.name, found)
        return list(known.values())

    def _is_deleted(self, found: Download) -> bool:
        return found.state == "ready" and not (self._models_dir / found.name).is_dir()

    def find(self, name: str) -> Download | None:
        return next((found for found in self.all() if found.name == name), None)

    def add(self, name: str, entry: CatalogEntry, *, is_to_load: bool = False) -> Download:
        """Queue it; one that is under way, here or in another process, goes on as it is. name: of its folder."""
        assert entry.repo is not None, "only a repository is downloaded"
        found = self.find(name)
        if found is not None and found.is_under_way:
            return self._wanted(found) if is_to_load else found
        is_to_load = is_to_load or (found is not None and found.state != "ready" and found.is_to_load)
        return self._put(Download(name, entry.repo, entry.revision, "queued", is_to_load=is_to_load))

    def _wanted(self, found: Download) -> Download:
        """One of this process; whoever has another process's asks there."""
        with self._changed:
            known = self._known.get(found.name)
            if known is None or not known.is_under_way:
                return found
            self._set(replace(known, is_to_load=True))
            return self._known[found.name]

    def pause(self, name: str) -> Download:
        """What has come stays. Raises AppError 404, or 409 for one that is not under way, or is in another process."""
        found = self._need_own(name, _UNDER_WAY, "under way")
        return self._halt(replace(found, state="paused"))

    def resume(self, name: str) -> Download:
        """One that is under way stays as it is. Raises AppError 404, or 409 for one that is done."""
        found = self._need(name, ("paused", "failed", *_UNDER_WAY), "paused")
        if found.is_under_way:
            return found
        return self._put(replace(found, state="queued", error=None))

    def cancel(self, name: str) -> None:
        """Nothing of it stays. Raises AppError 404, or 409 for one that is done, or under way in another process."""
        found = self._need_own(name, (*_UNDER_WAY, "paused", "failed"), "to be cancelled")
        self._halt(replace(found, state="paused"))
        with self._changed:
            self._changed.wait_for(lambda: self._halting != name, timeout=5)
            self._known.pop(name, None)
        record_file(self._models_dir, name).unlink(missing_ok=True)
        shutil.rmtree(growing_folder(self._models_dir / name), ignore_errors=True)

    def wait(self, name: str, on_change: Callable[[Download], None], every_s: float = 0.2) -> Download:
        """Until it is ready, failed or paused, here or in the process that has it; tells how it is meanwhile."""
        found = last = self._need(name, _STATES, "known")
        while found.is_under_way:
            on_change(found)
            with self._changed:
                self._changed.wait(every_s)
            last, found = found, self.find(name) or self._gone(last)
        on_change(found)
        return found

    def end(self) -> None:
        """End the one under way, at its next report: it is taken up by the next process. Waits for nothing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """As `end`; returns when it has ended."""
        self.end()
        if self._worker is not None:
            self._worker.join(timeout=5)

    def is_anothers(self, download: Download) -> bool:
        """Under way in another process, which alone can end it."""
        return download.is_under_way and download.name not in self._known

    def _gone(self, last: Download) -> Download:
        """What another process had, and no longer has: done, or cancelled."""
        return replace(last, state="ready" if is_whole(self._models_dir / last.name) else "paused")

    def _need_own(self, name: str, states: tuple[str, ...], wanted: str) -> Download:
        found = self._need(name, states, wanted)
        if self.is_anothers(found):
            who = f" (process {found.owner[0]})" if found.owner[0] else ""
            what = f"{name} is being downloaded by another Fireside{who}."
            raise AppError(409, "busy", what, hint="Pause or cancel it there.", param="model")
        return found

    def _need(self, name: str, states: tuple[str, ...], wanted: str) -> Download:
        found = self.find(name)
        if found is None:
            raise AppError(404, "not_found", f"There is no download {name[:200]!r}.", param="model")
        if found.state not in states:
            raise AppError(409, "wrong_state", f"The download of {name} is {found.state}, not {wanted}.", param="model")
        return found

    def _put(self, download: Download) -> Download:
        with self._changed:
            self._set(download)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="downloads", daemon=True)
                self._worker.start()
        return download

    def _halt(self, download: Download) -> Download:
        with self._changed:
            before = self._known.get(download.name)
            if before is not None and before.state in ("downloading", "verifying"):
                self._halting = download.name
            self._set(download)
        return download

    def _set(self, download: Download) -> None:
        self._known[download.name] = download
        if download.state == "ready":
            record_file(self._models_dir, download.name).unlink(missing_ok=True)
        else:
            self._record(download)
        self._changed.notify_all()

    def _record(self, download: Download) -> None:
        """What a disk that is full costs is that the next process does not know of it as it is now."""
        try:
            _write(self._models_dir, download)
        except OSError as error:
            _log.warning("The state of the download of %s cannot be kept: %s", download.repo, error)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._next() is not None)
                download = self._next()
                if self._is_closed or download is None:
                    return
                self._set(replace(download, state="downloading"))
            self._run(download)

    def _next(self) -> Download | None:
        return next((found for found in self._known.values() if found.state == "queued"), None)

    def _run(self, download: Download) -> None:
        name = download.name
        try:
            self._fetch(download.repo, download.revision, self._models_dir / name, lambda r: self._hear(name, r))
            self._end(name, "ready")
            self._tell_wanted(name)
        except _Halted:
            with self._changed:
                self._halting = None
                self._changed.notify_all()
        except AppError as error:
            self._end(name, "failed", error.as_fields())
        except Exception as error:
            _log.exception("downloading %s failed", name)
            self._end(name, "failed", AppError(500, "download_failed", f"{type(error).__name__}: {error}").as_fields())

    def _tell_wanted(self, name: str) -> None:
        with self._changed:
            found = self._known.get(name)
        if found is not None and found.state == "ready" and found.is_to_load:
            self.on_wanted(found)

    def _hear(self, name: str, report: Report) -> None:
        with self._changed:
            if self._is_closed or self._halting == name:
                raise _Halted
            known = self._known[name]
            state: State = "verifying" if report.state == "verifying" else "downloading"
            self._known[name] = replace(known, state=state, report=report)
            self._changed.notify_all()

    def _end(self, name: str, state: State, error: dict[str, Any] | None = None) -> None:
        with self._changed:
            was_halted = self._halting == name  # between its last report and its end
            self._halting = None
            if was_halted and state == "failed":
                self._changed.notify_all()
                return
            self._set(replace(self._known[name], state=state, error=error))


def _write(models_dir: Path, download: Download) -> None:
    models_dir.mkdir(parents=True, exist_ok=True)
    found = {key: getattr(download, key) for key in ("repo", "revision", "state", "error", "is_to_load")}
    found["owner"] = [os.getpid(), psutil.Process().create_time()]
    write_durably(record_file(models_dir, download.name), json.dumps(found))


def _read_records(models_dir: Path) -> list[Download]:
    paths = sorted(models_dir.glob(".*.download.json")) if models_dir.is_dir() else []
    return [found for path in paths if (found := _read(models_dir, path)) is not None]


def _read_growing(models_dir: Path) -> Iterator[Download]:
    """Of folders, with a record or without one: a load fetches too, and so does a repair."""
    for path in sorted(models_dir.glob(".*.download")) if models_dir.is_dir() else []:
        manifest, name = read_manifest(path), path.name[1:].removesuffix(".download")
        if manifest is not None:
            state: State = "downloading" if is_being_made(models_dir, name) else "paused"
            report = _report_on_disk(models_dir / name, manifest.repo)
            yield Download(name, manifest.repo, manifest.revision, state, None, report)


def _read(models_dir: Path, path: Path) -> Download | None:
    name = path.name.removeprefix(".").removesuffix(".download.json")
    try:
        found = json.loads(path.read_text("utf-8"))
        report = _report_on_disk(models_dir / name, found["repo"])
        owner, is_to_load = tuple(found["owner"]), bool(found.get("is_to_load", False))
        return Download(
            name, found["repo"], found["revision"], found["state"], found["error"], report, owner, is_to_load
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _is_alive(owner: tuple[int, float]) -> bool:
    """Whether that process is still there, and not another that got its number."""
    try:
        return psutil.Process(owner[0]).create_time() == owner[1]
    except (psutil.Error, ValueError):
        return False


def _report_on_disk(folder: Path, repo: str) -> Report | None:
    growing = growing_folder(folder)
    manifest = read_manifest(growing)
    if manifest is None:
        return None
    files = tuple(Transfer(file.name, file.num_bytes, bytes_there(growing, (file,))) for file in manifest.files)
    return Report(repo, "queued", files)
