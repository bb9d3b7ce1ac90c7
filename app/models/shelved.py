"""The shelf as people see it: each model with what of it lies here and whether it fits, the best one to begin with, and
where the disk goes. Reads the disk, asks no hub.
"""

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.models.catalog import CatalogEntry
from app.models.hub.downloads import Download
from app.models.hub.search import fit_word
from app.models.machine import Memory
from app.models.shelf import ModelShelf, ShelfState
from app.models.store import bytes_on_disk, file_bytes

_GB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelved:
    """
    origin      a repository, a folder, or "" for what Fireside makes itself
    is_own      the user's models.yaml has it, or changes it
    state       ready, damaged, a download's state, or "" where nothing of it is here
    size_bytes  of what lies here, else of the download; 0 where it is not known
    fit         fits | tight | too large | unknown, by its size: `fit.py` knows exactly
    defaults    its own: those of sampling, and those of its load
    """

    id: str
    origin: str
    is_own: bool
    is_embedded: bool
    state: str
    size_bytes: int
    fit: str
    format: str | None = None
    licence: str = ""
    context_length: int | None = None
    thinks: bool = False
    aliases: tuple[str, ...] = ()
    defaults: dict[str, Any]


def shelved(shelf: ModelShelf, downloads: Iterable[Download], machine: Memory) -> list[Shelved]:
    """The catalogue, then what is or was on its way here beside it."""
    by_folder = {found.name: found for found in downloads}
    own = shelf.own_ids()
    known = []
    for entry in shelf.entries():
        download = by_folder.pop(shelf.folder(entry).name, None)
        known.append(_shelved(entry, shelf, download, own, machine))
    return [*known, *(_coming(found, machine) for found in by_folder.values())]


def _shelved(
    entry: CatalogEntry, shelf: ModelShelf, download: Download | None, own: frozenset[str], machine: Memory
) -> Shelved:
    here = shelf.state(entry)
    size_bytes = here.bytes_on_disk if here.is_whole else entry.size_bytes
    return Shelved(
        id=entry.id,
        origin=entry.repo or str(entry.folder or ""),
        is_own=entry.id in own,
        is_embedded=entry.is_embedded,
        state=state_word(here, download),
        size_bytes=size_bytes,
        fit=fit_word(size_bytes, machine) if size_bytes else "unknown",
        format=entry.format,
        licence=entry.licence,
        context_length=entry.context_length,
        thinks=entry.reasoning is not None,
        aliases=entry.aliases,
        defaults=dict(entry.sampling) | dict(entry.load),
    )


def state_word(here: ShelfState, download: Download | None) -> str:
    """ready, damaged, a download's state, or "" where nothing of the model is here, or nothing of its revision."""
    if here.is_whole:
        return "ready"
    if download is not None and download.state != "ready":
        return download.state
    return "damaged" if here.bytes_on_disk and not here.is_outdated else ""


def _coming(found: Download, machine: Memory) -> Shelved:
    size_bytes = found.report.num_bytes if found.report else 0
    return Shelved(
        id=found.repo,
        origin=found.repo,
        is_own=False,
        is_embedded=False,
        state=found.state,
        size_bytes=size_bytes,
        fit=fit_word(size_bytes, machine) if size_bytes else "unknown",
        defaults={},
    )


def best(entries: Sequence[CatalogEntry], machine: Memory) -> CatalogEntry | None:
    """The one of the catalogue to begin with: `best_from_gb` says from what memory on each is. On a CPU it is the
    speed that counts, so that only the smallest come into question."""
    room = machine.total / _GB if machine.kind == "cuda" else min(machine.free / _GB, _MOST_GB_ON_A_CPU)
    found = [entry for entry in entries if entry.best_from_gb is not None and entry.best_from_gb <= room]
    return max(found, key=lambda entry: entry.best_from_gb or 0, default=None)


_MOST_GB_ON_A_CPU = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """
    models    (id or folder's name, bytes), the largest first
    other     (what, bytes): all else in the home folder: conversations, settings, logs, cache, working
    """

    home: str
    total_bytes: int
    free_bytes: int
    models: tuple[tuple[str, int], ...]
    other: tuple[tuple[str, int], ...]


def disk(home: Path, shelf: ModelShelf) -> Disk:
    models_folder = home / "models"
    ids = {shelf.folder(entry): entry.id for entry in shelf.entries()}
    models = [(_model_of(path, ids), bytes_in(path)) for path in _inside(models_folder)]
    elsewhere = [(_kind_of(path.name), bytes_in(path)) for path in _inside(home) if path != models_folder]
    usage = shutil.disk_usage(home)
    return Disk(
        home=str(home),
        total_bytes=usage.total,
        free_bytes=usage.free,
        models=_largest_first(models),
        other=_largest_first(elsewhere),
    )


_KINDS = (  # how a name in the home folder begins
    ("conversations", ("history.db",)),
    ("settings", ("settings.yaml", "models.yaml", "api-keys", "hub-token", "tls")),
    ("logs", ("logs", "engine-")),
    ("cache", ("cache",)),
)


def _kind_of(name: str) -> str:
    return next((kind for kind, begins in _KINDS if name.lstrip(".").startswith(begins)), "working")


def _model_of(path: Path, ids: Mapping[Path, str]) -> str:
    """Of a model's folder, or of what lies beside it while it comes (".NAME.download")."""
    name = path.name
    for ending in (".download.json", ".download", ".lock"):
        if name.startswith(".") and name.endswith(ending):
            name = name[1:].removesuffix(ending)
    return ids.get(path.with_name(name), name)


def bytes_in(path: Path) -> int:
    return bytes_on_disk(path) if path.is_dir() else file_bytes(path)


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _largest_first(found: list[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """One of each name, with all that goes by it."""
    sums: Counter[str] = Counter()
    for name, num_bytes in found:
        sums[name] += num_bytes
    return tuple(pair for pair in sums.most_common() if pair[1])
