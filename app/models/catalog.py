"""models.yaml -> CatalogEntry: which models there are, by what names they go, and what must be known before a load.

The project's file comes first, the user's own (in the home folder) adds to it and changes single keys. Every mistake is
reported, all at once, each with its file, line, entry and key.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml
from yaml.constructor import SafeConstructor

from app.chat.types import TOOL_FORMATS
from app.errors import AppError
from app.settings import KV_CACHE_DTYPES

FORMATS = ("gptq", "awq", "compressed-tensors", "dense")  # what engine.quant reads
_OTHER_NAME = "Choose another one for --model-alias."
EMBEDDED_IDS = tuple(f"smollm2-135m-instruct{form}" for form in ("", "-dense", "-gptq", "-awq"))

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_SAMPLING_RANGES = {"temperature": (0, 100), "top_p": (0.001, 1), "top_k": (0, 1_000_000)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One model that can be named. Exactly one of `repo`, `is_embedded` and `folder` says where it comes from.

    format          None where the files have not been looked at (a repository or folder outside the catalogue)
    size_bytes      of the download; 0 where it is not known
    context_length  tokens that the model was trained for; None where it is not known
    sampling        defaults where a request says nothing, before the model's own: temperature, top_p, top_k
    load            how it is loaded where the settings would have it otherwise: max_model_len, kv_cache_dtype
    best_from_gb    of memory, from which on it is the model to begin with; None for the many that are not
    tool_format     name of the format in which it writes tool calls; None leaves it to its chat template
    reasoning       the tags that open and close its thinking
    """

    id: str
    repo: str | None = None
    revision: str | None = None
    is_embedded: bool = False
    folder: Path | None = None
    format: str | None = None
    size_bytes: int = 0
    licence: str = ""
    context_length: int | None = None
    sampling: Mapping[str, float | int] = field(default_factory=lambda: MappingProxyType({}))
    load: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    best_from_gb: float | None = None
    tool_format: str | None = None
    reasoning: tuple[str, str] | None = None
    aliases: tuple[str, ...] = ()


class Catalog:
    """The entries of one or two models.yaml files, and the names that lead to them.

    elsewhere   names of models that no file knows (a repository, a folder)
    """

    def __init__(
        self, entries: Sequence[CatalogEntry], elsewhere: Mapping[str, CatalogEntry] = MappingProxyType({})
    ) -> None:
        self.entries = tuple(entries)
        self._elsewhere = dict(elsewhere)
        self._by_name = {name.casefold(): entry for entry in self.entries for name in _names(entry)}
        self._by_name |= {name.casefold(): entry for name, entry in elsewhere.items()}

    @classmethod
    def load(cls, path: Path, user_path: Path | None = None) -> "Catalog":
        """Read `path`, then `user_path` over it where that file exists.

        Raises   AppError bad_catalog with every mistake
        """
        mistakes: list[str] = []
        blocks = _read_blocks(path, mistakes)
        ours = set(blocks)
        if user_path is not None and user_path.is_file():
            for entry_id, keys in _read_blocks(user_path, mistakes).items():
                blocks[entry_id] = blocks.get(entry_id, {}) | keys
        built = (_entry(entry_id, keys, mistakes, is_ours=entry_id in ours) for entry_id, keys in blocks.items())
        entries = [entry for entry in built if entry is not None]
        mistakes += _name_clashes(entries, blocks)
        if mistakes:
            raise AppError(500, "bad_catalog", "The catalogue has mistakes:\n" + "\n".join(f"  {m}" for m in mistakes))
        return cls(entries)

    def with_aliases(self, aliases: Sequence[tuple[str, str]]) -> "Catalog":
        """With further names, as --model-alias gives them: (name, what it stands for).

        Raises AppError: bad_alias where a name has a meaning already, or stands for nothing
        """
        catalog = self
        for name, target in aliases:
            catalog = catalog._with_alias(name, target)
        return catalog

    def _with_alias(self, name: str, target: str) -> "Catalog":
        owner, entry = self._by_name.get(name.casefold()), self.find(target)
        if owner is not None:
            raise AppError(400, "bad_alias", f"The alias {name!r} belongs to {owner.id} already.", hint=_OTHER_NAME)
        if entry is None:
            raise AppError(400, "bad_alias", f"The alias {name!r} stands for {target!r}, which is no model here.")
        if entry not in self.entries:
            return Catalog(self.entries, self._elsewhere | {name: entry})
        named = replace(entry, aliases=(*entry.aliases, name))
        return Catalog([named if known == entry else known for known in self.entries], self._elsewhere)

    def find(self, name: str) -> CatalogEntry | None:
        """By id, alias or repository of the catalogue, in any case; else a folder that holds a model; else org/name."""
        known = self._by_name.get(name.casefold())
        if known is not None:
            return known
        folder = _model_folder(name)
        if folder is not None:
            return CatalogEntry(id=folder.name, folder=folder)
        return CatalogEntry(id=name, repo=name) if _REPO.fullmatch(name) else None

    def resolve(self, name: str) -> CatalogEntry:
        """As `find`. Raises AppError: 404 with what there is; 501 or 400 for a path that holds no model."""
        entry = self.find(name)
        if entry is not None:
            return entry
        _refuse_path_without_model(name)
        close = difflib.get_close_matches(name.casefold(), self._by_name, n=1)
        guess = f"Did you mean {close[0]}? " if close else ""
        raise AppError(
            404,
            "model_not_found",
            f"{name[:200]!r} is no catalogue id, no alias, no repository (owner/name) and no folder.",
            hint=f"{guess}There are: {', '.join(entry.id for entry in self.entries)}.",
            param="model",
        )


