"""models.yaml -> the catalogue: read with the place of each key kept, and checked.

The project's file comes first, the user's own (in the home folder) adds to it and changes single keys. Every mistake is
reported, all at once, each with its file, line, entry and key.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml
from yaml.constructor import SafeConstructor

from app.chat.types import TOOL_FORMATS
from app.errors import AppError
from app.models.catalog import REPO, Catalog, CatalogEntry, names_of
from app.settings import CONTEXT_TOKENS, KV_CACHE_DTYPES

FORMATS = ("gptq", "awq", "compressed-tensors", "dense")  # what engine.quant reads
EMBEDDED_IDS = tuple(f"smollm2-135m-instruct{form}" for form in ("", "-dense", "-gptq", "-awq"))

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SAMPLING_RANGES = {"temperature": (0, 100), "top_p": (0.001, 1), "top_k": (0, 1_000_000)}


_ORIGINS, _OF_AN_ORIGIN = ("repo", "folder", "embedded"), ("revision", "format", "size_gb")


class _Value(NamedTuple):
    """A value of the file and where it stands ("models.yaml:12")."""

    value: Any
    place: str


_Block = dict[str, _Value]


def read_catalog(path: Path, user_path: Path | None = None) -> Catalog:
    """`path`, then `user_path` over it where that file exists. Raises AppError bad_catalog with every mistake."""
    mistakes: list[str] = []
    blocks = _read_blocks(path, mistakes)
    ours = set(blocks)
    if user_path is not None and user_path.exists():
        for entry_id, keys in _read_blocks(user_path, mistakes).items():
            blocks[entry_id] = _changed(blocks.get(entry_id, {}), keys)
    built = (_entry(entry_id, keys, mistakes, is_ours=entry_id in ours) for entry_id, keys in blocks.items())
    entries = [entry for entry in built if entry is not None]
    mistakes += _name_clashes(entries, blocks)
    if mistakes:
        raise AppError(500, "bad_catalog", "The catalogue has mistakes:\n" + "\n".join(f"  {m}" for m in mistakes))
    return Catalog(entries)


def _changed(ours: _Block, keys: _Block) -> _Block:
    """Where it comes from is one thing: a user's folder in place of our repository takes all that goes with it away."""
    if not keys.keys() & _ORIGINS:
        return ours | keys
    return {key: value for key, value in ours.items() if key not in (*_ORIGINS, *_OF_AN_ORIGIN)} | keys


# --- reading


