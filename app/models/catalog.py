"""Which models there are, by what names they go, and what must be known before a load. `catalog_file.py` reads them."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from app.errors import AppError

REPO = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")
_ADDRESS = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)(?:[/?#].*)?")  # of its page
_MOST_GUESSED, _LONGEST_GUESSED = 3, 200
_OTHER_NAME = "Choose another name for it."


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
        self._by_name = {name.casefold(): entry for entry in self.entries for name in names_of(entry)}
        self._by_name |= {name.casefold(): entry for name, entry in elsewhere.items()}

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
            what = f"The alias {name!r} belongs to {owner.id} already."
            raise AppError(400, "bad_alias", what, hint=_OTHER_NAME, param="model_alias")
        if entry is None:
            what = f"The alias {name!r} stands for {target!r}, which is no model here."
            raise AppError(400, "bad_alias", what, param="model_alias")
        if entry not in self.entries:
            return Catalog(self.entries, self._elsewhere | {name: entry})
        named = replace(entry, aliases=(*entry.aliases, name))
        return Catalog([named if known == entry else known for known in self.entries], self._elsewhere)

    def find(self, name: str) -> CatalogEntry | None:
        """By id, alias or repository of the catalogue, in any case; else a folder that holds a model; else org/name, or
        the address of its page."""
        if page := _ADDRESS.fullmatch(name):
            name = page[1]
        known = self._by_name.get(name.casefold())
        if known is not None:
            return known
        folder = _model_folder(name)
        if folder is not None:
            return CatalogEntry(id=folder.name, folder=folder)
        return CatalogEntry(id=name, repo=name) if REPO.fullmatch(name) else None

    def resolve(self, name: str) -> CatalogEntry:
        """As `find`. Raises AppError: 404 with what comes near; 501 or 400 for a path that holds no model."""
        entry = self.find(name)
        if entry is not None:
            return entry
        _refuse_path_without_model(name)
        raise AppError(
            404,
            "model_not_found",
            f"{name[:200]!r} is no catalogue id, no alias, no repository (owner/name) and no folder.",
            hint=f"{guess(name, self.entries)}The page's Models and `python launch.py models list` show all.",
            param="model",
        )


def guess(name: str, entries: Iterable[CatalogEntry]) -> str:
    """A question that names the few ids whose names come near, with a space behind it; "" where none does."""
    ids = {known.casefold(): entry.id for entry in entries for known in names_of(entry)}
    close = difflib.get_close_matches(name[:_LONGEST_GUESSED].casefold(), ids, n=_MOST_GUESSED)
    near = dict.fromkeys(ids[each] for each in close)
    return f"Did you mean {', '.join(near)}? " if near else ""


def names_of(entry: CatalogEntry) -> Iterator[str]:
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
