"""The memory plan: how many blocks, how long a context, and what is said where not all fits."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.bench.shapes import SHAPES, dummy_checkpoint
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadRequest, OutOfMemory
from engine.forecast import GRAPH_SMALL_BYTES
from engine.layout import CacheLayout
from engine.loading import expected_parts, load_runner, make_runner
from engine.memory import (
    CPU_KV_MOST_BYTES,
    CUDA_RESERVE_BYTES,
    CacheSizes,
    MemoryPlan,
    Parts,
    cache_sizes,
    check_weights_fit,
    plan_cache,
    plan_memory,
    with_pool_of,
)
from engine.model.builder import DecoderBuilder, first_of_each_kind
from engine.model.decoder import Decoder
from engine.model.kv_cache import KVCache
from engine.model.spec import AttentionSpec, FfnSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from engine.probing import _largest, _within, compile_kernels, probe_plan
from engine.types import SamplingParams
from kernels.device import Device
from tests.checkpoints import tiny_checkpoint
from tests.engine.running import load, plan_of, prompt

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
_HALF_IN_WINDOWS = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 1}


@dataclass(frozen=True, slots=True)
class Machine(Device):
    """A device of 10 GB."""

    free: int = 10 * GB

    def free_bytes(self) -> int:
        return self.free

    def total_bytes(self) -> int:
        return 10 * GB


def plan(kind: str = "cpu", *, free: int = 10 * GB, weights: int = GB, **options: Any) -> MemoryPlan:
    parts = Parts(free_at_start=free, weights=weights, workspace=0)
    machine = Machine(kind, "a machine", free=free)
    return plan_memory(EngineConfig(model="m", **options), SPEC, machine, parts, cache_sizes(SPEC, "float32", 16, 512))


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


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("windows", [(None, None), (64, 64), (64, 64, None, 64, 64, None, 64)])
def test_what_is_planned_for_a_block_is_what_the_cache_takes(windows: tuple[int | None, ...], dtype: str) -> None:
    layers = tuple(replace(LAYER, attention=replace(LAYER.attention, window=window)) for window in windows)
    spec = replace(SPEC, layers=layers)
    cache = KVCache(spec, 7, 16, getattr(torch, dtype), torch.device("cpu"), max_num_seqs=3)
    assert cache.num_bytes == 7 * cache_sizes(spec, dtype, 16, 512).block_bytes
    assert len({id(layer.paged) for layer in cache.layers}) == 2, "a pair of tensors for each place in a group"


def test_a_plan_with_windows_holds_its_longest_sequence_and_says_which_places_stay_empty() -> None:
    layers = tuple(
        replace(LAYER, attention=replace(LAYER.attention, window=w)) for w in (64, 64, None, 64, 64, None, 64)
    )
    spec = replace(SPEC, layers=layers)
    sizes = cache_sizes(spec, "float32", 16, 32)
    config = EngineConfig(model="m", kv_gb=100 * sizes.block_bytes / GB, max_num_batched_tokens=32)
    found, _ = plan_cache(
        config, spec, Machine("cpu", "it"), Parts(free_at_start=GB, weights=0, workspace=0), "float32"
    )
    # Of 4 groups one keeps everything. The others hold 63 + 2 * 32 tokens at most, which lie in 9 blocks.
    assert found.report.num_blocks == 100 and found.max_model_len == (100 - 3 * 9) * 16
    assert sizes.layout.needed(found.max_model_len) == 100 < sizes.layout.needed(found.max_model_len + 1)
    assert any("of 8 places 1 stay empty" in note for note in found.report.notes)


def test_weights_larger_than_a_computers_memory_are_refused_before_they_are_read() -> None:
    machine = Machine("cpu", "a machine", free=5 * GB)
    check_weights_fit(machine, 5 * GB)
    with pytest.raises(OutOfMemory, match=r"The weights need 5\.10 GB; 5\.00 GB of 10\.00 GB are available"):
        check_weights_fit(machine, 51 * GB // 10)


class Shared(Machine):
    def holders(self) -> list[tuple[str, int]]:
        return [("game (pid 12)", 6 * GB)]


def test_a_model_that_does_not_fit_a_card_is_refused_by_part_with_who_holds_the_rest() -> None:
    parts = Parts(free_at_start=4 * GB, weights=3 * GB, workspace=GB // 2, graphs=GB // 10)
    sizes = CacheSizes(CacheLayout(16), block_bytes=16 * GB // 1000)
    with pytest.raises(OutOfMemory) as refused:
        plan_memory(EngineConfig(model="m"), SPEC, Shared("cuda", "a card"), parts, sizes)
    assert refused.value.message == (
        "The model does not fit: weights 3.00 GB, workspace 0.50 GB, CUDA graphs 0.10 GB and the smallest KV cache "
        "0.26 GB need 3.86 GB; 3.46 GB can be used (4.00 GB free of 10.00 GB on a card, of which 0.54 GB stay in "
        "reserve; gpu_memory_utilization is 0.9). Memory is held by game (pid 12) 6.00 GB. Close other programs, or "
        "choose a smaller model."
    )


@pytest.mark.parametrize(
    ("options", "free", "int8"),
    [
        ({}, 9 * GB, False),
        ({}, 2 * GB, True),
        ({"max_model_len": 1000}, 2 * GB, False),
        ({"kv_cache_dtype": "fp16"}, 2 * GB, False),
    ],
)
def test_a_cache_in_int8_is_chosen_where_16_bits_hold_too_little(
    options: dict[str, Any], free: int, int8: bool
) -> None:
    large = replace(SPEC, layers=(LAYER,) * 2000, context_length=10_000)  # 256 KB a token in 16 bits
    parts = Parts(free_at_start=free, weights=GB // 2, workspace=0)
    found, dtype = plan_cache(EngineConfig(model="m", **options), large, Machine("cuda", "a card"), parts, "float16")
    assert dtype == ("int8" if int8 else "float16")
    told = "KV cache in int8: in 16 bits it would hold less than 8192 tokens."
    assert (told in found.report.notes) == int8


@pytest.mark.parametrize(
    ("family", "fmt"),
    [
        *(("llama", fmt) for fmt in ("dense", "gptq", "gptq_3bit", "awq_gemm_sym", "awq_gemv", "awq_gemv_fast")),
        *(("llama", fmt) for fmt in ("awq_gemm", "compressed", "compressed_sym_channel")),
        *((family, "gptq") for family in ("llama3", "gemma3", "qwen3_moe")),
    ],
)
def test_weights_are_forecast_from_the_headers_within_5_percent(tmp_path: Path, family: str, fmt: str) -> None:
    tiny_checkpoint(tmp_path, family, fmt)
    head = "on" if fmt in ("gptq", "dense") else "off"
    config = EngineConfig(model=str(tmp_path), device="cpu", kv_gb=0.001, quantize_lm_head=head)
    runner = load_runner(config, lambda stage, fraction: None)
    checkpoint = open_checkpoint(tmp_path)
    parts = expected_parts(config, checkpoint)
    assert parts.weights == pytest.approx(runner.memory.weights_bytes, rel=0.05)
    assert parts.workspace == pytest.approx(runner.memory.workspace_bytes, rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["gptq", "awq", "none"])
def test_on_a_card_the_forecast_is_within_5_percent_of_what_is_taken(
    quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of two layers and the widths of Llama 3.1 8B."""
    monkeypatch.setitem(SHAPES, "two layers", SHAPES["llama3.1-8b"] | {"num_hidden_layers": 2})
    config = EngineConfig(model="two layers", device="cuda", gpu_memory_gb=24, max_num_seqs=32)
    checkpoint = dummy_checkpoint("two layers", quant)
    expected = expected_parts(config, checkpoint)
    runner = make_runner(config, checkpoint, lambda stage, fraction: None)
    for part in ("weights", "workspace", "graphs"):
        assert getattr(expected, part) == pytest.approx(getattr(runner.memory, f"{part}_bytes"), rel=0.05), part
    assert runner.memory.total_bytes == 24 * 2**30


