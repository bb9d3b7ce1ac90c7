"""The user's own models.yaml: a block added at its end, or taken out by its lines; all else in it stays as it was."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from app.models.hub.manifest import write_durably


def id_for(name: str) -> str:
    """An id out of a repository's or folder's name."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.rpartition("/")[2].lower()).strip("-._") or "model"


def add_block(path: Path, entry_id: str, keys: Mapping[str, Any]) -> None:
    """At the end of the file, which is made where there is none."""
    block = yaml.safe_dump({entry_id: dict(keys)}, sort_keys=False, allow_unicode=True, default_flow_style=False)
    with _held(path):
        before = (
            path.read_text("utf-8") if path.exists() else "# Your own models, written as in Fireside's models.yaml.\n"
        )
        write_durably(path, f"{before.rstrip()}\n\n{block}")


def change_block(path: Path, entry_id: str, changes: Mapping[str, Any]) -> None:
    """Set keys of a block, or take out those whose value is None; the block comes and goes with its first and last."""
    found = yaml.safe_load(path.read_text("utf-8")) if path.exists() else None
    before = (found or {}).get(entry_id) or {}
    keys = {key: value for key, value in {**before, **changes}.items() if value is not None}
    remove_block(path, entry_id)
    if keys:
        add_block(path, entry_id, keys)


def ids_in(path: Path) -> frozenset[str]:
    """Of the models that the file has, or changes."""
    try:
        return frozenset(entry_id for entry_id, _, _ in _pairs(path.read_text("utf-8")))
    except (OSError, ValueError, yaml.YAMLError):
        return frozenset()


def remove_block(path: Path, entry_id: str) -> bool:
    """Whether there was one."""
    if not path.exists():
        return False
    with _held(path):
        text = path.read_text("utf-8")
        found = next((pair for pair in _pairs(text) if pair[0] == entry_id), None)
        if found is None:
            return False
        _, first, last = found
        lines = text.splitlines(keepends=True)
        write_durably(path, "".join(lines[:first] + lines[last:]).rstrip() + "\n")
    return True


def _pairs(text: str) -> Iterator[tuple[str, int, int]]:
    """(id, its first line, the line after its last) of each block."""
    root = yaml.compose(text, yaml.SafeLoader)
    if isinstance(root, yaml.MappingNode):
        for key, value in root.value:
            yield str(key.value), key.start_mark.line, value.end_mark.line


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Two processes do not write at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        yield
