"""The shelf: the catalogue, the models folder, and the ways a model gets from the one into the other.

The manager's face to this house: which models there are, which lie there whole, and "let this one lie there".
"""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import AppError
from app.models.catalog import Catalog, CatalogEntry, guess
from app.models.catalog_file import ID, read_catalog
from app.models.hub.download import is_there
from app.models.hub.manifest import Verdict, growing_folder, record_file
from app.models.hub.report import OnReport, unheard
from app.models.making import Progress, sole_maker
from app.models.own_catalog import add_block, change_block, id_for, ids_in, remove_block
from app.models.store import bytes_on_disk, is_whole, problems

if TYPE_CHECKING:
    from app.models.outline import Outline

CATALOG_FILE = Path(__file__).parents[2] / "models.yaml"


_log = logging.getLogger("fireside.models")
_DEFAULTS = {"sampling": ("temperature", "top_p", "top_k"), "load": ("max_model_len", "kv_cache_dtype")}
_AGAIN = "Copy or download its files again."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfState:
    """
    is_whole       it can be loaded
    is_outdated    whole, but of another revision than the catalogue's
    bytes_on_disk  of its folder, whole or not
    """

    is_whole: bool
    is_outdated: bool
    bytes_on_disk: int


class ModelShelf:
    """
    models_dir  <home>/models; the user's own models.yaml lies beside it
    aliases     further names: (name, what it stands for)
    """

    def __init__(
        self, models_dir: Path, catalog_file: Path = CATALOG_FILE, *, aliases: Sequence[tuple[str, str]] = ()
    ) -> None:
        self._models_dir, self._catalog_file, self._aliases = models_dir, catalog_file, aliases
        self._own_file = models_dir.parent / "models.yaml"
        self._seen = _stamp(self._own_file)
        self._last = self._read_catalog()

    def _read_catalog(self) -> Catalog:
        return read_catalog(self._catalog_file, self._own_file).with_aliases(self._aliases)

    @property
    def _catalog(self) -> Catalog:
        """Read again where the user's file has changed; with mistakes in it the last good one stays."""
        if (now := _stamp(self._own_file)) != self._seen:
            try:
                self._last = self._read_catalog()
            except AppError as error:
                _log.warning("%s", error.text)
            self._seen = now  # at last: until it is read, every thread that asks reads for itself
        return self._last

    def add(self, name: str, entry_id: str | None = None) -> CatalogEntry:
        """Put a repository or a folder into the user's models.yaml. Asks the hub what it is; fetches nothing.

        Raises AppError: for what is no model, or none that can be loaded; 409 where the id or the name is taken
        """
        from app.models.outline import outline_of_folder

        found = self.resolve(name)
        if found in self._catalog.entries:
            raise AppError(409, "already_there", f"{name} is in the catalogue as {found.id}.", param="model")
        if found.folder is not None:
            outline, keys = outline_of_folder(whole_folder(found.folder)), dict[str, Any](folder=str(found.folder))
        else:
            assert found.repo is not None
            try:
                outline, keys = self._ask(found.repo)
            except AppError as error:
                if error.code == "model_not_found":
                    error.hint = f"{guess(found.repo, self.entries())}{error.hint}"
                raise
        keys["format"] = outline.stated.method if outline.stated else "dense"
        keys["context"] = outline.spec.context_length
        own_id = entry_id or id_for(found.repo or name)
        if not ID.fullmatch(own_id):
            what = f"The id is {own_id!r}; it must be made of letters, digits, dots, dashes and underscores."
            raise AppError(400, "bad_request", what, param="id")
        if any(own_id.casefold() == known.id.casefold() for known in self.entries()):
            raise AppError(
                409, "already_there", f"The id {own_id} is taken.", hint="Choose another name for it.", param="id"
            )
        with self._checked_after():
            add_block(self._own_file, own_id, keys)
        return self.resolve(own_id)

    def set_defaults(self, entry: CatalogEntry, values: Mapping[str, Any]) -> None:
        """Its own from now on, in the user's models.yaml: temperature, top_p, top_k for requests that say nothing;
        max_model_len, kv_cache_dtype for its loads. None takes one out again. Raises AppError (400) for a bad value.
        """
        if entry not in self._catalog.entries:
            hint = "Add it to your models first."
            raise AppError(400, "not_listed", f"{entry.id} is not in the catalogue.", hint=hint, param="model")
        changes = {}
        for block, before in (("sampling", entry.sampling), ("load", entry.load)):
            given = {key: value for key, value in values.items() if key in _DEFAULTS[block]}
            if given:
                kept = {key: value for key, value in {**before, **given}.items() if value is not None}
                changes[block] = kept or None
        try:
            with self._checked_after():
                change_block(self._own_file, entry.id, changes)
        except AppError as error:
            raise AppError(400, "bad_request", error.message, param="model") from None

    def own_ids(self) -> frozenset[str]:
        """Of the models that the user's own file has, or changes."""
        return ids_in(self._own_file)

    @contextmanager
    def _checked_after(self) -> Iterator[None]:
        """Around a change of the user's file, which is taken back where it has a mistake then; one that it has already
        has to be corrected first. Raises AppError.
        """
        self._read_catalog()
        before = self._own_file.read_text("utf-8") if self._own_file.exists() else None
        yield
        try:
            self._read_catalog()
        except AppError:
            self._own_file.unlink() if before is None else self._own_file.write_text(before, "utf-8")
            raise

    def _ask(self, repo: str) -> tuple["Outline", dict[str, Any]]:
        """What a repository is, and the keys of its block."""
        from app.models.hub.download import wanted_files
        from app.models.hub.repository import hub_errors, list_repo
        from app.models.hub.token import read_token
        from app.models.outline import outline_of_repo

        token = read_token(self._models_dir.parent)
        with hub_errors(repo):
            listing = list_repo(repo, None, token)
        size = sum(file.num_bytes for file in wanted_files(repo, listing))
        keys: dict[str, Any] = {"repo": repo, "size_gb": max(round(size / 1e9, 3), 0.001)}
        return outline_of_repo(repo, None, token), keys | ({"licence": listing.licence} if listing.licence else {})

    def entries(self) -> tuple[CatalogEntry, ...]:
        return self._catalog.entries

    def find(self, name: str) -> CatalogEntry | None:
        return self._catalog.find(name)

    def resolve(self, name: str) -> CatalogEntry:
        """As `find`; raises AppError 404 model_not_found with what there is."""
        return self._catalog.resolve(name)

    def folder(self, entry: CatalogEntry) -> Path:
        """Where the model lies, or will lie."""
        return entry.folder or self._models_dir / entry.id.replace("/", "--")

    def state(self, entry: CatalogEntry) -> ShelfState:
        folder, can_be_loaded = self.folder(entry), self.is_whole(entry)
        return ShelfState(
            is_whole=can_be_loaded,
            is_outdated=not can_be_loaded and is_whole(folder),
            bytes_on_disk=bytes_on_disk(folder),
        )

    def is_whole(self, entry: CatalogEntry) -> bool:
        """Whether it lies there to be loaded, in the revision that the catalogue wants."""
        folder = self.folder(entry)
        return is_whole(folder) if entry.repo is None else is_there(folder, entry.repo, entry.revision)

    def ensure(self, entry: CatalogEntry, on_progress: Progress) -> Path:
        """The folder of the whole checkpoint, made or fetched first where needed. Blocks.

        Raises   AppError; and whatever `on_progress` raises, which is the way to cancel
        """
        if entry.is_embedded:
            from app.models.embedded.forms import Form, ensure_embedded

            return ensure_embedded(Form(entry.id), self._models_dir, on_progress)
        if entry.repo is not None:
            return self._fetch(entry, entry.repo, lambda report: on_progress(report.stage, report.fraction))
        return whole_folder(self.folder(entry))

    def verify(self, entry: CatalogEntry, on_report: OnReport = unheard) -> dict[str, Verdict]:
        """File -> verified, unverified, damaged or missing. Reads every byte. Raises AppError where it is not here."""
        folder = self.folder(entry)
        if not folder.is_dir():
            raise AppError(404, "not_downloaded", f"{entry.id} is not here.", hint="Download it first.")
        return _verdicts(folder, on_report)

    def repair(self, entry: CatalogEntry, on_progress: Progress, on_report: OnReport = unheard) -> Path:
        """Fetch or make again what `verify` finds damaged or missing, and only that. Raises as `ensure`.

        on_progress  hears of what is made again, on_report of what is fetched
        """
        if entry.is_embedded:
            from app.models.embedded.forms import Form, ensure_embedded

            return ensure_embedded(Form(entry.id), self._models_dir, on_progress, is_right=is_right)
        if entry.repo is None:
            what = f"{entry.id} lies in {entry.folder}, a folder of your own: nobody knows where its files come from."
            raise AppError(400, "not_ours", what, hint=_AGAIN, param="model")
        return self._fetch(entry, entry.repo, on_report, repairs=True)

    def remove(self, entry: CatalogEntry) -> int:
        """Delete its files, what came of a download, and its block in the user's models.yaml. Their own folder stays.

        Returns the bytes that were freed. Raises AppError where there is nothing to remove.
        """
        was_own = self._forget(entry)
        if entry.folder is not None and was_own:
            return 0
        if entry.folder is not None:
            what = f"{entry.folder} is a folder of your own; Fireside deletes nothing there."
            raise AppError(400, "not_ours", what, hint="Delete it yourself.", param="model")
        folder = self.folder(entry)
        growing = growing_folder(folder)
        there = [path for path in (folder, growing) if path.is_dir()]
        if not there and not was_own:
            raise AppError(404, "not_downloaded", f"{entry.id} is not here.", param="model")
        freed = sum(map(bytes_on_disk, there))
        with sole_maker(self._models_dir, folder.name, lambda stage, fraction: _busy(entry.id)):
            for path in there:
                shutil.rmtree(path)
        record_file(self._models_dir, folder.name).unlink(missing_ok=True)
        return freed

    def _forget(self, entry: CatalogEntry) -> bool:
        """Take its block out of the user's models.yaml, if it has one."""
        return entry in self._catalog.entries and remove_block(self._own_file, entry.id)

    def _fetch(self, entry: CatalogEntry, repo: str, on_report: OnReport, *, repairs: bool = False) -> Path:
        from app.models.hub.downloader import fetch_apart

        return fetch_apart(repo, entry.revision, self.folder(entry), on_report, repairs=repairs)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Changes when the file does; None where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def _busy(name: str) -> None:
    raise AppError(409, "busy", f"{name} is being downloaded or prepared.", hint="Pause or cancel that first.")


