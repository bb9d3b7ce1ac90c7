"""A model from the hub into the models folder: listed, measured, resumed where it broke off, verified, then named.

The bytes are fetched here, since huggingface_hub's snapshot_download (2.4) begins a broken shard of several GB anew and
does not hash what came. A download grows in a hidden folder and takes its name when every file is there, so that a half
model is never seen. `downloader.py` runs this in a process of its own.
"""

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from fnmatch import fnmatch
from pathlib import Path
from threading import Event

from app.errors import AppError
from app.models.hub.check import verdicts
from app.models.hub.manifest import (
    Manifest,
    Verdict,
    found_hash,
    growing_folder,
    read_manifest,
    verdict,
    write_manifest,
)
from app.models.hub.report import OnReport, Report, Speed, Transfer
from app.models.hub.repository import BUSY, Listing, RemoteFile, hub_errors, list_repo, opened
from app.models.making import require_space, sole_maker
from app.models.store import is_whole, problems

_WANTED = ("*.safetensors", "*.json", "*.jinja", "LICENSE*")
_UNWANTED = ("consolidated*",)  # Mistral's own copy of weights that model*.safetensors holds too
_POOLING = "[0-9]_Pooling/config.json"  # of embedding models: how the last layer becomes one vector
_FILES_AT_ONCE = 4
_TRIES_WITHOUT_A_BYTE = 5
_TRIES_OF_A_SPOILT_FILE = 2
_REPORT_EVERY_S = 0.2


def fetch(repo: str, revision: str | None, folder: Path, on_report: OnReport, token: str | None = None) -> Path:
    """The folder of the whole model; asks the network only where it is not there, or came from another revision.

    on_report is called several times a second; what it raises ends the download, which the next call takes up.
    Raises   AppError: no such repository, a gated one, no network, nothing that can be loaded, no space, a wrong hash
    """
    if is_there(folder, repo, revision):
        return folder

    with _sole_maker(folder, repo, on_report), hub_errors(repo, folder):
        if not is_there(folder, repo, revision):
            _download(repo, revision, folder, on_report, token)
    return folder


