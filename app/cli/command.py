"""What a command of the terminal is: its words, its arguments, its work. `main.py` has the table of all."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.settings import Settings


@dataclass(frozen=True, slots=True)
class Command:
    """
    words      as they are typed: "models list"
    help       one line
    run        the work; returns the exit code. Raises AppError and SettingsError, which `main` tells
    arguments  adds to the command's own parser; --home is there already
    """

    words: str
    help: str
    run: Callable[[argparse.Namespace, Settings], int]
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def tell(arguments: argparse.Namespace, found: dict[str, Any], words: str) -> None:
    """What came of a command: `found` with --json, else `words`."""
    print(json.dumps(found, indent=1) if arguments.json else words)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns, each as wide as its widest word."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = (("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True))) for row in (head, *rows))
    return "\n".join(line.rstrip() for line in lines)
