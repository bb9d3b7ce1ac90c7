"""The user's own models.yaml: a block added at its end, or taken out by its lines; all else in it stays as it was."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from filelock import FileLock

from app.models.hub.manifest import write_durably


def id_for(name: str) -> str:
    """An id out of a repository's or folder's name."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.rpartition("/")[2].lower()).strip("-._") or "model"


def add_block(path: Path, entry_id: str, keys: Mapping[str, Any]) -> None:
    """At the end of the file, which is made where there is none."""
    put_key(path, entry_id, dict(keys), "# Your own models, written as in Fireside's models.yaml.\n")


def put_key(path: Path, key: str, value: Any, heading: str) -> None:
    """A key of the outermost level, in its place where it is there already; `heading` begins a new file."""
    lines = yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, default_flow_style=False)
    with _held(path):
        before = path.read_text("utf-8") if path.exists() else heading
        found = _place(before, key)
        if found is None:
            write_durably(path, f"{before.rstrip()}\n\n{lines}")
        else:
            write_durably(path, found.before + lines + found.after)


def change_block(path: Path, entry_id: str, changes: Mapping[str, Any]) -> None:
    """Set keys of a block, or take out those whose value is None; the block comes and goes with its first and last."""
    found = yaml.safe_load(path.read_text("utf-8")) if path.exists() else None
    before = (found or {}).get(entry_id) or {}
    keys = {key: value for key, value in {**before, **changes}.items() if value is not None}
    if keys:
        add_block(path, entry_id, keys)
    else:
        remove_block(path, entry_id)


def ids_in(path: Path) -> frozenset[str]:
    """Of the models that the file has, or changes."""
    try:
        return frozenset(entry_id for entry_id, _, _ in _pairs(path.read_text("utf-8")))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return frozenset()


def remove_block(path: Path, entry_id: str) -> bool:
    """Whether there was one."""
    if not path.exists():
        return False
    with _held(path):
        found = _place(path.read_text("utf-8"), entry_id)
        if found is None:
            return False
        write_durably(path, f"{(found.before + found.after).rstrip()}\n")
    return True


class _Place(NamedTuple):
    """The text around a key and its value."""

    before: str
    after: str


def _place(text: str, key: str) -> _Place | None:
    lines = text.splitlines(keepends=True)
    for name, first, last in _pairs(text):
        if name == key:
            while last > first + 1 and lines[last - 1].lstrip()[:1] in ("", "#"):
                last -= 1  # what is said below it belongs to what comes then
            return _Place("".join(lines[:first]), "".join(lines[last:]))
    return None


def _pairs(text: str) -> Iterator[tuple[str, int, int]]:
    """(id, its first line, the line after its last) of each block."""
    root = yaml.compose(text, yaml.SafeLoader)
    if isinstance(root, yaml.MappingNode):
        for key, value in root.value:
            yield str(key.value), key.start_mark.line, value.end_mark.line + (value.end_mark.column > 0)


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Two processes do not write at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        yield
