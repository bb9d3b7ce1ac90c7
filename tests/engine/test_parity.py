"""The engine's logits and greedy tokens are transformers', for every family and format, through the real paged path."""

import json
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.plan import BatchPlan, ScheduledSequence
from engine.runner import ModelRunner, load_runner
from engine.types import SamplingParams
from tests.checkpoints import FAMILIES, FORMATS, tiny_checkpoint

# fp32 sums in another order: 2 layers of sums over 64 to 192 terms differ by some 1e-6 of their size; ten times that
# still tells any wrong element.
_TOLERANCE = 1e-5

_DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_every_device = pytest.mark.parametrize("device", _DEVICES)


def _config(folder: Path, device: str = "cpu", **options: object) -> EngineConfig:
    options = {"kv_gb": 0.01, "gpu_memory_utilization": 0.05, "dtype": "float32", **options}
    return EngineConfig(model=str(folder), device=device, **options)


def _load(folder: Path, device: str = "cpu", **options: object) -> ModelRunner:
    return load_runner(_config(folder, device, **options), lambda stage, fraction: None)


def _logits_in_chunks(runner: ModelRunner, tokens: list[int], chunk: int) -> torch.Tensor:
    """Logits after the last token, the prompt fed in chunks into scattered blocks."""
    blocks = tuple(reversed(range(3, 3 + -(-len(tokens) // runner.memory.block_size))))
    for start in range(0, len(tokens), chunk):
        part = tuple(tokens[start : start + chunk])
        is_last = start + chunk >= len(tokens)
        plan = ScheduledSequence(
            "a", 0, 0, part, False, start, blocks, is_last, len(tokens), SamplingParams(temperature=0.0), 0
        )
        logits = runner.logits(BatchPlan((plan,)))
    return logits[0].cpu()


def _prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@torch.inference_mode()
def _error_against_transformers(runner: ModelRunner, model: torch.nn.Module, chunk: int) -> float:
    tokens = _prompt(101)
    theirs = model(torch.tensor([tokens])).logits[0, -1]
    return _relative_error(_logits_in_chunks(runner, tokens, chunk), theirs)


@on_every_device
@pytest.mark.parametrize("chunk", [101, 16, 7, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_for_every_family_and_chunk_size(
    tmp_path: Path, family: str, chunk: int, device: str
) -> None:
    model = tiny_checkpoint(tmp_path, family)
    assert _error_against_transformers(_load(tmp_path, device), model, chunk) < _TOLERANCE


@on_every_device
@pytest.mark.parametrize("fmt", FORMATS[1:])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_equal_transformers_on_the_dequantised_weights_for_every_format(
    tmp_path: Path, family: str, fmt: str, device: str
) -> None:
    model = tiny_checkpoint(tmp_path, family, fmt)
    runner = _load(tmp_path, device)
    assert _error_against_transformers(runner, model, chunk=101) < _TOLERANCE  # expanded once, one dense product
    assert _error_against_transformers(runner, model, chunk=13) < _TOLERANCE  # packed, several rows
    assert _error_against_transformers(runner, model, chunk=1) < _TOLERANCE  # packed, one row


def test_a_sharded_checkpoint_gives_the_same_logits(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "whole", "qwen3")
    tiny_checkpoint(tmp_path / "sharded", "qwen3", shards=3)
    whole, sharded = (_logits_in_chunks(_load(tmp_path / name), _prompt(20), 20) for name in ("whole", "sharded"))
    assert torch.equal(whole, sharded)


def _edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("family", "mistake"),
    [
        ("llama", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}),
        ("llama", {"rms_norm_eps": 0.5}),
        ("llama3", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}),
        ("llama3", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 8.0}}),
    ],
)
def test_a_mistaken_config_moves_the_logits(tmp_path: Path, family: str, mistake: dict[str, object]) -> None:
    model = tiny_checkpoint(tmp_path, family)
    _edit_config(tmp_path, **mistake)
    assert _error_against_transformers(_load(tmp_path), model, chunk=101) > 100 * _TOLERANCE


@pytest.mark.parametrize(
    ("fmt", "mistake"), [("gptq", {"checkpoint_format": "gptq_v2"}), ("awq_gemm", {"version": "?"})]
)
def test_a_mistaken_format_moves_the_logits_or_is_refused(tmp_path: Path, fmt: str, mistake: dict[str, str]) -> None:
    model = tiny_checkpoint(tmp_path, "llama", fmt)
    config = json.loads((tmp_path / "config.json").read_text())
    _edit_config(tmp_path, quantization_config={**config["quantization_config"], **mistake})
    if "version" in mistake:
        with pytest.raises(Exception, match="version='\\?' is not supported"):
            _load(tmp_path)
    else:
        assert _error_against_transformers(_load(tmp_path), model, chunk=101) > 100 * _TOLERANCE


def _solo(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' greedy continuation, recomputed from scratch each step."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _run_all(engine: Engine, prompts: dict[str, list[int]], num_tokens: int, stagger: int = 0) -> dict[str, list[int]]:
    """Greedy tokens of all prompts at once; with `stagger`, one more joins every so many steps."""
    out: dict[str, list[int]] = {name: [] for name in prompts}
    waiting = list(prompts.items())
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    step = 0
    while waiting or engine.has_work:
        while waiting and (not stagger or step % stagger == 0):
            name, prompt = waiting.pop(0)
            engine.add(name, tuple(prompt), params)
            if stagger:
                break
        for event in engine.step():
            out[event.request_id].append(event.token_id)
        engine.check()
        step += 1
    return out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("fmt", FORMATS)
def test_16_bit_arithmetic_on_a_card_stays_close(tmp_path: Path, fmt: str) -> None:
    model = tiny_checkpoint(tmp_path, "llama", fmt)
    # fp16 has 11 bits: 5e-4 a rounding, some dozens of them in two layers.
    assert _error_against_transformers(_load(tmp_path, "cuda", dtype="float16"), model, chunk=7) < 2e-2


@on_every_device
@pytest.mark.parametrize("fmt", ["dense", "gptq", "awq_gemm"])
@pytest.mark.parametrize(
    ("options", "stagger"),
    [({}, 0), ({"max_num_batched_tokens": 7}, 0), ({}, 3), ({"max_num_seqs": 3}, 2)],
    ids=["batched", "odd chunks", "staggered", "few seats"],
)
def test_greedy_tokens_do_not_depend_on_company_or_chunks(
    tmp_path: Path, fmt: str, options: dict[str, int], stagger: int, device: str
) -> None:
    model = tiny_checkpoint(tmp_path, "llama", fmt)
    prompts = {f"r{i}": _prompt(5 + 9 * i, seed=i) for i in range(8)}
    config = _config(tmp_path, device, **options)
    engine = Engine(load_runner(config, lambda stage, fraction: None), config)
    ours = _run_all(engine, prompts, num_tokens=40, stagger=stagger)
    assert ours == {name: _solo(model, prompt, 40) for name, prompt in prompts.items()}


def test_greedy_tokens_do_not_depend_on_preemption(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama", "gptq")
    prompts = {f"r{i}": _prompt(5 + 9 * i, seed=i) for i in range(4)}
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4  # slots, keys and values, layers, KV heads, head_dim, fp32
    config = _config(tmp_path, kv_gb=24 * block_bytes / 1e9)
    engine = Engine(load_runner(config, lambda stage, fraction: None), config)
    ours = _run_all(engine, prompts, num_tokens=180)  # 4 x 190 tokens want 48 blocks
    assert engine.stats().num_blocks_total == 24
    assert engine.stats().num_preemptions > 0
    assert ours == {name: _solo(model, prompt, 180) for name, prompt in prompts.items()}
