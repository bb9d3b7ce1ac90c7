"""`models list` and its siblings: the shelf in a terminal."""

import argparse
import getpass
import json
import sys

from app.cli.command import Command, json_argument, table, tell
from app.cli.progress import Shown
from app.cli.server import server_arguments, server_if_there
from app.errors import AppError
from app.models.catalog import CatalogEntry
from app.models.hub.downloads import Download, Downloads
from app.models.hub.report import Report
from app.models.library import Library
from app.models.shelf import ModelShelf, is_broken
from app.models.shelved import state_word
from app.settings import Settings


def shelf_of(settings: Settings) -> ModelShelf:
    return ModelShelf(settings.models_folder, aliases=settings.model_alias)


def _named(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a catalogue id, a repository (owner/name) or a folder")


# --- list


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    json_argument(parser)
    server_arguments(parser)


def _list(arguments: argparse.Namespace, settings: Settings) -> int:
    shelf, in_memory = shelf_of(settings), _in_memory(arguments, settings)
    downloads = {found.name: found for found in Downloads(settings.models_folder).all()}
    rows = [_row(entry, shelf, downloads.get(shelf.folder(entry).name)) for entry in shelf.entries()]
    listed = {shelf.folder(entry).name for entry in shelf.entries()}
    rows += [_row_of_download(found) for name, found in downloads.items() if name not in listed]
    known = {row["id"] for row in rows}
    rows += [_bare_row(name, state) for name, state in in_memory.items() if name not in known]
    rows = [row | {"state": in_memory.get(str(row["id"]), row["state"])} for row in rows]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    shown = [[str(row[key] or "") for key in ("id", "state", "format", "gb", "context", "licence")] for row in rows]
    print(table(("MODEL", "STATE", "FORMAT", "GB", "CONTEXT", "LICENCE"), shown))
    return 0


def _in_memory(arguments: argparse.Namespace, settings: Settings) -> dict[str, str]:
    """Of the running Fireside: which models are loaded or loading; empty where none runs."""
    server = server_if_there(arguments, settings)
    if server is None:
        return {}
    try:
        found = server.get("/models")["data"]
    except AppError as refused:
        print(f"Which models are loaded is not told: {refused.text}", file=sys.stderr)
        return {}
    return {model["id"]: model["state"] for model in found if model["state"] in ("loaded", "loading")}


def _row(entry: CatalogEntry, shelf: ModelShelf, download: Download | None) -> dict[str, object]:
    here = shelf.state(entry)
    state = state_word(here, download)
    num_bytes = here.bytes_on_disk if here.is_whole else entry.size_bytes
    return {
        "id": entry.id,
        "state": state,
        "format": entry.format,
        "gb": round(num_bytes / 1e9, 2) or None,
        "context": entry.context_length,
        "licence": entry.licence,
    }


def _row_of_download(found: Download) -> dict[str, object]:
    return _bare_row(found.repo, found.state, round(found.report.num_bytes / 1e9, 1) if found.report else None)


def _bare_row(name: str, state: str, gb: float | None = None) -> dict[str, object]:
    """Of a model that the catalogue does not have."""
    return {"id": name, "state": state, "format": None, "gb": gb, "context": None, "licence": None}


# --- search


def _search_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", help="in the repository's name")
    parser.add_argument("--format", choices=("awq", "gptq", "compressed-tensors"), help="of the weights")
    parser.add_argument("--max-gb", type=float, metavar="GB", help="of the weights at most")
    parser.add_argument("--licence", metavar="NAME", help="such as apache-2.0")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="hits (default: 20)")
    parser.add_argument("--gpu-gb", type=float, metavar="GB", help="judge by a card sold with so many GB")
    json_argument(parser)


def _search(arguments: argparse.Namespace, settings: Settings) -> int:
    filters = {"fmt": arguments.format, "max_gb": arguments.max_gb, "licence": arguments.licence}
    words = " ".join(arguments.words)
    hits = Library(settings).search(words, arguments.gpu_gb, limit=arguments.limit, **filters)
    if arguments.json:
        print(json.dumps(hits, indent=1))
        return 0
    print(
        table(("REPOSITORY", "FITS?", "GB", "FORMAT", "LICENCE", "DOWNLOADS", "HERE"), [_row_of_hit(h) for h in hits])
    )
    print("\nBy the hub's numbers; `python launch.py fit REPOSITORY` reads the headers and knows exactly.")
    return 0


def _row_of_hit(hit: dict[str, object]) -> list[str]:
    size = hit["weights_bytes"]
    gb = f"{size / 1e9:.1f}" if isinstance(size, int) else ""
    fit = f"{hit['fit']} ({hit['why']})" if hit["why"] else str(hit["fit"])
    licence = f"{hit['licence']}{' (gated)' if hit['is_gated'] else ''}"
    return [str(hit["repo"]), fit, gb, str(hit["format"]), licence, f"{hit['downloads']:,}", str(hit["state"])]


# --- pull, verify, rm, token


def _pull_arguments(parser: argparse.ArgumentParser) -> None:
    _named(parser)
    json_argument(parser)


