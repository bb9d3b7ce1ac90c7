"""A model from Hugging Face into the models folder: listed, measured, resumed where it broke off, verified, then named.

huggingface_hub finds the files, the token and the endpoint (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE hold). The bytes are
fetched here, since its snapshot_download (2.4) begins a broken shard of several GB anew and does not hash what came.
A download grows in a hidden folder and takes its name when every file is there, so that a half model is never seen.
"""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from app.errors import AppError
from app.models.making import Progress, require_space, sole_maker
from app.models.store import is_whole, problems

_WANTED = ("*.safetensors", "*.json", "*.jinja", "LICENSE*")
_UNWANTED = ("consolidated*",)  # Mistral's own copy of weights that model*.safetensors holds too
_CHUNK_BYTES = 1 << 18
_TRIES_WITHOUT_A_BYTE = 5

OnBytes = Callable[[int], None]

_ORIGIN_FILE = ".fireside-origin.json"


class Origin(NamedTuple):
    """Where the files of a folder came from; `commit` is what `revision` meant when the download began."""

    repo: str
    revision: str | None
    commit: str


class RemoteFile(NamedTuple):
    """sha256 is known for large files (LFS); git's blob id for the others."""

    name: str
    num_bytes: int
    sha256: str | None
    blob_id: str | None


def fetch(repo: str, revision: str | None, folder: Path, on_progress: Progress) -> Path:
    """The folder of the whole model; asks the network only where it is not there, or came from another revision.

    Raises   AppError: no such repository, a gated one, no network, nothing that can be loaded, no space, a wrong hash
    """
    if _is_there(folder, repo, revision):
        return folder
    with sole_maker(folder.parent, folder.name, on_progress), _hub_errors(repo, folder):
        if not _is_there(folder, repo, revision):
            _download(repo, revision, folder, on_progress)
    return folder


def _is_there(folder: Path, repo: str, revision: str | None) -> bool:
    """A folder without an origin was put there by hand: it is taken as it is."""
    origin = _read_origin(folder)
    return is_whole(folder) and (origin is None or origin[:2] == (repo, revision))


def _download(repo: str, revision: str | None, folder: Path, on_progress: Progress) -> None:
    on_progress(f"Asking for {repo}", None)
    growing = folder.with_name(f".{folder.name}.download")
    origin, files = _begin(repo, revision, growing)
    total = sum(file.num_bytes for file in files)
    stage = f"Downloading {repo} ({total / 1e9:.2f} GB)"
    require_space(folder.parent, total - _bytes_there(growing, files), repo)
    finished_bytes = 0
    for file in files:

        def on_bytes(num_bytes: int, before: int = finished_bytes) -> None:
            on_progress(stage, (before + num_bytes) / total)

        _fetch_file(origin, file, growing, on_bytes)
        finished_bytes += file.num_bytes
    _require_whole(repo, growing)
    if folder.exists():  # damaged, or of another revision
        shutil.rmtree(folder)
    os.replace(growing, folder)


def _require_whole(repo: str, growing: Path) -> None:
    """Every file came as the hub has it; if a load still lacks something, the repository itself is broken."""
    faults = problems(growing)
    if faults:
        hint = "Tell its owner, or choose another repository."
        raise AppError(400, "bad_checkpoint", f"{repo} is no whole model: {'; '.join(faults)}.", hint=hint)


def _begin(repo: str, revision: str | None, growing: Path) -> tuple[Origin, list[RemoteFile]]:
    """Go on with the commit that a broken download began with; else start with what `revision` means now."""
    from huggingface_hub.errors import RevisionNotFoundError

    origin = _read_origin(growing)
    if origin is not None and origin[:2] == (repo, revision):
        try:
            return origin, _list(repo, origin.commit)[1]
        except RevisionNotFoundError:
            pass  # rewritten history: nothing can be added to what is there
    commit, files = _list(repo, revision)
    if growing.exists():
        shutil.rmtree(growing)
    growing.mkdir(parents=True)
    origin = Origin(repo, revision, commit)
    (growing / _ORIGIN_FILE).write_text(json.dumps(origin._asdict()), encoding="utf-8")
    return origin, files