def _names(entry: CatalogEntry) -> Iterator[str]:
    yield entry.id
    yield from entry.aliases
    if entry.repo:
        yield entry.repo


def _model_folder(name: str) -> Path | None:
    try:
        folder = Path(name).expanduser().absolute()
        return folder if name and (folder / "config.json").is_file() else None
    except (OSError, ValueError, RuntimeError):  # no path at all: too long, a NUL inside, a home that is unknown
        return None


def _refuse_path_without_model(name: str) -> None:
    """Raises AppError where `name` is a path that exists; what keeps it from being a model is then the better word."""
    try:
        path = Path(name).expanduser()
        if not name or not path.exists():
            return
        is_gguf = path.suffix.lower() == ".gguf" or (path.is_dir() and any(path.glob("*.[gG][gG][uU][fF]")))
        is_folder = path.is_dir()
    except (OSError, ValueError, RuntimeError):
        return
    if is_gguf:
        raise AppError(
            501,
            "unsupported_model",
            f"{name!r} holds a model as GGUF, which Fireside does not read.",
            hint="Get the same model as GPTQ, AWQ or plain safetensors: a folder with a config.json.",
            param="model",
        )
    raise AppError(
        400,
        "bad_checkpoint",
        f"{name!r} exists, but has no config.json." if is_folder else f"{name!r} is a file, not a model's folder.",
        hint="A model's folder has a config.json, a tokenizer.json and .safetensors files.",
        param="model",
    )


# --- reading, with the place of each key kept for the messages


class _Value(NamedTuple):
    """A value of the file and where it stands ("models.yaml:12")."""

    value: Any
    place: str


_Block = dict[str, _Value]


def _read_blocks(path: Path, mistakes: list[str]) -> dict[str, _Block]:
    """id -> key -> value, unchecked. The YAML nodes are walked, as plain loading forgets lines and repeated keys."""
    try:
        root = yaml.compose(path.read_text("utf-8"), yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mistakes.append(f"{path} cannot be read: {error}")
        return {}
    if root is None:
        return {}
    blocks: dict[str, _Block] = {}
    for entry_id, node, place in _pairs(root, path, "the file", mistakes):
        blocks[entry_id] = {"": _Value(None, place)}
        for key, value_node, key_place in _pairs(node, path, entry_id, mistakes):
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

    if not _ID.fullmatch(entry_id):
        report(own_place, "an id is made of letters, digits, dots, dashes and underscores")
    values: dict[str, Any] = {}
    for key, (value, place) in block.items():
        if key and key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            report(place, f"unknown key `{key}`." + (f" Did you mean `{close[0]}`?" if close else ""))
        elif key:
            try:
                values[key] = _KEYS[key].read(value)
            except (ValueError, TypeError):
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
        for name in _names(entry):
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
    if "max_model_len" in value:
        _context(value["max_model_len"])
    if value.get("kv_cache_dtype", "auto") not in KV_CACHE_DTYPES:
        raise ValueError
    return value


def _tags(value: Any) -> tuple[str, str]:
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
    return tuple(_matching(_ID)(alias) for alias in value)


_KEYS: Mapping[str, _Key] = {
    "repo": _Key(_matching(_REPO), "a Hugging Face repository, owner/name"),
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
        _load, "a block of max_model_len (tokens) and kv_cache_dtype (one of " + ", ".join(KV_CACHE_DTYPES) + ")"
    ),
    "best_from_gb": _Key(lambda value: _number(value, 0, 10_000), "a number of GB"),
    "tool_format": _Key(_tool_format, "one of " + ", ".join(TOOL_FORMATS)),
    "reasoning": _Key(_tags, "a list of the opening and the closing tag"),
    "aliases": _Key(_aliases, "a list of names without slashes or spaces"),
}