def _pull(arguments: argparse.Namespace, settings: Settings) -> int:
    """Ctrl-C pauses: the same command goes on."""
    shelf = shelf_of(settings)
    entry = shelf.resolve(arguments.model)
    if entry.repo is None:
        with Shown() as shown:
            made = shelf.ensure(entry, shown.stage)
        tell(arguments, {"id": entry.id, "folder": str(made)}, str(made))
        return 0
    folder = shelf.folder(entry)
    downloads = Downloads(settings.models_folder)
    downloads.add(folder.name, entry)
    try:
        with Shown() as shown:
            done = downloads.wait(folder.name, lambda now: shown.report(now.report or Report(now.repo, now.state, ())))
    except KeyboardInterrupt:
        print(f"\n{_left(downloads, folder.name)}", file=sys.stderr)
        return 130
    finally:
        downloads.close()
    if done.error is not None:
        raise AppError(**done.error)
    files = {file.name: file.state for file in done.report.files} if done.report else {}
    tell(arguments, {"id": entry.id, "folder": str(folder), "files": files}, f"{folder}\n{_checked(done)}")
    return 0


def _left(downloads: Downloads, name: str) -> str:
    """Paused, unless another process has it."""
    found = downloads.find(name)
    if found is not None and downloads.is_anothers(found):
        return "Another Fireside goes on with it."
    downloads.pause(name)
    return "Paused. The same command goes on where it stopped."


def _checked(done: Download) -> str:
    if done.report is None:
        return "It lay there whole."
    unverified = [file.name for file in done.report.files if file.state == "unverified"]
    if not unverified:
        return f"{len(done.report.files)} files, every one verified by its hash."
    return f"{len(done.report.files)} files; unverified, as no hash of them is known: {', '.join(unverified)}."


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    _named(parser)
    parser.add_argument("--repair", action="store_true", help="fetch or make again what is damaged or missing")
    json_argument(parser)


def _verify(arguments: argparse.Namespace, settings: Settings) -> int:
    """1 where a file is not what it should be."""
    library = Library(settings)
    with Shown() as shown:
        verdicts = library.verify(
            arguments.model, repairs=arguments.repair, on_report=shown.report, on_progress=shown.stage
        )
    if arguments.json:
        print(json.dumps(verdicts, indent=1))
    else:
        print(table(("FILE", "IS"), [[name, verdict] for name, verdict in verdicts.items()]))
    if is_broken(verdicts):
        print("`--repair` fetches the damaged files again.", file=sys.stderr)
    return int(is_broken(verdicts))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a repository (owner/name) or a folder")
    parser.add_argument("--id", help="the name it is to have here")
    json_argument(parser)


def _add(arguments: argparse.Namespace, settings: Settings) -> int:
    added = shelf_of(settings).add(arguments.model, arguments.id)
    found = {"id": added.id, "format": added.format, "context_length": added.context_length}
    where = f"in {settings.home / 'models.yaml'}"
    tell(arguments, found, f"{added.id}: {added.format}, {added.context_length:,} tokens of context, {where}.")
    return 0


def _rm_arguments(parser: argparse.ArgumentParser) -> None:
    _named(parser)
    json_argument(parser)
    server_arguments(parser)


def _rm(arguments: argparse.Namespace, settings: Settings) -> int:
    shelf = shelf_of(settings)
    entry = shelf.resolve(arguments.model)
    if entry.id in _in_memory(arguments, settings):
        hint = f"`python launch.py models unload {entry.id}` first."
        raise AppError(409, "model_loaded", f"{entry.id} is loaded.", hint=hint, param="model")
    freed = shelf.remove(entry)
    words = f"{freed / 1e9:.2f} GB freed."
    if entry.folder is not None:
        words = f"{entry.id} is taken out of {settings.home / 'models.yaml'}; {entry.folder} stays as it is."
    tell(arguments, {"id": entry.id, "freed_bytes": freed}, words)
    return 0


def _token_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--forget", action="store_true", help="delete the one that is kept")


def _token(arguments: argparse.Namespace, settings: Settings) -> int:
    from app.models.hub.token import forget_token, keep_token

    if arguments.forget:
        print("Forgotten." if forget_token(settings.home) else "No token is kept.")
        return 0
    given = getpass.getpass("Token (from huggingface.co/settings/tokens): ") if sys.stdin.isatty() else input()
    print(f"Kept in {keep_token(settings.home, given)}, which only you can read.")
    return 0


COMMANDS = (
    Command("models list", "the models there are, and how each is", _list, _list_arguments),
    Command("models search", "models of the hub, each with whether it fits", _search, _search_arguments),
    Command("models add", "put a repository or a folder into your own models.yaml", _add, _add_arguments),
    Command("models pull", "download a model; Ctrl-C pauses, the same command goes on", _pull, _pull_arguments),
    Command("models verify", "hash every file of a model", _verify, _verify_arguments),
    Command("models rm", "delete a model's files", _rm, _rm_arguments),
    Command("models token", "keep the hub's token for gated models", _token, _token_arguments),
)
