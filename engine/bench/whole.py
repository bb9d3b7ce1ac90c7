"""From the bench's options to an engine, and its parts with what surrounds them: the start and the memory."""

import argparse
import os
import re
import sys
import time
from dataclasses import asdict
from functools import partial
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
    stages = {"imports": _age_s()}
    with open_compilers(config) as processes:
        expected = expected_parts(config, checkpoint)
        runner = make_runner(config, checkpoint, partial(_put_down, stages), processes)
    start_s = _age_s()
    environment.settle_collector()
    bench = Bench(runner, config, sizes, options.load or DEFAULT_LOAD)
    result = {
        "model": config.model,
        "quantization": runner.info.quantization,
        "device": runner.info.device,
        "engine": {"start_s": start_s, "stages_s": stages},
        "parts": bench.run(options.parts or ",".join(PARTS)),
        "memory": _memory(runner.memory, expected),
    }
    if options.profile:
        from engine.bench.profile import profile

        result["profile"] = profile(runner, config)
    return result


def _age_s() -> float:
    """Of this process, the interpreter's own start included."""
    if sys.platform == "linux":  # psutil adds the ticks to the time of the boot, which is in whole seconds
        ticks = (
            Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        )  # after the name: man 5 proc_pid_stat
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - psutil.Process().create_time()


def _put_down(stages: dict[str, float], stage: str, fraction: float) -> None:
    """When each stage began, and the imports before them ended, in seconds of this process's age."""
    stages.setdefault(re.split(r",| \(", stage)[0], _age_s())


def _memory(report: MemoryReport, expected: Parts) -> dict[str, Any]:
    """What the model takes by part, and what was forecast of that before the load."""
    parts = {"weights_bytes": expected.weights, "workspace_bytes": expected.workspace, "graphs_bytes": expected.graphs}
    told = {"kv_tokens": report.kv_tokens, "notes": "; ".join(report.notes), "forecast": parts}
    return asdict(report) | told
