"""The memory plan: how many blocks, how long a context, and what is said where not all fits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import BadRequest, OutOfMemory
from engine.memory import CPU_KV_MOST_BYTES, CUDA_RESERVE_BYTES, Measured, MemoryPlan, check_weights_fit, plan_memory
from engine.model.kv_cache import KVCache, bytes_per_token
from engine.model.spec import AttentionSpec, FfnSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from engine.runner import _probe_tokens, load_runner
from kernels.device import Device
from tests.checkpoints import tiny_checkpoint

LAYER = LayerSpec(
    attention=AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeSpec(theta=10_000.0, rotary_dim=16), scale=0.25
    ),
    ffn=FfnSpec(intermediate_size=192),
)
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=259,
    hidden_size=64,
    layers=(LAYER, LAYER),
    norm=NormSpec(eps=1e-5),
    tie_word_embeddings=True,
    context_length=4096,
    dtype="float16",
)
BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # slots, keys and values, layers, KV heads, head_dim, fp32
GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Machine(Device):
    """A device of 10 GB."""

    free: int = 10 * GB

    def free_bytes(self) -> int:
        return self.free

    def total_bytes(self) -> int:
        return 10 * GB


def plan(kind: str = "cpu", *, free: int = 10 * GB, weights: int = GB, **options: Any) -> MemoryPlan:
    measured = Measured(free_at_start=free, weights=weights, workspace=0)
    machine = Machine(kind, "a machine", free=free)
    return plan_memory(
        EngineConfig(model="m", **options), SPEC, machine, measured, bytes_per_token(SPEC, torch.float32)
    )


def test_a_pool_is_never_larger_than_all_sequences_at_full_length_can_use() -> None:
    found = plan(max_num_seqs=3)
    assert (found.report.num_blocks, found.max_model_len, found.report.notes) == (3 * 4096 // 16, 4096, ())


@pytest.mark.parametrize(("free", "expected"), [(10**8, 10**8 // 4), (1000 * GB, CPU_KV_MOST_BYTES)])
def test_a_cpus_default_pool_is_a_quarter_of_free_memory_and_at_most_4_gb(free: int, expected: int) -> None:
    assert plan(free=free, max_num_seqs=10**6).report.num_blocks == expected // BLOCK_BYTES


def test_a_card_gives_its_share_less_weights_and_never_more_than_is_free_less_the_reserve() -> None:
    share = plan("cuda", gpu_memory_utilization=0.5, max_num_seqs=10**6).report
    assert share.num_blocks == (5 * GB - GB) // BLOCK_BYTES
    crowded = plan("cuda", free=3 * GB, gpu_memory_utilization=0.9, max_num_seqs=10**6).report
    assert crowded.num_blocks == (3 * GB - CUDA_RESERVE_BYTES - GB) // BLOCK_BYTES


def test_a_default_context_shrinks_to_the_pool_and_says_so_with_the_numbers() -> None:
    found = plan(kv_gb=100 * BLOCK_BYTES / GB)
    assert found.max_model_len == 1600
    (note,) = found.report.notes
    assert note.startswith("Context set to 1600 of the model's 4096 tokens: weights 1.00 GB")


@pytest.mark.parametrize("options", [{"kv_gb": 100 * BLOCK_BYTES / GB, "max_model_len": 2000}, {"kv_gb": 1e-6}])
def test_a_context_that_was_asked_for_or_a_useless_one_is_refused_instead(options: dict[str, Any]) -> None:
    with pytest.raises(OutOfMemory, match=r"does not fit: weights .* Ask for a smaller context"):
        plan(**options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
def test_what_is_planned_for_a_token_is_what_the_cache_takes(dtype: torch.dtype) -> None:
    cache = KVCache(SPEC, 7, 16, dtype, torch.device("cpu"), max_num_seqs=3)
    tensors = [t for kv in cache.layers for t in (kv.keys, kv.values, kv.key_scales, kv.value_scales) if t is not None]
    assert sum(tensor.nbytes for tensor in tensors) == 7 * 16 * bytes_per_token(SPEC, dtype)


def test_weights_that_cannot_fit_are_refused_before_they_are_read() -> None:
    machine = Machine("cuda", "a machine")
    config = EngineConfig(model="m", gpu_memory_utilization=0.5)
    check_weights_fit(config, machine, 5 * GB)
    with pytest.raises(OutOfMemory, match=r"The weights need 5\.10 GB; 5\.00 GB can be used"):
        check_weights_fit(config, machine, 51 * GB // 10)


def test_a_context_beyond_the_models_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    stages: list[str] = []
    with pytest.raises(BadRequest, match="max_model_len is 257; this model was trained for 256 tokens"):
        load_runner(
            EngineConfig(model=str(tmp_path), device="cpu", max_model_len=257),
            lambda stage, fraction: stages.append(stage),
        )
    assert any("compiled once" in stage and "later starts are quick" in stage for stage in stages)
    assert not any("weights" in stage for stage in stages)


@pytest.mark.parametrize(("num_sequences", "wanted"), [(32, 64), (4, 511), (1, 511), (4096, 1)])
def test_the_measured_step_leaves_its_sampled_tokens_a_place_in_the_context(num_sequences: int, wanted: int) -> None:
    assert _probe_tokens(2048, num_sequences, max_len=512) == wanted
