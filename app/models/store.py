"""The models folder: which models are whole, and how large they are. Reads only; `embedded` and `hub` write.

Both build under a hidden name and rename at the end, so that what is looked for here is damage that came later, or a
folder that was copied by hand.
"""

import json
import re
import stat
from functools import lru_cache
from pathlib import Path
from typing import Any

_INDEX = "model.safetensors.index.json"
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)  # what JSON of another shape leads to


def is_whole(folder: Path) -> bool:
    """Everything a load needs is there: config and tokenizer that can be read, every shard at full length."""
    return not problems(folder)


def problems(folder: Path) -> list[str]:
    """What keeps this folder from being a model, in words; empty for a whole one."""
    if not folder.is_dir():
        return [f"{folder} is not a folder"]
    found = (_json_problem(folder / name) for name in ("config.json", "tokenizer.json"))
    return [problem for problem in found if problem] + _weight_problems(folder)


def bytes_on_disk(folder: Path) -> int:
    """Of all files in it; one that goes away meanwhile counts nothing."""
    return sum(map(file_bytes, folder.rglob("*")))


def file_bytes(path: Path) -> int:
    """0 for what is no file, or is gone."""
    try:
        found = path.stat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _json_problem(path: Path) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    try:
        found = path.stat()
        is_object = _is_json_object(path, found.st_mtime_ns, found.st_size)
    except _UNREADABLE:
        is_object = False
    return None if is_object else f"{path.name} is no JSON object that can be read"


@lru_cache(maxsize=256)
def _is_json_object(path: Path, mtime_ns: int, num_bytes: int) -> bool:
    """Kept for as long as the file stays the same: a large tokenizer takes a tenth of a second, lists ask often."""
    return isinstance(json.loads(path.read_bytes()), dict)


def _weight_problems(folder: Path) -> list[str]:
    index = folder / _INDEX
    names = _shards_of(index) if index.is_file() else _shards_by_name(folder)
    if names is None:
        return [f"{_INDEX} cannot be read"]
    if not names:
        is_gguf = any(folder.glob("*.gguf"))
        return ["no .safetensors file is there" + (", only GGUF, which Fireside does not read" if is_gguf else "")]
    return [problem for name in sorted(names) if (problem := _file_problem(folder / name))]


def _shards_of(index: Path) -> set[str] | None:
    """The files that an index names; None where it is no index."""
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        return {str(name) for name in weight_map.values()}
    except _UNREADABLE:
        return None


def _shards_by_name(folder: Path) -> set[str]:
    """The files that lie there, and the siblings they count ("-00001-of-00003")."""
    names = {path.name for path in folder.glob("*.safetensors")}
    for name in tuple(names):
        if numbered := re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.safetensors", name):
            stem, count = numbered.groups()
            names |= {f"{stem}-{number:05d}-of-{count}.safetensors" for number in range(1, int(count) + 1)}
    return names


_LFS_POINTER = b"version https://git-lfs.github.com/"


def _file_problem(path: Path) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    if _is_lfs_pointer(path):
        return f"{path.name} is Git LFS's note of a file and not the file; run `git lfs pull` there"
    try:
        expected, found = _expected_bytes(path), path.stat().st_size
    except _UNREADABLE:
        return f"{path.name} has no header that can be read"
    if expected == found:
        return None
    return f"{path.name} has {found:,} bytes; its header says {expected:,}"


def _is_lfs_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def _expected_bytes(path: Path) -> int:
    """A safetensors file tells its own length: 8 bytes, then a JSON header of that length, then the furthest tensor."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > path.stat().st_size:
            return 8 + header_bytes
        header: dict[str, Any] = json.loads(file.read(header_bytes) or b"{}")
    ends: list[int] = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + header_bytes + max(ends, default=0)