def _read_blocks(path: Path, mistakes: list[str]) -> dict[str, _Block]:
    """id -> key -> value, unchecked. The YAML nodes are walked, as plain loading forgets lines and repeated keys."""
    try:
        root = yaml.compose(path.read_text("utf-8"), yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        mistakes.append(f"{path} cannot be read: {error}")
        return {}
    if root is None:
        return {}
    blocks: dict[str, _Block] = {}
    for entry_id, node, place in _pairs(root, path, "the file", mistakes):
        blocks[entry_id] = {"": _Value(None, place)}
        for key, value_node, key_place in _pairs(node, path, entry_id, mistakes):
            if isinstance(value_node, yaml.MappingNode):
                list(_pairs(value_node, path, f"{entry_id}: {key}", mistakes))  # for what comes twice in it
            try:
                blocks[entry_id][key] = _Value(SafeConstructor().construct_document(value_node), key_place)
            except (yaml.YAMLError, ValueError) as error:
                mistakes.append(f"{key_place}: {entry_id}: `{key}` cannot be read: {error}")
    return blocks


def _pairs(node: yaml.Node, path: Path, what: str, mistakes: list[str]) -> Iterator[tuple[str, yaml.Node, str]]:
    """(key, value node, place) of a mapping; reports a node that is none, and keys that come twice."""
    if not isinstance(node, yaml.MappingNode):
        mistakes.append(f"{path}:{node.start_mark.line + 1}: {what} must be a block of `key: value` lines")
        return
    seen = set()
    for key_node, value_node in node.value:
        place = f"{path}:{key_node.start_mark.line + 1}"
        key = str(key_node.value)
        if key in seen:
            mistakes.append(f"{place}: {what}: `{key}` is there twice")
        seen.add(key)
        yield key, value_node, place


# --- checking


def _entry(entry_id: str, block: _Block, mistakes: list[str], *, is_ours: bool) -> CatalogEntry | None:
    """is_ours: of the project's file, which tells more of a model than a user has to."""
    found_before = len(mistakes)
    own_place = block[""].place

    def report(place: str, text: str) -> None:
        mistakes.append(f"{place}: {entry_id}: {text}")

    if not ID.fullmatch(entry_id):
        report(own_place, "an id is made of letters, digits, dots, dashes and underscores")
    values: dict[str, Any] = {}
    for key, (value, place) in block.items():
        if key and key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            report(place, f"unknown key `{key}`." + (f" Did you mean `{close[0]}`?" if close else ""))
        elif key:
            try:
                values[key] = _KEYS[key].read(value)
            except (ValueError, TypeError, RuntimeError):  # the last: ~name of nobody
                report(place, f"`{key}` is {value!r}; it must be {_KEYS[key].allowed}")
    for key in ("licence", "context"):
        if is_ours and key not in block:
            report(own_place, f"`{key}` is missing")
    if len(mistakes) == found_before:
        _check_origin(entry_id, values, lambda text: report(own_place, text))
    return _build(entry_id, values) if len(mistakes) == found_before else None


def _check_origin(entry_id: str, values: dict[str, Any], report: Callable[[str], None]) -> None:
    is_embedded = values.get("embedded", False)
    if is_embedded + ("repo" in values) + ("folder" in values) != 1:
        report("exactly one of `repo` and `embedded: true` and `folder` must be there")
    if is_embedded and entry_id not in EMBEDDED_IDS:
        report(f"`embedded` is only for {', '.join(EMBEDDED_IDS)}")
    if "repo" not in values and "revision" in values:
        report("`revision` goes with `repo`")


def _build(entry_id: str, values: dict[str, Any]) -> CatalogEntry:
    return CatalogEntry(
        id=entry_id,
        repo=values.get("repo"),
        revision=values.get("revision"),
        is_embedded=values.get("embedded", False),
        folder=values.get("folder"),
        format=values.get("format"),
        size_bytes=round(values.get("size_gb", 0) * 1e9),
        licence=values.get("licence", ""),
        context_length=values.get("context"),
        sampling=MappingProxyType(values.get("sampling", {})),
        load=MappingProxyType(values.get("load", {})),
        best_from_gb=values.get("best_from_gb"),
        tool_format=values.get("tool_format"),
        reasoning=values.get("reasoning"),
        aliases=values.get("aliases", ()),
    )


def _name_clashes(entries: Sequence[CatalogEntry], blocks: dict[str, _Block]) -> Iterator[str]:
    """One name must lead to one model."""
    owners: dict[str, str] = {}
    for entry in entries:
        for name in names_of(entry):
            owner = owners.setdefault(name.casefold(), entry.id)
            if owner != entry.id:
                key = {entry.id: "", entry.repo: "repo"}.get(name, "aliases")
                yield f"{blocks[entry.id][key].place}: {entry.id}: the name `{name}` belongs to {owner} already"


class _Key(NamedTuple):
    """How a key is read (ValueError or TypeError where it cannot be), and the words that complete "it must be"."""

    read: Callable[[Any], Any]
    allowed: str


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value.strip()


def _matching(pattern: re.Pattern[str]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not pattern.fullmatch(_text(value)):
            raise ValueError
        return _text(value)

    return read


def _format(value: Any) -> str:
    if value not in FORMATS:
        raise ValueError
    return str(value)


def _tool_format(value: Any) -> str:
    if value not in TOOL_FORMATS:
        raise ValueError
    return str(value)


def _number(value: Any, low: float, high: float) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError
    return value


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _context(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError
    return int(_number(value, 1, 1_000_000_000))


def _sampling(value: Any) -> dict[str, float | int]:
    if not isinstance(value, dict) or set(value) - set(_SAMPLING_RANGES):
        raise ValueError
    return {name: _number(number, *_SAMPLING_RANGES[name]) for name, number in value.items()}


def _load(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) - {"max_model_len", "kv_cache_dtype"}:
        raise ValueError
    if "max_model_len" in value and not isinstance(_number(value["max_model_len"], *CONTEXT_TOKENS), int):
        raise ValueError
    if value.get("kv_cache_dtype", "auto") not in KV_CACHE_DTYPES:
        raise ValueError
    return value


def _tags(value: Any) -> tuple[str, str]:
    if not isinstance(value, list):
        raise ValueError
    opening, closing = value
    return _text(opening), _text(closing)


def _folder(value: Any) -> Path:
    path = Path(_text(value)).expanduser()
    if not path.is_absolute():
        raise ValueError
    return path


def _aliases(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError
    return tuple(_matching(ID)(alias) for alias in value)


_KEYS: Mapping[str, _Key] = {
    "repo": _Key(_matching(REPO), "a Hugging Face repository, owner/name"),
    "revision": _Key(_text, "a branch, tag or commit, as text"),
    "embedded": _Key(_switch, "true or false"),
    "folder": _Key(_folder, "a folder's whole path; ~ is your home"),
    "format": _Key(_format, "one of " + ", ".join(FORMATS)),
    "size_gb": _Key(lambda value: _number(value, 0.001, 10_000), "a number of GB"),
    "licence": _Key(_text, "a text"),
    "context": _Key(_context, "a whole number of tokens, 1 or more"),
    "sampling": _Key(
        _sampling,
        "a block of " + ", ".join(f"{name} ({low} to {high})" for name, (low, high) in _SAMPLING_RANGES.items()),
    ),
    "load": _Key(
        _load,
        f"a block of max_model_len ({CONTEXT_TOKENS[0]} to {CONTEXT_TOKENS[1]} tokens) and kv_cache_dtype (one of "
        + ", ".join(KV_CACHE_DTYPES)
        + ")",
    ),
    "best_from_gb": _Key(lambda value: _number(value, 0, 10_000), "a number of GB"),
    "tool_format": _Key(_tool_format, "one of " + ", ".join(TOOL_FORMATS)),
    "reasoning": _Key(_tags, "a list of the opening and the closing tag"),
    "aliases": _Key(_aliases, "a list of names without slashes or spaces"),
}
