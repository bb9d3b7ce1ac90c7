"""From the bench's options to an engine, and its parts with what surrounds them: the start and the memory."""

import argparse
import time
from dataclasses import asdict
from typing import Any

import psutil

from engine import environment
from engine.bench.parts import DEFAULT_LOAD, PARTS, Bench, Sizes
from engine.bench.shapes import dummy_checkpoint
from engine.config import EngineConfig
from engine.loading import load_runner, make_runner
from engine.model_folder import model_folder
from engine.runner import ModelRunner
from engine.types import MemoryReport


def measure(options: argparse.Namespace, sizes: Sizes = Sizes()) -> dict[str, Any]:  # noqa: B008 (frozen)
    config = EngineConfig(
        model=options.shape or model_folder(options.model),
        device=options.device,
        kv_gb=options.kv_gb,
        max_num_seqs=options.max_num_seqs,
    )
    runner = _open_runner(options, config)
    start_s = time.time() - psutil.Process().create_time()
    environment.settle_collector()
    bench = Bench(runner, config, sizes, options.load or DEFAULT_LOAD)
    result = {
        "model": config.model,
        "quantization": runner.info.quantization,
        "device": runner.info.device,
        "engine": {"start_s": start_s},
        "parts": bench.run(options.parts or ",".join(PARTS)),
        "memory": _memory(runner.memory),
    }
    if options.profile:
        from engine.bench.profile import profile

        result["profile"] = profile(runner, config)
    return result


def _open_runner(options: argparse.Namespace, config: EngineConfig) -> ModelRunner:
    if options.shape:
        return make_runner(config, dummy_checkpoint(options.shape, options.quant), _ignore)
    return load_runner(config, _ignore)


def _ignore(stage: str, fraction: float) -> None:
    pass


def _memory(report: MemoryReport) -> dict[str, Any]:
    return asdict(report) | {"kv_tokens": report.kv_tokens, "notes": "; ".join(report.notes)}
