"""`fit MODEL`: what a model takes and holds, told before anything is downloaded."""

import argparse
import json
from collections.abc import Iterator

from app.cli.command import Command, json_argument, table
from app.models.fit import CHAT_TOKENS, Fit, FitReport
from app.models.library import Library
from app.settings import Settings


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a catalogue id, a repository (owner/name) or a folder")
    parser.add_argument("--gpu-gb", type=float, metavar="GB", help="a card sold with so many GB (24: a 3090 or 4090)")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="that a conversation is to hold")
    parser.add_argument("--kv-cache-dtype", metavar="DTYPE", choices=("auto", "fp32", "fp16", "bf16", "int8"))
    json_argument(parser)


def _run(arguments: argparse.Namespace, settings: Settings) -> int:
    """0 where it fits on one of the machines, 1 where it fits on none."""
    report = Library(settings).fit(arguments.model, arguments.gpu_gb, arguments.context, arguments.kv_cache_dtype)
    print(json.dumps(report.as_json(), indent=1) if arguments.json else "\n".join(_told(report)))
    return 0 if any(found.verdict != "too large" for found in report.fits) else 1


def _told(report: FitReport) -> Iterator[str]:
    yield f"{report.model}: {report.architecture}, {report.format}, {report.context_length:,} tokens of context"
    if report.window_layers:
        yield (
            f"{report.window_layers} of {report.num_layers} layers see {report.window:,} tokens, and keep no more "
            f"in the KV cache: beyond those 1,000 tokens more take {_in_mb(report.kv_bytes_per_1k_more)}."
        )
    chat = f" in a chat of {min(CHAT_TOKENS, report.context_length):,}" if report.window_layers else ""
    yield f"KV cache of 1,000 tokens{chat}: {_in_mb(report.kv_bytes_per_1k)}\n"
    yield table(("", *(found.machine for found in report.fits)), list(_rows(report.fits)))
    for found in report.fits:
        for words in (*found.notes, *found.advice):
            yield f"\n{found.machine}: {words}"


def _in_mb(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {num / 1e6:.1f} MB" for name, num in sizes.items())


def _rows(fits: tuple[Fit, ...]) -> Iterator[list[str]]:
    for name, words in (
        ("verdict", lambda f: f.verdict),
        ("memory", lambda f: f"{_gb(f.total_bytes)} ({f.total_bytes / 2**30:.1f} GiB)"),
        ("free", lambda f: _gb(f.free_bytes)),
        ("weights", lambda f: _gb(f.weights_bytes)),
        ("workspace", lambda f: _gb(f.workspace_bytes)),
        ("CUDA graphs", lambda f: _gb(f.graphs_bytes)),
        ("reserve", lambda f: _gb(f.reserve_bytes)),
        ("KV cache", lambda f: f"{_gb(f.kv_bytes)} {f.kv_dtype}".strip()),
        ("largest context", lambda f: f"{f.max_context:,}"),
        ("chats at 8k", lambda f: f"{f.chats}"),
    ):
        yield [name, *(words(found) for found in fits)]


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


_HELP = "what a model takes and holds, before a download"
COMMANDS = (Command("models fit", _HELP, _run, _arguments), Command("fit", _HELP, _run, _arguments))
