"""A model from the hub into the models folder: listed, measured, taken up where it broke off, fetched, then named.

A download grows in a hidden folder and takes its name when every file is there, so that a half model is never seen.
`downloader.py` runs this in a process of its own.
"""

import os
import shutil
from contextlib import AbstractContextManager, suppress
from fnmatch import fnmatch
from pathlib import Path

from app.errors import AppError
from app.models.hub.check import verdicts
from app.models.hub.manifest import Manifest, Verdict, growing_folder, is_right, read_manifest, write_manifest
from app.models.hub.report import OnReport, Report
from app.models.hub.repository import Listing, RemoteFile, hub_errors, list_repo
from app.models.hub.transfer import Fetching, bytes_there
from app.models.making import require_space, sole_maker
from app.models.store import file_bytes, is_whole, problems

_WANTED = ("*.safetensors", "*.json", "*.jinja", "LICENSE*")
_UNWANTED = ("consolidated*",)  # Mistral's own copy of weights that model*.safetensors holds too
_POOLING = "[0-9]_Pooling/config.json"  # of embedding models: how the last layer becomes one vector


def fetch(repo: str, revision: str | None, folder: Path, on_report: OnReport, token: str | None = None) -> Path:
    """The folder of the whole model; asks the network only where it is not there, or came from another revision.

    on_report is called several times a second; what it raises ends the download, which the next call takes up.
    Raises   AppError: no such repository, a gated one, no network, nothing that can be loaded, no space, a wrong hash
    """
    if is_there(folder, repo, revision):
        return folder

    with _sole_maker(folder, repo, on_report), hub_errors(repo, folder):
        if not is_there(folder, repo, revision):
            _download(repo, revision, folder, on_report, token)
    return folder


