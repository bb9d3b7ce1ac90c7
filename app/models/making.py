"""How a folder of the models folder comes to be: one maker at a time, whole or not at all, space looked at first.

Used by `embedded` (which converts), `hub` (which fetches) and `quantize.py`.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from app.errors import AppError
from app.models.hub.manifest import manifest_of, write_manifest

# What is being done, and the share that is done (0 to 1; None where it cannot be known). Called several times a second
# while work goes on; whatever it raises stops the work and leaves nothing half-made, which is how a caller cancels.
Progress = Callable[[str, float | None], None]

_POLL_S = 0.5
_SPARE_BYTES = 200_000_000  # left free beyond what a model takes, so that the machine does not stand still


def unseen(stage: str, fraction: float | None) -> None:
    """A `Progress` where nobody looks on."""


@contextmanager
def sole_maker(models_dir: Path, name: str, on_progress: Progress) -> Iterator[None]:
    """Hold the right to make `name`; wait for another process that has it. The lock ends with the process."""
    models_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(models_dir / f".{name}.lock")
    while True:
        try:
            lock.acquire(timeout=_POLL_S)
            break
        except Timeout:
            on_progress(f"Waiting for another Fireside that is preparing {name}", None)
    try:
        yield
    finally:
        lock.release()


def is_being_made(models_dir: Path, name: str) -> bool:
    """By whichever process."""
    lock = FileLock(models_dir / f".{name}.lock")
    try:
        with lock.acquire(timeout=0):
            return False
    except Timeout:
        return True


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give an empty sibling to fill; it takes `folder`'s name in one step at the end, or goes away on an error.

    Call it as the sole maker. What an earlier break left is cleared first. The files' hashes are recorded, for who
    verifies them later.
    """
    making = _emptied(folder.with_name(f".{folder.name}.making"))
    try:
        yield making
        write_manifest(making, manifest_of(making))
        _flush_to_disk(making)
        if folder.exists():  # damaged, or its maker would not have been called
            shutil.rmtree(folder)
        os.replace(making, folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


@contextmanager
def scratch_folder(models_dir: Path, name: str) -> Iterator[Path]:
    """An empty folder beside the models, gone at the end. Call it as the sole maker of `name`."""
    scratch = _emptied(models_dir / f".{name}.scratch")
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def require_space(folder: Path, num_bytes: int, what: str) -> None:
    """Raise AppError disk_full where `folder`'s disk has no room for `num_bytes` and some to spare."""
    needed = num_bytes + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise AppError(
            507,
            "disk_full",
            f"{what} needs {needed / 1e9:.2f} GB of free disk; {folder} has {free / 1e9:.2f} GB.",
            hint="Free some space, or choose another folder with --home or FIRESIDE_HOME.",
        )


def _emptied(folder: Path) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def _flush_to_disk(folder: Path) -> None:
    """A rename may reach the disk before the bytes it names; a power cut would then leave a whole name on holes."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("r+b") as file:
            os.fsync(file.fileno())
