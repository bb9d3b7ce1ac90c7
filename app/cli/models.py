"""`models list` and its siblings: the shelf in a terminal."""

import argparse
import json

from app.cli.command import Command, table
from app.models.catalog import CatalogEntry
from app.models.shelf import ModelShelf
from app.settings import Settings


def _shelf(settings: Settings) -> ModelShelf:
    return ModelShelf(settings.models_folder, aliases=settings.model_alias)


def _as_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _list(arguments: argparse.Namespace, settings: Settings) -> int:
    shelf = _shelf(settings)
    rows = [_row(entry, shelf) for entry in shelf.entries()]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    shown = [[str(row[key]) for key in ("id", "here", "format", "gb", "context", "licence")] for row in rows]
    print(table(("MODEL", "HERE", "FORMAT", "GB", "CONTEXT", "LICENCE"), shown))
    return 0


def _row(entry: CatalogEntry, shelf: ModelShelf) -> dict[str, object]:
    state = shelf.state(entry)
    return {
        "id": entry.id,
        "here": "yes" if state.is_whole else "no",
        "format": entry.format or "?",
        "gb": round(entry.size_bytes / 1e9, 1) or "?",
        "context": entry.context_length or "?",
        "licence": entry.licence or "?",
    }


COMMANDS = (Command("models list", "the models there are, and which of them lie here whole", _list, _as_json),)
