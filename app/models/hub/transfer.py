"""The files of a download, several at once: each taken up at its last byte, verified, and only then named.

The bytes are fetched here, since huggingface_hub's snapshot_download (2.4) begins a broken shard of several GB anew and
does not hash what came.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

from app.errors import AppError
from app.models.hub.manifest import Manifest, found_hash, is_right, verdict
from app.models.hub.report import OnReport, Report, Speed, Transfer
from app.models.hub.repository import BUSY, RemoteFile, opened
from app.models.store import file_bytes

_FILES_AT_ONCE = 4
_TRIES_WITHOUT_A_BYTE = 5
_TRIES_OF_A_SPOILT_FILE = 2
_REPORT_EVERY_S = 0.2


def bytes_there(growing: Path, files: tuple[RemoteFile, ...]) -> int:
    return sum(file_bytes(growing / file.name) + file_bytes(_partial(growing, file)) for file in files)


class _Stopped(Exception):
    """Another file, or who looks on, ended the download."""


class Fetching:
    """The files of one manifest on their way into `growing`."""

    def __init__(self, manifest: Manifest, growing: Path, token: str | None) -> None:
        self._manifest, self._growing, self._token = manifest, growing, token
        self._transfers = {file: Transfer(file.name, file.num_bytes) for file in manifest.files}
        self._etags: dict[str, str | None] = {}
        self._is_stopped = Event()

    def run(self, on_report: OnReport) -> None:
        """Raises the first file's failure that does not go away; what has come by then stays."""
        speed = Speed()
        by_size = sorted(self._manifest.files, key=lambda file: file.num_bytes)
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="download") as pool:
            try:
                running = {pool.submit(self._fetch, file) for file in by_size}
                while running:
                    done, running = wait(running, timeout=_REPORT_EVERY_S, return_when="FIRST_COMPLETED")
                    on_report(self._report(speed))
                    _raise_first(done)
            finally:
                self._is_stopped.set()
                pool.shutdown(cancel_futures=True)
        on_report(self._report(speed))

    def _report(self, speed: Speed) -> Report:
        transfers = tuple(self._transfers.values())
        done = sum(transfer.done_bytes for transfer in transfers)
        is_all_here = done >= self._manifest.num_bytes
        return Report(
            self._manifest.repo,
            "verifying" if is_all_here else "downloading",
            tuple(transfer.snapshot() for transfer in transfers),
            speed.of(done),
        )

    def _fetch(self, file: RemoteFile) -> None:
        transfer, path = self._transfers[file], self._growing / file.name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():  # else renamed after its check, so it is right
            self._fill_and_check(file, transfer, path)
        transfer.done_bytes, transfer.state = file.num_bytes, _state(file)

    def _fill_and_check(self, file: RemoteFile, transfer: Transfer, path: Path) -> None:
        partial = _partial(self._growing, file)
        if not file.is_known_by_hash:
            partial.unlink(missing_ok=True)  # of an earlier process: nobody could tell whether it is right
        for tries_left in reversed(range(_TRIES_OF_A_SPOILT_FILE)):
            self._fill(partial, file, transfer)
            transfer.state = "verifying"
            _flush(partial)
            if is_right(verdict(partial, file)):
                os.replace(partial, path)
                return
            failure = _spoilt(partial, file)
            partial.unlink()
            if not tries_left:
                raise failure

    def _fill(self, partial: Path, file: RemoteFile, transfer: Transfer) -> None:
        """Append to `partial` until it has the file's length; what breaks off is asked for from there."""
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError

        tries = 0
        transfer.state = "downloading"
        while (before := file_bytes(partial)) != file.num_bytes:
            transfer.done_bytes = before
            if self._is_stopped.wait(tries):
                raise _Stopped
            failure: Exception | None = None
            try:
                self._append(partial, file, transfer)
            except httpx2.TransportError as error:
                failure = error
            except HfHubHTTPError as error:
                if error.response.status_code not in BUSY:
                    raise
                failure = error
            tries = 0 if file_bytes(partial) > before else tries + 1
            if tries == _TRIES_WITHOUT_A_BYTE:
                raise failure or _wrong_length(partial, file)
        partial.touch()  # a file of no bytes needs no request

    def _append(self, partial: Path, file: RemoteFile, transfer: Transfer) -> None:
        have = file_bytes(partial)
        if have > file.num_bytes:
            partial.unlink()
            have = 0
        manifest = self._manifest
        with opened(manifest.repo, manifest.commit, file.name, f"{have}-", self._token) as response:
            etag = response.headers.get("etag")
            is_other = self._etags.setdefault(file.name, etag) != etag
            if have and is_other:  # what is to come does not belong to what is here
                self._etags[file.name] = etag
                partial.unlink()
                return
            is_from_start = response.status_code != 206
            have = 0 if is_from_start else have
            with partial.open("wb" if is_from_start else "ab") as out:
                for chunk in response.iter_bytes():  # as they come: what is held back is lost when the line breaks
                    if self._is_stopped.is_set():
                        raise _Stopped
                    out.write(chunk)
                    have += len(chunk)
                    transfer.done_bytes = min(have, file.num_bytes)


def _raise_first(done: set["Future[None]"]) -> None:
    for future in done:
        future.result()


def _state(file: RemoteFile) -> str:
    return "verified" if file.is_known_by_hash else "unverified"


def _partial(folder: Path, file: RemoteFile) -> Path:
    return folder / f"{file.name}.partial"


def _wrong_length(partial: Path, file: RemoteFile) -> AppError:
    return AppError(
        502,
        "download_failed",
        f"{file.name} should have {file.num_bytes:,} bytes; "
        f"{file_bytes(partial):,} came, {_TRIES_WITHOUT_A_BYTE} times.",
        hint="Check the mirror or proxy in between, and start again.",
    )


def _spoilt(partial: Path, file: RemoteFile) -> AppError:
    expected = file.sha256 or file.blob_id
    return AppError(
        502,
        "download_corrupt",
        f"{file.name} did not arrive as it was sent: its hash is {found_hash(partial, file)}, expected {expected}.",
        hint="Start again: this file is fetched anew, the others are kept.",
    )


def _flush(path: Path) -> None:
    """A rename may reach the disk before the bytes it names; a power cut would then leave a whole name on holes."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())
