"""A model before its weights are read: config.json and the headers of its safetensors files, from a folder or, by HTTP
range, from the hub. Some hundred KB stand for any number of GB.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from app.errors import AppError, from_engine_error
from app.models.hub.repository import hub_errors, list_repo, opened
from engine.errors import EngineError
from engine.model.architectures import read_spec
from engine.model.spec import ModelSpec
from engine.quant.stated import FILES_BESIDE, Stated, config_of, stated

_INDEX = "model.safetensors.index.json"
_FIRST_BYTES = 1 << 18  # holds most headers whole
_LARGEST_HEADER = 100_000_000  # the format's own limit
_ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_AT_ONCE = 4


class StoredType(NamedTuple):
    itemsize: int


class _Files(NamedTuple):
    """A folder or a repository: the names there, and a way to read a part of one (all where the last is None)."""

    names: list[str]
    read: Callable[[str, int, int | None], bytes]


@dataclass(frozen=True, slots=True)
class Outline:
    """The headers' face is that of `engine.weights.held.Headers`.

    stated   of the quantisation; None for a dense model
    tensors  name -> shape and type as stored
    """

    name: str
    spec: ModelSpec
    stated: Stated | None
    tensors: Mapping[str, tuple[tuple[int, ...], StoredType]]

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    def header(self, name: str) -> tuple[tuple[int, ...], StoredType]:
        return self.tensors[name]


def outline_of_folder(folder: Path) -> Outline:
    """Raises AppError for what is no model, or none that can be loaded."""
    from app.models.belongs import strangers

    def read(name: str, first: int, last: int | None) -> bytes:
        with (folder / name).open("rb") as file:
            file.seek(first)
            return file.read() if last is None else file.read(last + 1 - first)

    found = _outline(folder.name, _Files([path.name for path in folder.iterdir() if path.is_file()], read))
    if faults := strangers(found):
        raise _broken(folder.name, f"its files do not belong together: {faults}")
    return found


def outline_of_repo(repo: str, revision: str | None = None, token: str | None = None) -> Outline:
    """Raises as `outline_of_folder`, and what the hub refuses."""
    with hub_errors(repo):
        listing = list_repo(repo, revision, token)

        def read(name: str, first: int, last: int | None) -> bytes:
            with opened(repo, listing.commit, name, f"{first}-{'' if last is None else last}", token) as response:
                skip = first if response.status_code != 206 else 0  # a server that ignored the range
                return _take(response.iter_bytes(), skip, None if last is None else last + 1 - first)

        return _outline(repo, _Files([name for name in listing.names if "/" not in name], read))


def _take(pieces: Any, skip: int, count: int | None) -> bytes:
    """`count` bytes after the first `skip`; no more is read than that."""
    taken = b""
    for piece in pieces:
        taken += piece
        if count is not None and len(taken) >= skip + count:
            break
    return taken[skip:] if count is None else taken[skip : skip + count]


def _outline(name: str, files: _Files) -> Outline:
    config = _json(name, files, "config.json")
    try:
        spec, quantisation = read_spec(config), _stated(name, files, config)
    except EngineError as error:
        raise from_engine_error(error) from error
    shards = _shards(name, files)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        headers = list(pool.map(lambda shard: _header(name, files, shard), shards))
    return Outline(name, spec, quantisation, {key: tensor for header in headers for key, tensor in header.items()})


def _stated(name: str, files: _Files, config: dict[str, Any]) -> Stated | None:
    beside = next((file for file in FILES_BESIDE if file in files.names), None)
    found = config_of(config) or (beside and _json(name, files, beside))
    return stated(found, name) if found else None


def _shards(name: str, files: _Files) -> list[str]:
    """As a load chooses them: by the index, else the one file, else all."""
    if _INDEX in files.names:
        try:
            found = sorted({str(shard) for shard in _json(name, files, _INDEX)["weight_map"].values()})
        except (KeyError, AttributeError) as error:
            raise _broken(name, f"{_INDEX} has no weight_map") from error
    elif "model.safetensors" in files.names:
        found = ["model.safetensors"]
    else:
        found = sorted(file for file in files.names if fnmatch(file, "*.safetensors"))
    missing = [shard for shard in found if shard not in files.names]
    if missing or not found:
        raise _broken(name, f"{', '.join(missing)} is missing" if missing else "it has no .safetensors files")
    return found


def _header(name: str, files: _Files, shard: str) -> dict[str, tuple[tuple[int, ...], StoredType]]:
    """8 bytes of length, then JSON: name -> dtype, shape, offsets."""
    begin = files.read(shard, 0, _FIRST_BYTES - 1)
    length = int.from_bytes(begin[:8], "little")
    if len(begin) < 8 or length > _LARGEST_HEADER:
        raise _broken(name, f"{shard} has no header that can be read")
    if len(begin) < 8 + length:
        begin += files.read(shard, len(begin), 7 + length)
    try:
        found = json.loads(begin[8 : 8 + length])
        return {
            key: (tuple(tensor["shape"]), StoredType(_ITEMSIZE[tensor["dtype"]]))
            for key, tensor in found.items()
            if key != "__metadata__"
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _broken(name, f"the header of {shard} cannot be read ({type(error).__name__}: {error})") from error


def _json(name: str, files: _Files, file: str) -> dict[str, Any]:
    if file not in files.names:
        raise _broken(name, f"it has no {file}")
    try:
        found = json.loads(files.read(file, 0, None))
    except ValueError as error:
        raise _broken(name, f"{file} is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise _broken(name, f"{file} is no JSON object")
    return found


def _broken(name: str, why: str) -> AppError:
    return AppError(400, "bad_checkpoint", f"{name} is no model that can be loaded: {why}.", param="model")
