"""What may be asked of the shelf beside loading: search, fit, downloads, adding, removing. Blocks; for any thread."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from app.errors import AppError
from app.models.catalog import CatalogEntry
from app.models.fit import FitReport, fit
from app.models.hub.downloads import Download, Downloads
from app.models.hub.manifest import Verdict
from app.models.hub.report import OnReport, unheard
from app.models.hub.search import search
from app.models.hub.token import forget_token, keep_token, read_token
from app.models.machine import Memory, card, computer, empty_card
from app.models.making import Progress, unseen
from app.models.outline import Outline, outline_of_folder, outline_of_repo
from app.models.shelf import ModelShelf, is_broken, whole_folder
from app.models.shelved import Disk, Shelved, best, disk, shelved
from app.settings import Settings
from engine.config import EngineConfig

_DEFAULT_CARD_GB = 24
_MOST_CARD_GB = 10_000


class Library:
    """Of one home folder."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.shelf = ModelShelf(settings.models_folder, aliases=settings.model_alias)
        self.downloads = Downloads(settings.models_folder)

    # --- before a download

    def search(self, words: str, gpu_gb: float | None = None, **filters: Any) -> list[dict[str, Any]]:
        """Hits of `search.search` on this machine as it is, with what of each lies here. Raises AppError."""
        machine = machines(_card_size(gpu_gb) or self._settings.gpu_memory_gb)[0]
        hits = search(words, machine, token=self._token(), **filters)
        entries = [self.shelf.find(hit.repo) for hit in hits]  # None for the few names of the hub without an owner
        return [
            asdict(hit) | {"state": self.state(found) if found else ""}
            for hit, found in zip(hits, entries, strict=True)
        ]

    def fit(
        self, name: str, gpu_gb: float | None = None, context: int | None = None, kv: str | None = None
    ) -> FitReport:
        """As `fit.fit`, on this machine now and on an empty card. Raises AppError."""
        if context is not None and context < 1:
            what = f"context is {context}; it must be a whole number of tokens, 1 or more."
            raise AppError(400, "bad_request", what, param="context")
        here, settings = machines(_card_size(gpu_gb) or self._settings.gpu_memory_gb), self._settings
        entry = self.shelf.resolve(name)
        outline = self._outline(entry)
        config = EngineConfig(
            model=outline.name,
            max_model_len=context or entry.load.get("max_model_len", settings.max_model_len),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            kv_gb=settings.kv_gb,
            kv_cache_dtype=kv or entry.load.get("kv_cache_dtype", settings.kv_cache_dtype),
            quantize_lm_head=settings.quantize_lm_head,
        )
        return fit(outline, config, here, self.shelf.entries())

    def _outline(self, entry: CatalogEntry) -> Outline:
        """From its folder where it lies whole, else from the hub."""
        if not self.shelf.state(entry).is_whole and entry.repo is not None:
            return outline_of_repo(entry.repo, entry.revision, self._token())
        folder = self.shelf.folder(entry)
        if not folder.is_dir():
            hint = f"Load it, or make it with `python launch.py models pull {entry.id}`."
            raise AppError(404, "not_downloaded", f"{entry.id} is prepared by Fireside and not here yet.", hint=hint)
        return outline_of_folder(whole_folder(folder))

    # --- downloads

    def all_downloads(self) -> list[Download]:
        return self.downloads.all()

    def known_downloads(self) -> list[Download]:
        return self.downloads.known()

    def pull(self, name: str, *, is_to_load: bool = False) -> Download:
        """Queue its download; one that is under way goes on as it is. Raises AppError."""
        entry = self.shelf.resolve(name)
        if entry.repo is None:
            raise AppError(400, "not_downloadable", f"{entry.id} is not downloaded from the hub.", param="model")
        return self.downloads.add(self._name(entry), entry, is_to_load=is_to_load)

    def pause(self, name: str) -> Download:
        return self.downloads.pause(self._name(self.shelf.resolve(name)))

    def resume(self, name: str) -> Download:
        return self.downloads.resume(self._name(self.shelf.resolve(name)))

    def cancel(self, name: str) -> None:
        self.downloads.cancel(self._name(self.shelf.resolve(name)))

    def state(self, entry: CatalogEntry) -> str:
        """ "ready", a download's state, or "" where nothing of it is here."""
        if self.shelf.state(entry).is_whole:
            return "ready"
        found = self.downloads.find(self._name(entry))
        return found.state if found and found.state != "ready" else ""

    # --- what lies here

    def add(self, name: str, entry_id: str | None = None) -> CatalogEntry:
        return self.shelf.add(name, entry_id)

    def remove(self, name: str) -> int:
        """Bytes freed; a download under way is cancelled. Raises AppError."""
        entry = self.shelf.resolve(name)
        found = self.downloads.find(self._name(entry))
        if found is None or found.state == "ready":
            return self.shelf.remove(entry)
        self.downloads.cancel(found.name)
        is_more = self.shelf.state(entry).is_whole or entry.id in self.shelf.own_ids()
        return self.shelf.remove(entry) if is_more else 0

    def set_defaults(self, name: str, values: Mapping[str, Any]) -> None:
        """As `ModelShelf.set_defaults`."""
        self.shelf.set_defaults(self.shelf.resolve(name), values)

    def shelved(self, held_bytes: int = 0) -> list[Shelved]:
        """held_bytes: of memory, that models hold which would make room."""
        return shelved(self.shelf, self.downloads.all(), self._machine(held_bytes))

    def best(self, held_bytes: int = 0) -> CatalogEntry | None:
        """The model to begin with on this machine."""
        return best(self.shelf.entries(), self._machine(held_bytes))

    def disk(self) -> Disk:
        return disk(self._settings.home, self.shelf)

    def _machine(self, held_bytes: int) -> Memory:
        return machines(self._settings.gpu_memory_gb)[0].with_free(held_bytes)

    def follow(self, settings: Settings) -> None:
        """Forecasts go by these from now on."""
        self._settings = settings

    def verify(
        self, name: str, *, repairs: bool = False, on_report: OnReport = unheard, on_progress: Progress = unseen
    ) -> dict[str, Verdict]:
        """As `shelf.verify`; what is damaged or missing is fetched or made again first where `repairs` says so.

        on_report  hears of bytes read and fetched, on_progress of what is made
        """
        entry = self.shelf.resolve(name)
        found = self.shelf.verify(entry, on_report)
        if not repairs or not is_broken(found):
            return found
        self.shelf.repair(entry, on_progress, on_report)
        return self.shelf.verify(entry, on_report)

    def keep_token(self, token: str) -> None:
        keep_token(self._settings.home, token)

    def forget_token(self) -> bool:
        return forget_token(self._settings.home)

    def _token(self) -> str | None:
        return read_token(self._settings.home)

    def _name(self, entry: CatalogEntry) -> str:
        return self.shelf.folder(entry).name


def _card_size(gpu_gb: float | None) -> float | None:
    """Raises AppError for what no card has."""
    if gpu_gb is not None and not 0 < gpu_gb < _MOST_CARD_GB:
        what = f"gpu_gb is {gpu_gb:g}; it must be above 0 and below {_MOST_CARD_GB:,}."
        raise AppError(400, "bad_request", what, param="gpu_gb")
    return gpu_gb


def machines(gpu_gb: float | None) -> list[Memory]:
    """What is free now, and an empty card: this one, or one of `gpu_gb`."""
    here = card()
    if here is None:
        empty = empty_card(gpu_gb or _DEFAULT_CARD_GB)
        return [empty] if gpu_gb else [computer(), empty]
    acting = here if gpu_gb is None else here.acting_as(gpu_gb)
    return [acting, acting.emptied()]