def repair(folder: Path, on_report: OnReport, token: str | None = None) -> Path:
    """Fetch again what `verify` finds damaged or missing, and nothing else. Raises as `fetch`."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise AppError(400, "not_downloaded", f"{folder.name} was not downloaded here: nobody knows what it should be.")
    with _sole_maker(folder, manifest.repo, on_report), hub_errors(manifest.repo, folder):
        found = verdicts(folder, manifest, on_report)
        _require_offer(manifest, token)
        _require_space(folder, manifest, found)
        _adopt(folder, growing_folder(folder), found)
        _download(manifest.repo, manifest.revision, folder, on_report, token)
    return folder


def _sole_maker(folder: Path, repo: str, on_report: OnReport) -> AbstractContextManager[None]:
    return sole_maker(folder.parent, folder.name, lambda stage, fraction: on_report(Report(repo, "waiting", ())))


def _require_offer(manifest: Manifest, token: str | None) -> None:
    """Raises where the hub does not answer: what is here then stays in its place, as it may be of use."""
    from huggingface_hub.errors import RevisionNotFoundError

    with suppress(RevisionNotFoundError):  # rewritten history: all is fetched anew
        list_repo(manifest.repo, manifest.commit, token)


def _require_space(folder: Path, manifest: Manifest, found: dict[str, Verdict]) -> None:
    """As above, for a disk without room for what is to be fetched."""
    wrong = [file for file in manifest.files if not _is_right(found[file.name])]
    there = sum(_size(folder / file.name) for file in wrong)
    require_space(folder.parent, sum(file.num_bytes for file in wrong) - there, manifest.repo)


def is_there(folder: Path, repo: str, revision: str | None) -> bool:
    """A folder without a manifest was put there by hand: it is taken as it is."""
    manifest = read_manifest(folder)
    return is_whole(folder) and (manifest is None or manifest.is_of(repo, revision))


def bytes_there(growing: Path, files: tuple[RemoteFile, ...]) -> int:
    return sum(_size(growing / file.name) + _size(_partial(growing, file)) for file in files)


def _download(repo: str, revision: str | None, folder: Path, on_report: OnReport, token: str | None) -> None:
    on_report(Report(repo, "queued", ()))
    growing = growing_folder(folder)
    manifest = _begin(repo, revision, folder, growing, token, on_report)
    require_space(folder.parent, manifest.num_bytes - bytes_there(growing, manifest.files), repo)
    _Fetching(manifest, growing, token).run(on_report)
    _require_whole(repo, growing)
    if folder.exists():  # damaged, or of another revision
        shutil.rmtree(folder)
    os.replace(growing, folder)
    _flush_names(folder.parent)


def _require_whole(repo: str, growing: Path) -> None:
    """Every file came as the hub has it; if a load still lacks something, the repository itself is broken."""
    faults = problems(growing)
    if faults:
        hint = "Tell its owner, or choose another repository."
        raise AppError(400, "bad_checkpoint", f"{repo} is no whole model: {'; '.join(faults)}.", hint=hint)


def _begin(
    repo: str, revision: str | None, folder: Path, growing: Path, token: str | None, on_report: OnReport
) -> Manifest:
    """Go on with the commit that a broken download began with; else start with what `revision` means now."""
    from huggingface_hub.errors import RevisionNotFoundError

    damaged = read_manifest(folder)
    if damaged is not None and damaged.files and damaged.is_of(repo, revision) and not growing.exists():
        _adopt(folder, growing, verdicts(folder, damaged, on_report))
    begun = read_manifest(growing)
    if begun is not None and begun.is_of(repo, revision):
        try:
            return _write(growing, repo, revision, list_repo(repo, begun.commit, token))
        except RevisionNotFoundError:
            pass  # rewritten history: nothing can be added to what is there
    listing = list_repo(repo, revision, token)
    wanted_files(repo, listing)
    if growing.exists():
        shutil.rmtree(growing)
    growing.mkdir(parents=True)
    return _write(growing, repo, revision, listing)


def _write(growing: Path, repo: str, revision: str | None, listing: Listing) -> Manifest:
    manifest = Manifest(repo, revision, listing.commit, wanted_files(repo, listing))
    write_manifest(growing, manifest)
    return manifest


def _adopt(folder: Path, growing: Path, found: dict[str, Verdict]) -> None:
    """Take a damaged model back into the making, without the files that are not what they should be."""
    if growing.exists():
        shutil.rmtree(growing)
    for name, word in found.items():
        if not _is_right(word):  # before the folder is one whose files were checked
            (folder / name).unlink(missing_ok=True)
    os.replace(folder, growing)


def _is_right(word: Verdict) -> bool:
    return word in ("verified", "unverified")


def wanted_files(repo: str, listing: Listing) -> tuple[RemoteFile, ...]:
    """What a load needs. Raises AppError for a repository that cannot be loaded."""
    files = tuple(file for file in listing.files if _is_wanted(file.name))
    _require_loadable(repo, listing.names, [file.name for file in files])
    return files


def _is_wanted(name: str) -> bool:
    def is_any(patterns: tuple[str, ...]) -> bool:
        return any(fnmatch(name, pattern) for pattern in patterns)

    is_at_the_top = "/" not in name and "\\" not in name
    return fnmatch(name, _POOLING) or (is_at_the_top and is_any(_WANTED) and not is_any(_UNWANTED))


def _require_loadable(repo: str, names: list[str], wanted: list[str]) -> None:
    missing = [name for name in ("config.json", "tokenizer.json") if name not in wanted]
    if not any(name.endswith(".safetensors") for name in wanted):
        missing.append(".safetensors weights")
    if not missing:
        return
    kinds = {"*.gguf": "GGUF files", "*.bin": "PyTorch .bin files", "*.pt*": "PyTorch .pt files"}
    there = [words for pattern, words in kinds.items() if any(fnmatch(name, pattern) for name in names)]
    raise AppError(
        400,
        "unsupported_model",
        f"{repo} has no {', no '.join(missing)}" + (f"; it holds {' and '.join(there)}." if there else "."),
        hint="Choose a repository in GPTQ, AWQ or dense safetensors form; most 4-bit ones end in -GPTQ-Int4 or -AWQ.",
    )


# --- the files, several at once


class _Stopped(Exception):
    """Another file, or who looks on, ended the download."""


class _Fetching:
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
            if _is_right(verdict(partial, file)):
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
        while (before := _size(partial)) != file.num_bytes:
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
            tries = 0 if _size(partial) > before else tries + 1
            if tries == _TRIES_WITHOUT_A_BYTE:
                raise failure or _wrong_length(partial, file)
        partial.touch()  # a file of no bytes needs no request

    def _append(self, partial: Path, file: RemoteFile, transfer: Transfer) -> None:
        have = _size(partial)
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
        f"{file.name} should have {file.num_bytes:,} bytes; {_size(partial):,} came, {_TRIES_WITHOUT_A_BYTE} times.",
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


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _flush(path: Path) -> None:
    """A rename may reach the disk before the bytes it names; a power cut would then leave a whole name on holes."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def _flush_names(folder: Path) -> None:
    if os.name == "nt":  # which has no way to ask for it
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
