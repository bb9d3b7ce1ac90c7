"""Where the files of a model's folder came from, and what each must be: kept in the folder, read by who checks it. And
where a download lies until there is such a folder.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from app.models.hub.repository import RemoteFile

_FILE = ".fireside-origin.json"
_READ_BYTES = 1 << 22

Verdict = Literal["verified", "unverified", "damaged", "missing"]
OnRead = Callable[[int], None]


def _unheard(num_bytes: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Manifest:
    """commit: what `revision` meant when the download began. files: () in folders of earlier versions.

    Of what was made here and not downloaded, `repo` and `commit` are empty.
    """

    repo: str
    revision: str | None
    commit: str
    files: tuple[RemoteFile, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def is_of(self, repo: str, revision: str | None) -> bool:
        return (self.repo, self.revision) == (repo, revision)


def read_manifest(folder: Path) -> Manifest | None:
    try:
        found: dict[str, Any] = json.loads((folder / _FILE).read_text("utf-8"))
        files = tuple(RemoteFile(*file) for file in found.get("files", ()))
        return Manifest(found["repo"], found["revision"], found["commit"], files)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    found = {"repo": manifest.repo, "revision": manifest.revision, "commit": manifest.commit, "files": manifest.files}
    write_durably(folder / _FILE, json.dumps(found))


def manifest_of(folder: Path) -> Manifest:
    """Of files that were made here: what each is now."""
    paths = sorted(filter(Path.is_file, folder.rglob("*")))
    files = (
        RemoteFile(path.relative_to(folder).as_posix(), path.stat().st_size, _sha256(path), None) for path in paths
    )
    return Manifest("", None, "", tuple(files))


def growing_folder(folder: Path) -> Path:
    """Where a download of `folder` lies until it is whole."""
    return folder.with_name(f".{folder.name}.download")


def record_file(models_dir: Path, name: str) -> Path:
    """Where the state of a download is kept until it is ready."""
    return models_dir / f".{name}.download.json"


def write_durably(path: Path, text: str) -> None:
    """Whole or not at all, also over a power cut."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def verdict(path: Path, file: RemoteFile, on_read: OnRead = _unheard) -> Verdict:
    """By the hub's own sum: sha256 for large files, git's blob id (sha1 over header and bytes) for others; or by the
    sha256 taken when the file was made here.

    A file whose sum nobody told is "unverified", however right its length is; never "verified".
    on_read  is told of bytes as they are read, many times a second; what it raises ends the reading
    """
    if not path.is_file():
        return "missing"
    if path.stat().st_size != file.num_bytes:
        return "damaged"
    if not file.is_known_by_hash:
        return "unverified"
    return "verified" if found_hash(path, file, on_read) == (file.sha256 or file.blob_id) else "damaged"


def is_right(word: Verdict) -> bool:
    """Whether a file can stay: it is what it should be, as far as anybody can tell."""
    return word in ("verified", "unverified")


def found_hash(path: Path, file: RemoteFile, on_read: OnRead = _unheard) -> str:
    """Of what lies there, by the kind of sum that the hub has of this file."""
    header = b"blob %d\0" % path.stat().st_size
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(header, usedforsecurity=False)
    for piece in _pieces(path):
        digest.update(piece)
        on_read(len(piece))
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as opened:
        while piece := opened.read(_READ_BYTES):
            yield piece