def is_right(folder: Path) -> bool:
    """Whole, and every file of which a hash is known is that file. Reads every byte."""
    return is_whole(folder) and not is_broken(_verdicts(folder))


def is_broken(verdicts: Mapping[str, Verdict]) -> bool:
    return not {"damaged", "missing"}.isdisjoint(verdicts.values())


def _verdicts(folder: Path, on_report: OnReport = unheard) -> dict[str, Verdict]:
    from app.models.hub.check import verdicts
    from app.models.hub.manifest import read_manifest

    manifest = read_manifest(folder)
    return _lengths(folder) if manifest is None else verdicts(folder, manifest, on_report)


def _lengths(folder: Path) -> dict[str, Verdict]:
    """A folder that came here by other ways: no hash is known, so that the best word is "unverified"."""
    faults = problems(folder)
    found: dict[str, Verdict] = {path.name: "unverified" for path in sorted(folder.iterdir()) if path.is_file()}
    return found | {fault.split(" ", 1)[0]: "missing" if "is missing" in fault else "damaged" for fault in faults}


def whole_folder(folder: Path) -> Path:
    """Itself. Raises AppError with what is missing or cut."""
    faults = problems(folder)
    if faults:
        raise AppError(400, "bad_checkpoint", f"{folder} is no whole model: {'; '.join(faults)}. {_AGAIN}")
    return folder