@pytest.mark.gpu
def test_what_the_report_says_is_what_the_process_takes(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama", "gptq")
    torch.cuda.init()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    runner = load(tmp_path, "cuda", dtype="float16", gpu_memory_utilization=0.9, kv_gb=1)
    memory = runner.memory
    taken = torch.cuda.memory_reserved() - held + memory.kv_bytes  # which torch knows nothing of
    at_once = memory.weights_bytes + memory.kv_bytes + memory.graphs_bytes - GRAPH_SMALL_BYTES
    assert at_once <= taken <= at_once + GRAPH_SMALL_BYTES + memory.workspace_bytes + memory.reserve_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 64])
def test_a_running_engine_gives_memory_back_and_its_answers_stay(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who were there before hold the first blocks in the prefix cache, so that others have to move."""
    if window:
        monkeypatch.setitem(SHAPES, "tiny", SHAPES["tiny"] | _HALF_IN_WINDOWS | {"sliding_window": window})
    config = EngineConfig(model="tiny", device="cuda", kv_gb=0.2, max_num_seqs=8)
    runner = make_runner(config, dummy_checkpoint("tiny", "gptq"), lambda stage, fraction: None)
    before = [tuple(prompt(2000, seed=100 + i)) for i in range(8)]
    prompts = [tuple(prompt(30 + i, seed=i)) for i in range(6)]

    def answers(sizes: list[int]) -> list[list[int]]:
        engine = Engine(runner, EngineConfig(model="m"))
        _run(engine, before, 1, [])
        return _run(engine, prompts, 60, list(sizes))

    whole = runner.memory.kv_bytes
    assert answers([]) == answers([whole // 2, whole - 2**24, 0])
    assert runner.memory.kv_bytes == whole


def _run(engine: Engine, prompts: list[tuple[int, ...]], new_tokens: int, sizes: list[int]) -> list[list[int]]:
    """Greedy answers; every ten steps the KV cache gives back the next of `sizes`, which the driver confirms."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    for index, tokens in enumerate(prompts):
        engine.add(str(index), tokens, params)
    found: list[list[int]] = [[] for _ in prompts]
    steps = 0
    while engine.has_work:
        events = engine.step()
        steps += 1
        if steps % 10 == 0 and sizes:
            free, before = torch.cuda.mem_get_info()[0], engine.memory.kv_bytes
            events = [*events, *engine.resize_kv(sizes.pop(0))]
            given_back = before - engine.memory.kv_bytes
            assert torch.cuda.mem_get_info()[0] - free == pytest.approx(given_back, abs=2**25)
        for event in events:
            if event.token_id is not None:
                found[int(event.request_id)].append(event.token_id)
        engine.check()
    return found


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
    assert _largest(EngineConfig(model="m", max_num_seqs=num_sequences), 2048, max_len=512) == (wanted,) * num_sequences


def test_kernels_are_compiled_by_steps_that_leave_no_trace(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "gemma3", "dense")
    runner = load(tmp_path, max_num_seqs=20)
    config, device = EngineConfig(model="m", max_num_seqs=20), Device("cpu", "a CPU")
    plan = plan_of(runner, [(prompt(9), 0, 9)])
    before = runner.logits(plan)
    compile_kernels(config, runner._decoder, device, torch.float32, ())()
    assert torch.equal(runner.logits(plan), before)


def test_a_layer_of_each_kind_is_there_before_the_others(tmp_path: Path) -> None:
    """Of two kinds in four layers: read once each, and the same tensors as in the whole."""
    tiny_checkpoint(tmp_path, "gemma3", "dense")
    checkpoint = open_checkpoint(tmp_path)
    layers = checkpoint.spec.layers * 2
    assert first_of_each_kind(layers) == [0, 1]
    reader, seen = checkpoint.open_reader(torch.device("cpu")), list[Decoder]()
    builder = DecoderBuilder(checkpoint.spec, reader, None, torch.device("cpu"), torch.float32, quantizes_head=False)
    counts: list[int] = []
    whole = builder.build(64, counts.append, seen.append)
    (few,) = seen
    assert [layer in whole.layers for layer in few.layers] == [True, True] and few.head is whole.head
    assert counts == [1, 2] and whole.max_len == 64


def test_the_measured_step_takes_no_more_blocks_than_there_are() -> None:
    probe = probe_plan((40, 1, 17), 16, 1)
    tables = [sequence.block_tables[0] for sequence in _within(probe, 4).sequences]
    assert tables == [(0, 1, 2), (3,), (0, 1)]
    assert _within(probe, 6) == probe


def test_a_pool_that_is_there_is_told_with_the_parts_that_were_measured() -> None:
    forecast, measured = (plan("cuda", weights=weights, max_num_seqs=10**6) for weights in (2 * GB, GB))
    told = with_pool_of(forecast, measured)
    assert forecast.report.num_blocks < measured.report.num_blocks
    assert told.report.num_blocks == forecast.report.num_blocks and told.report.weights_bytes == GB
    assert told.max_model_len == forecast.max_model_len