def repair(folder: Path, on_report: OnReport, token: str | None = None) -> Path:
    """Fetch again what `verify` finds damaged or missing, and nothing else. Raises as `fetch`."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise AppError(400, "not_downloaded", f"{folder.name} was not downloaded here: nobody knows what it should be.")
    with _sole_maker(folder, manifest.repo, on_report), hub_errors(manifest.repo, folder):
        found = verdicts(folder, manifest, on_report)
        _require_offer(manifest, token)
        _require_space(folder, manifest, found)
        _adopt(folder, growing_folder(folder), found)
        _download(manifest.repo, manifest.revision, folder, on_report, token)
    return folder


def _sole_maker(folder: Path, repo: str, on_report: OnReport) -> AbstractContextManager[None]:
    return sole_maker(folder.parent, folder.name, lambda stage, fraction: on_report(Report(repo, "waiting", ())))


def _require_offer(manifest: Manifest, token: str | None) -> None:
    """Raises where the hub does not answer: what is here then stays in its place, as it may be of use."""
    from huggingface_hub.errors import RevisionNotFoundError

    with suppress(RevisionNotFoundError):  # rewritten history: all is fetched anew
        list_repo(manifest.repo, manifest.commit, token)


def _require_space(folder: Path, manifest: Manifest, found: dict[str, Verdict]) -> None:
    """As above, for a disk without room for what is to be fetched."""
    wrong = [file for file in manifest.files if not is_right(found[file.name])]
    there = sum(file_bytes(folder / file.name) for file in wrong)
    require_space(folder.parent, sum(file.num_bytes for file in wrong) - there, manifest.repo)


def is_there(folder: Path, repo: str, revision: str | None) -> bool:
    """A folder without a manifest was put there by hand: it is taken as it is."""
    manifest = read_manifest(folder)
    return is_whole(folder) and (manifest is None or manifest.is_of(repo, revision))


def _download(repo: str, revision: str | None, folder: Path, on_report: OnReport, token: str | None) -> None:
    on_report(Report(repo, "queued", ()))
    growing = growing_folder(folder)
    manifest = _begin(repo, revision, folder, growing, token, on_report)
    require_space(folder.parent, manifest.num_bytes - bytes_there(growing, manifest.files), repo)
    Fetching(manifest, growing, token).run(on_report)
    _require_whole(repo, growing)
    if folder.exists():  # damaged, or of another revision
        shutil.rmtree(folder)
    os.replace(growing, folder)
    _flush_names(folder.parent)


def _require_whole(repo: str, growing: Path) -> None:
    """Every file came as the hub has it; if a load still lacks something, the repository itself is broken."""
    faults = problems(growing)
    if faults:
        hint = "Tell its owner, or choose another repository."
        raise AppError(400, "bad_checkpoint", f"{repo} is no whole model: {'; '.join(faults)}.", hint=hint)


def _begin(
    repo: str, revision: str | None, folder: Path, growing: Path, token: str | None, on_report: OnReport
) -> Manifest:
    """Go on with the commit that a broken download began with; else start with what `revision` means now."""
    from huggingface_hub.errors import RevisionNotFoundError

    damaged = read_manifest(folder)
    if damaged is not None and damaged.files and damaged.is_of(repo, revision) and not growing.exists():
        _adopt(folder, growing, verdicts(folder, damaged, on_report))
    begun = read_manifest(growing)
    if begun is not None and begun.is_of(repo, revision):
        try:
            return _write(growing, repo, revision, list_repo(repo, begun.commit, token))
        except RevisionNotFoundError:
            pass  # rewritten history: nothing can be added to what is there
    listing = list_repo(repo, revision, token)
    wanted_files(repo, listing)
    if growing.exists():
        shutil.rmtree(growing)
    growing.mkdir(parents=True)
    return _write(growing, repo, revision, listing)


def _write(growing: Path, repo: str, revision: str | None, listing: Listing) -> Manifest:
    manifest = Manifest(repo, revision, listing.commit, wanted_files(repo, listing))
    write_manifest(growing, manifest)
    return manifest


def _adopt(folder: Path, growing: Path, found: dict[str, Verdict]) -> None:
    """Take a damaged model back into the making, without the files that are not what they should be."""
    if growing.exists():
        shutil.rmtree(growing)
    for name, word in found.items():
        if not is_right(word):  # before the folder is one whose files were checked
            (folder / name).unlink(missing_ok=True)
    os.replace(folder, growing)


def wanted_files(repo: str, listing: Listing) -> tuple[RemoteFile, ...]:
    """What a load needs. Raises AppError for a repository that cannot be loaded."""
    files = tuple(file for file in listing.files if _is_wanted(file.name))
    _require_loadable(repo, listing.names, [file.name for file in files])
    return files


def _is_wanted(name: str) -> bool:
    def is_any(patterns: tuple[str, ...]) -> bool:
        return any(fnmatch(name, pattern) for pattern in patterns)

    is_at_the_top = "/" not in name and "\\" not in name
    return fnmatch(name, _POOLING) or (is_at_the_top and is_any(_WANTED) and not is_any(_UNWANTED))


def _require_loadable(repo: str, names: list[str], wanted: list[str]) -> None:
    missing = [name for name in ("config.json", "tokenizer.json") if name not in wanted]
    if not any(name.endswith(".safetensors") for name in wanted):
        missing.append(".safetensors weights")
    if not missing:
        return
    kinds = {"*.gguf": "GGUF files", "*.bin": "PyTorch .bin files", "*.pt*": "PyTorch .pt files"}
    there = [words for pattern, words in kinds.items() if any(fnmatch(name, pattern) for name in names)]
    raise AppError(
        400,
        "unsupported_model",
        f"{repo} has no {', no '.join(missing)}" + (f"; it holds {' and '.join(there)}." if there else "."),
        hint="Choose a repository in GPTQ, AWQ or dense safetensors form; most 4-bit ones end in -GPTQ-Int4 or -AWQ.",
    )


def _flush_names(folder: Path) -> None:
    if os.name == "nt":  # which has no way to ask for it
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
