"""`models load`, `models unload`, `models logs`: what the running Fireside has in memory."""

import argparse
import sys

from app.cli.command import Command, json_argument, tell
from app.cli.server import running_server, server_arguments
from app.errors import AppError
from app.settings import Settings


def show_passing(line: str) -> None:
    """A stage, written over by the next; nothing where there is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a catalogue id, a repository (owner/name) or a folder")
    parser.add_argument("--no-wait", action="store_true", help="begin the load and return")
    json_argument(parser)
    server_arguments(parser)


def _load(arguments: argparse.Namespace, settings: Settings) -> int:
    server = running_server(arguments, settings)
    begun = server.post("/models/load", {"model": arguments.model})["model"]
    if arguments.no_wait:
        tell(arguments, {"model": begun, "state": "loading"}, f"{begun} is being loaded.")
        return 0
    loaded = server.until_loaded(show_passing, begun)
    show_passing("")
    tell(arguments, {"model": loaded, "state": "loaded"}, f"{loaded} is loaded.")
    return 0


def _unload_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="", help="its id (default: the one in hand)")
    json_argument(parser)
    server_arguments(parser)


def _unload(arguments: argparse.Namespace, settings: Settings) -> int:
    server = running_server(arguments, settings)
    now = server.get("/health")
    if not arguments.model and now["state"] not in ("ready", "loading"):
        raise AppError(503, "no_model", "No model is loaded.", hint="`python launch.py models load` loads one.")
    model = arguments.model or now["model"]
    server.post("/models/unload", {"model": model})
    tell(arguments, {"model": model, "state": "unloaded"}, f"{model} is unloaded, and its memory is free.")
    return 0


def _logs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="", help="its id (default: the one in hand)")
    parser.add_argument("--lines", default="50", help="how many of the last lines (default: 50)")
    json_argument(parser)
    server_arguments(parser)


def _logs(arguments: argparse.Namespace, settings: Settings) -> int:
    found = running_server(arguments, settings).get("/logs", model=arguments.model, lines=arguments.lines)
    tell(arguments, found, "\n".join(found["lines"]))
    return 0


COMMANDS = (
    Command("models load", "have the running Fireside load a model, and wait until it answers", _load, _load_arguments),
    Command("models unload", "have it give a model's memory back", _unload, _unload_arguments),
    Command("models logs", "what a model's engine wrote last", _logs, _logs_arguments),
)
