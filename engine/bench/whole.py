"""From the bench's options to an engine, and its parts with what surrounds them: the start and the memory."""

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from engine import environment
from engine.bench.parts import DEFAULT_LOAD, PARTS, Bench, Sizes
from engine.bench.shapes import dummy_checkpoint
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.loading import expected_parts, make_runner, open_compilers
from engine.memory import Parts
from engine.model_folder import model_folder
from engine.types import MemoryReport


def measure(options: argparse.Namespace, sizes: Sizes = Sizes()) -> dict[str, Any]:  # noqa: B008 (frozen)
    config = EngineConfig(
        model=options.shape or model_folder(options.model),
        device=options.device,
        kv_gb=options.kv_gb,
        gpu_memory_gb=options.gpu_memory_gb,
        max_num_seqs=options.max_num_seqs,
    )
    checkpoint = (
        dummy_checkpoint(options.shape, options.quant) if options.shape else open_checkpoint(Path(config.model))
    )
    with open_compilers(config) as processes:
        expected = expected_parts(config, checkpoint)
        runner = make_runner(config, checkpoint, _ignore, processes)
    start_s = time.time() - psutil.Process().create_time()
    environment.settle_collector()
    bench = Bench(runner, config, sizes, options.load or DEFAULT_LOAD)
    result = {
        "model": config.model,
        "quantization": runner.info.quantization,
        "device": runner.info.device,
        "engine": {"start_s": start_s},
        "parts": bench.run(options.parts or ",".join(PARTS)),
        "memory": _memory(runner.memory, expected),
    }
    if options.profile:
        from engine.bench.profile import profile

        result["profile"] = profile(runner, config)
    return result


def _ignore(stage: str, fraction: float) -> None:
    pass


def _memory(report: MemoryReport, expected: Parts) -> dict[str, Any]:
    """What the model takes by part, and what was forecast of that before the load."""
    parts = {"weights_bytes": expected.weights, "workspace_bytes": expected.workspace, "graphs_bytes": expected.graphs}
    told = {"kv_tokens": report.kv_tokens, "notes": "; ".join(report.notes), "forecast": parts}
    return asdict(report) | told
