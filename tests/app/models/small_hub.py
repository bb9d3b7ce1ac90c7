"""A hub with a handful of models: what a search finds, and a tiny one that can be fetched whole."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tests.app.models.fake_hub import FakeHub, led_here, running

TINY = "Org/Tiny-GPTQ"
_AWQ = {"architectures": ["Qwen3ForCausalLM"], "quantization_config": {"quant_method": "awq"}}
_CARDS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-8B-AWQ": {
        "tags": ["safetensors", "awq", "license:apache-2.0"],
        "downloads": 9000,
        "config": _AWQ,
        "safetensors": {"parameters": {"I32": 868_000_000, "F16": 1_300_000_000}, "total": 2_168_000_000},
    },
    "big/Qwen3-235B-AWQ": {
        "tags": ["safetensors", "awq", "license:mit"],
        "downloads": 5,
        "config": _AWQ,
        "safetensors": {"parameters": {"I32": 30_000_000_000}, "total": 30_000_000_000},
        "gated": "auto",
    },
    "x/Qwen3-nf4": {
        "tags": ["safetensors"],
        "config": {"architectures": ["Qwen3ForCausalLM"], "quantization_config": {"quant_method": "bitsandbytes"}},
    },
    "x/Qwen3-silent-AWQ": {"tags": ["safetensors", "awq"], "config": _AWQ},
    "x/Qwen3.5-AWQ": {"tags": ["safetensors", "awq"], "config": _AWQ | {"architectures": ["Qwen35ForCausalLM"]}},
}


@contextmanager
def small_hub(files: Mapping[str, dict[str, bytes]], patch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """files: by repository. What this process asks of the hub comes here."""
    hub = FakeHub(files=dict(files), commits={repo: f"{at:040x}" for at, repo in enumerate(files, 1)}, cards=_CARDS)
    with running(hub):
        led_here(hub, patch)
        yield hub
