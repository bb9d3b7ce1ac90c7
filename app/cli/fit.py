"""`fit MODEL`: what a model takes and holds, told before anything is downloaded."""

import argparse
import json
from collections.abc import Iterator

from app.cli.command import Command, table
from app.cli.models import shelf_of
from app.errors import AppError
from app.models.catalog import CatalogEntry
from app.models.fit import Fit, FitReport, fit
from app.models.hub_token import read_token
from app.models.machine import Memory, card, computer, empty_card
from app.models.outline import Outline, outline_of_folder, outline_of_repo
from app.models.shelf import ModelShelf
from app.settings import Settings
from engine.config import EngineConfig

_DEFAULT_CARD_GB = 24


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a catalogue id, a repository (owner/name) or a folder")
    parser.add_argument("--gpu-gb", type=float, metavar="GB", help="a card with so many GB (24 for a 3090 or 4090)")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="that a conversation is to hold")
    parser.add_argument("--kv-cache-dtype", metavar="DTYPE", choices=("auto", "fp32", "fp16", "bf16", "int8"))
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: argparse.Namespace, settings: Settings) -> int:
    """0 where it fits on one of the machines, 1 where it fits on none."""
    if arguments.gpu_gb is not None and not 0 < arguments.gpu_gb < 10_000:
        raise AppError(400, "bad_request", f"--gpu-gb is {arguments.gpu_gb}; it must be above 0.")
    shelf = shelf_of(settings)
    outline = outline_of(shelf, shelf.resolve(arguments.model), settings)
    config = EngineConfig(
        model=outline.name,
        max_model_len=arguments.context or settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_gb=settings.kv_gb,
        kv_cache_dtype=arguments.kv_cache_dtype or settings.kv_cache_dtype,
        quantize_lm_head=settings.quantize_lm_head,
    )
    report = fit(outline, config, machines(arguments.gpu_gb or settings.gpu_memory_gb), shelf.entries())
    print(json.dumps(report.as_json(), indent=1) if arguments.json else "\n".join(_told(report)))
    return 0 if any(found.verdict != "too large" for found in report.fits) else 1


def outline_of(shelf: ModelShelf, entry: CatalogEntry, settings: Settings) -> Outline:
    """From its folder where it lies whole, else from the hub."""
    if shelf.state(entry).is_whole or entry.repo is None:
        folder = shelf.folder(entry)
        if not folder.is_dir():
            hint = f"`python launch.py models pull {entry.id}` makes it."
            raise AppError(404, "not_downloaded", f"{entry.id} is prepared by Fireside and not here yet.", hint=hint)
        return outline_of_folder(folder)
    return outline_of_repo(entry.repo, entry.revision, read_token(settings.home))


def machines(gpu_gb: float | None) -> list[Memory]:
    """What is free now, and an empty card: this one, or one of `gpu_gb`."""
    here = card()
    if here is None:
        empty = empty_card(gpu_gb or _DEFAULT_CARD_GB)
        return [empty] if gpu_gb else [computer(), empty]
    acting = here if gpu_gb is None else here.acting_as(gpu_gb)
    return [acting, acting.emptied()]


def _told(report: FitReport) -> Iterator[str]:
    yield f"{report.model}: {report.architecture}, {report.format}, {report.context_length:,} tokens of context"
    if report.window_layers:
        yield (
            f"{report.window_layers} of {report.num_layers} layers see {report.window:,} tokens; "
            "they keep all their KV cache for now, and are counted so."
        )
    per_1k = ", ".join(f"{name} {num / 1e6:.1f} MB" for name, num in report.kv_bytes_per_1k.items())
    yield f"KV cache of 1,000 tokens: {per_1k}\n"
    yield table(("", *(found.machine for found in report.fits)), list(_rows(report.fits)))
    for found in report.fits:
        for words in (*found.notes, *found.advice):
            yield f"\n{found.machine}: {words}"


def _rows(fits: tuple[Fit, ...]) -> Iterator[list[str]]:
    for name, words in (
        ("verdict", lambda f: f.verdict),
        ("memory", lambda f: _gb(f.total_bytes)),
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


COMMANDS = (Command("fit", "what a model takes and holds, before a download", _run, _arguments),)