def _list(repo: str, revision: str | None) -> tuple[str, list[RemoteFile]]:
    """(commit, the files that a load needs)."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    siblings = info.siblings or []
    files = [
        RemoteFile(found.rfilename, found.size or 0, found.lfs.sha256 if found.lfs else None, found.blob_id)
        for found in siblings
        if _is_wanted(found.rfilename)
    ]
    _require_loadable(repo, [found.rfilename for found in siblings], [file.name for file in files])
    assert info.sha is not None, "the hub names the commit of every model_info answer"
    return info.sha, files


def _is_wanted(name: str) -> bool:
    def is_any(patterns: tuple[str, ...]) -> bool:
        return any(fnmatch(name, pattern) for pattern in patterns)

    return "/" not in name and "\\" not in name and is_any(_WANTED) and not is_any(_UNWANTED)


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


# --- one file


def _fetch_file(origin: Origin, file: RemoteFile, folder: Path, on_bytes: OnBytes) -> None:
    path = folder / file.name
    if path.exists():  # renamed from .partial after its check, so it is right
        on_bytes(file.num_bytes)
        return
    partial = folder / f"{file.name}.partial"
    _fill(partial, origin, file, on_bytes)
    _check(partial, file)
    os.replace(partial, path)


def _fill(partial: Path, origin: Origin, file: RemoteFile, on_bytes: OnBytes) -> None:
    """Append to `partial` until it has the file's length. A line or server that breaks is asked again, from there."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    tries = 0
    while (before := _size(partial)) != file.num_bytes:
        on_bytes(before)
        time.sleep(tries)
        failure: Exception | None = None
        try:
            _append(partial, origin, file, on_bytes)
        except httpx2.TransportError as error:
            failure = error
        except HfHubHTTPError as error:
            if error.response.status_code < 500:
                raise
            failure = error
        tries = 0 if _size(partial) > before else tries + 1
        if tries == _TRIES_WITHOUT_A_BYTE:
            raise failure or _wrong_length(partial, file)
    partial.touch()  # a file of no bytes needs no request


def _wrong_length(partial: Path, file: RemoteFile) -> AppError:
    return AppError(
        502,
        "download_failed",
        f"{file.name} should have {file.num_bytes:,} bytes; {_size(partial):,} came, {_TRIES_WITHOUT_A_BYTE} times.",
        hint="Check the mirror or proxy in between, and start again.",
    )


def _append(partial: Path, origin: Origin, file: RemoteFile, on_bytes: OnBytes) -> None:
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    have = _size(partial)
    if have > file.num_bytes:
        partial.unlink()
        have = 0
    # Compressed bytes could not be counted, nor taken up in the middle.
    headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={have}-"}
    url = hf_hub_url(origin.repo, file.name, revision=origin.commit)
    with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
        hf_raise_for_status(response)
        is_from_start = response.status_code != 206
        with partial.open("wb" if is_from_start else "ab") as out:
            have = 0 if is_from_start else have
            for chunk in response.iter_bytes(_CHUNK_BYTES):
                out.write(chunk)
                have += len(chunk)
                on_bytes(min(have, file.num_bytes))


def _check(path: Path, file: RemoteFile) -> None:
    """Against the hub's own sum: sha256 for large files, git's blob id (sha1 over header and bytes) for others."""
    expected = file.sha256 or file.blob_id
    found = _sha256(path) if file.sha256 else _git_blob_id(path)
    if expected is None or found == expected:
        return
    path.unlink()
    raise AppError(
        502,
        "download_corrupt",
        f"{file.name} did not arrive as it was sent: its hash is {found}, expected {expected}.",
        hint="Start again: this file is fetched anew, the others are kept.",
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _git_blob_id(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _bytes_there(folder: Path, files: list[RemoteFile]) -> int:
    return sum(_size(folder / file.name) + _size(folder / f"{file.name}.partial") for file in files)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read_origin(folder: Path) -> Origin | None:
    try:
        return Origin(**json.loads((folder / _ORIGIN_FILE).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


# --- what the hub says when it does not give


@contextmanager
def _hub_errors(repo: str, folder: Path) -> Iterator[None]:
    """Every failure of the hub or the disk becomes an AppError with the next step."""
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{repo}"
    again = "Start again: the download goes on where it stopped."
    try:
        yield
    except GatedRepoError as error:
        hint = f"Accept its terms at {page}, make a token there, and give it with `hf auth login` or HF_TOKEN."
        raise AppError(
            401, "gated_model", f"{repo} is given only to people who accepted its terms.", hint=hint
        ) from error
    except RepositoryNotFoundError as error:
        hint = "Check the spelling (owner/name). A private one needs a token: `hf auth login` or HF_TOKEN."
        raise AppError(404, "model_not_found", f"{page} does not exist, or is private.", hint=hint) from error
    except RevisionNotFoundError as error:
        hint = "Correct `revision` in models.yaml, or leave it out."
        raise AppError(404, "model_not_found", f"{page} has no such revision.", hint=hint) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise AppError(502, "download_failed", f"{page} answered with HTTP {status}.", hint=again) from error
    except OfflineModeIsEnabled as error:
        hint = f"Unset HF_HUB_OFFLINE, or put the model's files into {folder}."
        raise AppError(503, "download_failed", f"{repo} is not here, and HF_HUB_OFFLINE is set.", hint=hint) from error
    except httpx2.TransportError as error:
        what = f"{constants.ENDPOINT} could not be reached ({type(error).__name__}: {error})."
        hint = f"Check the network, or HF_ENDPOINT where you use a mirror. {again}"
        raise AppError(503, "download_failed", what, hint=hint) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise AppError(507, "disk_full", f"The disk of {folder} is full.", hint=f"Free some space. {again}") from error
