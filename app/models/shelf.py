"""The shelf: the catalogue, the models folder, and the ways a model gets from the one into the other.

The manager's face to this house: which models there are, which lie there whole, and "let this one lie there".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.errors import AppError
from app.models.catalog import Catalog, CatalogEntry
from app.models.making import Progress
from app.models.store import bytes_on_disk, is_whole, problems

CATALOG_FILE = Path(__file__).parents[2] / "models.yaml"


_AGAIN = "Copy or download its files again."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfState:
    """bytes_on_disk counts a half download too."""

    is_whole: bool
    bytes_on_disk: int


class ModelShelf:
    """
    models_dir  <home>/models; the user's own models.yaml lies beside it
    aliases     further names: (name, what it stands for)
    """

    def __init__(
        self, models_dir: Path, catalog_file: Path = CATALOG_FILE, *, aliases: Sequence[tuple[str, str]] = ()
    ) -> None:
        self._models_dir = models_dir
        self._catalog = Catalog.load(catalog_file, models_dir.parent / "models.yaml").with_aliases(aliases)

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
        folder = self.folder(entry)
        return ShelfState(is_whole=is_whole(folder), bytes_on_disk=bytes_on_disk(folder))

    def is_whole(self, entry: CatalogEntry) -> bool:
        """Whether it lies there to be loaded."""
        return is_whole(self.folder(entry))

    def ensure(self, entry: CatalogEntry, on_progress: Progress) -> Path:
        """The folder of the whole checkpoint, made or fetched first where needed. Blocks.

        Raises   AppError; and whatever `on_progress` raises, which is the way to cancel
        """
        if entry.is_embedded:
            from app.models.embedded import Form, ensure_embedded

            return ensure_embedded(Form(entry.id), self._models_dir, on_progress)
        if entry.repo is not None:
            from app.models.downloader import fetch_apart

            folder = self.folder(entry)
            return fetch_apart(
                entry.repo, entry.revision, folder, lambda report: on_progress(report.stage, report.fraction)
            )
        return _own_folder(self.folder(entry))


def _own_folder(folder: Path) -> Path:
    faults = problems(folder)
    if faults:
        raise AppError(400, "bad_checkpoint", f"{folder} is no whole model: {'; '.join(faults)}. {_AGAIN}")
    return folder
