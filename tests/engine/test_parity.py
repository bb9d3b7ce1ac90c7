"""The engine's logits and greedy tokens are transformers', for every family and format, through the real paged path."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine import checkpoint
from engine.engine import Engine
from engine.loading import load_runner
from engine.model.architectures import read_spec
from engine.model.spec import FfnSpec, ModelSpec, MoeSpec
from engine.runner import ModelRunner
from engine.types import SamplingParams
from engine.weights.reader import SafetensorsReader
from tests.checkpoints import FAMILIES, FORMATS, MIXTURES, STRETCHED, tiny_checkpoint
from tests.engine.running import edit_config, engine_config, load, logits_in_chunks, plan_of, prompt, relative_error

# fp32 sums in another order: 2 layers of sums over 64 to 192 terms differ by some 1e-6 of their size; ten times that
# still tells any wrong element.
_TOLERANCE = 1e-5
_MIXTURE_TOLERANCE = 1e-4  # the experts' shares are added in another order, too

_DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_every_device = pytest.mark.parametrize("device", _DEVICES)


@torch.inference_mode()
def _error_against_transformers(runner: ModelRunner, model: torch.nn.Module, chunk: int) -> float:
    tokens = prompt(101)
    theirs = model(torch.tensor([tokens])).logits[0, -1]
    return relative_error(logits_in_chunks(runner, tokens, chunk), theirs)


def _tolerance(family: str) -> float:
    return _MIXTURE_TOLERANCE if family in MIXTURES else _TOLERANCE


@on_every_device
@pytest.mark.parametrize("chunk", [101, 16, 7, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_for_every_family_and_chunk_size(
    tmp_path: Path, family: str, chunk: int, device: str
) -> None:
    model = tiny_checkpoint(tmp_path, family)
    assert _error_against_transformers(load(tmp_path, device), model, chunk) < _tolerance(family)


@on_every_device
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_of_a_mixed_batch_equal_transformers_for_every_family(tmp_path: Path, family: str, device: str) -> None:
    """In one step: a whole prompt, the rest of a long one, one token far past the window, and one before it."""
    model = tiny_checkpoint(tmp_path, family)
    runner = load(tmp_path, device)
    lengths, cached = (37, 90, 101, 9), (0, 50, 100, 8)
    ours = _logits_of_batch(runner, [prompt(n, seed=n) for n in lengths], cached)
    for row, n in zip(ours, lengths, strict=True):
        theirs = model(torch.tensor([prompt(n, seed=n)])).logits[0, -1]
        assert relative_error(row, theirs) < _tolerance(family), f"{n} tokens"


def _logits_of_batch(runner: ModelRunner, prompts: list[list[int]], cached: Sequence[int]) -> torch.Tensor:
    """Logits after each prompt; `cached` tokens of each are computed a step before the others, all at once."""
    runner.logits(plan_of(runner, [(p[:n], 0, len(p)) for p, n in zip(prompts, cached, strict=True)]))
    return runner.logits(plan_of(runner, [(p[n:], n, len(p)) for p, n in zip(prompts, cached, strict=True)])).cpu()


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3", "mixtral", "qwen3_moe"])
def test_tiny_checkpoints_have_the_tensors_that_transformers_writes(tmp_path: Path, family: str) -> None:
    model = tiny_checkpoint(tmp_path / "ours", family)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
    assert all(torch.equal(ours[name].float(), theirs[name]) for name in ours)


@on_every_device
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(MIXTURES)))  # a mixture may choose another expert
def test_16_bit_arithmetic_stays_close_for_every_family(tmp_path: Path, family: str, device: str) -> None:
    model = tiny_checkpoint(tmp_path, family)
    # 11 bits of fp16 round by 5e-4 and 8 of bf16 by 4e-3, some dozens of them in two layers.
    dtype, bound = ("bfloat16", 1e-1) if family.startswith("gemma") else ("float16", 2e-2)
    assert _error_against_transformers(load(tmp_path, device, dtype=dtype), model, chunk=7) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(MIXTURES)))
@torch.inference_mode()
def test_a_cards_kernels_stay_close_in_every_type_of_numbers_and_cache(
    tmp_path: Path, family: str, dtype: str, kv_cache_dtype: str
) -> None:
    """One prompt in chunks and by single tokens, then a mixed batch: whole, in part, past the window and before it."""
    if dtype == "float16" and family.startswith("gemma"):
        pytest.skip("its activations leave float16's range")
    model = tiny_checkpoint(tmp_path, family)
    runner = load(tmp_path, "cuda", dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    bound = {"float16": 2e-2, "bfloat16": 1e-1}[dtype] + (4e-2 if kv_cache_dtype == "int8" else 0)
    for chunk in (101, 40, 7, 1):
        assert _error_against_transformers(runner, model, chunk) < bound
    lengths, cached = (37, 90, 101, 9), (0, 50, 100, 8)
    ours = _logits_of_batch(runner, [prompt(n, seed=n) for n in lengths], cached)
    for row, n in zip(ours, lengths, strict=True):
        assert relative_error(row, model(torch.tensor([prompt(n, seed=n)])).logits[0, -1]) < bound


@on_every_device
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral"])
def test_an_int8_kv_cache_stays_close(tmp_path: Path, family: str, device: str) -> None:
    """Keys and values are rounded by up to 1 / 254 of the largest of a head, 4e-3; fp32 around them adds nothing."""
    model = tiny_checkpoint(tmp_path, family)
    for chunk in (101, 7):
        error = _error_against_transformers(load(tmp_path, device, kv_cache_dtype="int8"), model, chunk)
        assert 1e-4 < error < 4e-2  # random layers multiply it; a scale of another head gives 0.3 and more


@on_every_device
@pytest.mark.parametrize("fmt", FORMATS[1:])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_equal_transformers_on_the_dequantised_weights_for_every_format(
    tmp_path: Path, family: str, fmt: str, device: str
) -> None:
    model = tiny_checkpoint(tmp_path, family, fmt)
    runner = load(tmp_path, device)
    assert _error_against_transformers(runner, model, chunk=101) < _TOLERANCE  # expanded once, one dense product
    assert _error_against_transformers(runner, model, chunk=13) < _TOLERANCE  # packed, several rows
    assert _error_against_transformers(runner, model, chunk=1) < _TOLERANCE  # packed, one row


@on_every_device
@pytest.mark.parametrize("fmt", ["gptq", "gptq_act_order", "awq_gemm"])
@pytest.mark.parametrize("family", ["phi3", "gemma2", "mixtral", "qwen3_moe"])
def test_logits_equal_transformers_where_projections_are_fused_or_experts_quantised(
    tmp_path: Path, family: str, fmt: str, device: str
) -> None:
    model = tiny_checkpoint(tmp_path, family, fmt)
    assert _error_against_transformers(load(tmp_path, device), model, chunk=13) < _tolerance(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_checkpoint_gives_the_same_logits(tmp_path: Path, family: str) -> None:
    tiny_checkpoint(tmp_path / "whole", family)
    tiny_checkpoint(tmp_path / "sharded", family, shards=3)
    whole, sharded = (logits_in_chunks(load(tmp_path / name), prompt(40), 40) for name in ("whole", "sharded"))
    assert torch.equal(whole, sharded)


@on_every_device
@pytest.mark.parametrize(("max_model_len", "num_tokens"), [(64, 50), (64, 64), (101, 101), (256, 256)])
@pytest.mark.parametrize("family", STRETCHED)
@torch.inference_mode()
def test_stretched_angles_are_those_of_transformers_at_the_longest_that_a_sequence_may_become(
    tmp_path: Path, family: str, max_model_len: int, num_tokens: int, device: str
) -> None:
    """Up to the original length for every prompt; beyond it transformers turns all keys anew at every length."""
    model = tiny_checkpoint(tmp_path, family)
    runner = load(tmp_path, device, max_model_len=max_model_len)
    tokens = prompt(num_tokens)
    theirs = model(torch.tensor([tokens])).logits[0, -1]
    assert relative_error(logits_in_chunks(runner, tokens, 50), theirs) < _TOLERANCE


@pytest.mark.parametrize("family", STRETCHED)
def test_a_context_that_stretches_the_angles_is_told(tmp_path: Path, family: str) -> None:
    tiny_checkpoint(tmp_path, family)
    assert load(tmp_path, max_model_len=64).memory.notes == ()
    (note,) = load(tmp_path, max_model_len=65).memory.notes
    assert "65" in note and "64" in note


def test_angles_are_those_of_the_context_that_fits(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama_dynamic")
    edit_config(tmp_path, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0})
    token_bytes = 2 * 2 * 2 * 16 * 4  # keys and values, layers, KV heads, head_dim, fp32
    fitted = load(tmp_path, kv_gb=272 * token_bytes / 1e9)
    assert fitted.info.max_model_len == 272
    asked = load(tmp_path, max_model_len=272)
    assert torch.equal(*(logits_in_chunks(runner, prompt(40), 40) for runner in (fitted, asked)))
    assert _error_against_transformers(fitted, model, 101) > 100 * _TOLERANCE


Mistake = Callable[[ModelSpec], ModelSpec]


def _in_model(**changes: object) -> Mistake:
    return lambda spec: replace(spec, **changes)


def _in_norms(**changes: object) -> Mistake:
    return lambda spec: replace(spec, norm=replace(spec.norm, **changes))


def _in_names(**changes: object) -> Mistake:
    return lambda spec: replace(spec, names=replace(spec.names, **changes))


def _in_attention(**changes: object) -> Mistake:
    return lambda spec: _map_layers(spec, lambda layer: replace(layer, attention=replace(layer.attention, **changes)))


def _in_windows(change: Callable[[int], int | None]) -> Mistake:
    def in_layer(layer):
        window = layer.attention.window
        return replace(layer, attention=replace(layer.attention, window=window and change(window)))

    return lambda spec: _map_layers(spec, in_layer)


def _in_rope(**changes: object) -> Mistake:
    def in_layer(layer):
        return replace(layer, attention=replace(layer.attention, rope=replace(layer.attention.rope, **changes)))

    return lambda spec: _map_layers(spec, in_layer)


def _in_ffn(kind: type, **changes: object) -> Mistake:
    def in_layer(layer):
        return replace(layer, ffn=replace(layer.ffn, **changes)) if isinstance(layer.ffn, kind) else layer

    return lambda spec: _map_layers(spec, in_layer)


def _map_layers(spec: ModelSpec, change) -> ModelSpec:
    return replace(spec, layers=tuple(map(change, spec.layers)))


def _turned(spec: ModelSpec) -> ModelSpec:
    """The layers' attention in the wrong order: which has the window, which the local angles."""
    first, second = spec.layers
    return replace(
        spec,
        layers=(replace(first, attention=second.attention), replace(second, attention=first.attention)),
    )


_NO_WINDOW, _ONE_MORE, _ONE_LESS = (
    _in_windows(change) for change in (lambda w: None, lambda w: w + 1, lambda w: w - 1)
)

# What a reader of configs or a decoder could get wrong: each moves the logits far beyond the tolerance, so that parity
# is known to see it. Every field of the spec that a family sets away from its default has a row.
MISTAKES: dict[tuple[str, str], Mistake] = {
    ("llama", "theta"): _in_rope(theta=500.0),
    ("llama", "eps"): _in_norms(eps=0.5),
    ("llama", "scale"): _in_attention(scale=0.3),
    ("llama3", "plain angles"): _in_rope(kind="default"),
    ("llama3", "all waves stretched"): _in_rope(kind="linear"),
    ("llama3", "other blend"): _in_rope(high_freq_factor=8.0),
    ("llama_yarn", "plain angles"): _in_rope(kind="default"),
    ("llama_yarn", "no temperature"): _in_rope(attention_factor=1.0),
    ("llama_yarn", "ramp not rounded"): _in_rope(truncate=False),
    ("llama_yarn", "ramp elsewhere"): _in_rope(beta_slow=4.0),
    ("mistral", "no window"): _NO_WINDOW,
    ("mistral", "window one larger"): _ONE_MORE,
    ("mistral", "window one smaller"): _ONE_LESS,
    ("qwen2_window", "no window"): _NO_WINDOW,
    ("qwen2_window", "window in the other layer"): _turned,
    ("qwen3", "scale of hidden / heads"): _in_attention(scale=16**-0.5),
    ("qwen3", "no norm of queries and keys"): _in_attention(qk_norm=False),
    ("phi3", "window one larger"): _ONE_MORE,
    ("phi3_longrope", "short factors"): _in_rope(original_length=256),
    ("phi3_longrope", "no temperature"): _in_rope(attention_factor=1.0),
    ("phi3_longrope", "plain angles"): _in_rope(kind="default"),
    ("phi3_longrope", "whole heads rotated"): _in_rope(kind="default", rotary_dim=16),
    ("gemma2", "norms without offset"): _in_norms(unit_offset=False),
    ("gemma2", "embedding not scaled"): _in_model(embedding_scale=1.0),
    ("gemma2", "scores not capped"): _in_attention(softcap=None),
    ("gemma2", "logits not capped"): _in_model(logit_softcap=None),
    ("gemma2", "scale of head_dim"): _in_attention(scale=32**-0.5),
    ("gemma2", "no window"): _NO_WINDOW,
    ("gemma2", "window one larger"): _ONE_MORE,
    ("gemma2", "window one smaller"): _ONE_LESS,
    ("gemma2", "window in the other layer"): _turned,
    ("gemma2", "SiLU"): _in_ffn(FfnSpec, activation="silu"),
    ("gemma2", "no norm after attention"): _in_names(after_attention_norm=None),
    ("gemma2", "no norm after the feed-forward"): _in_names(after_ffn_norm=None),
    ("gemma2", "norms as Llama names them"): _in_names(ffn_norm="post_attention_layernorm"),
    ("gemma3", "one theta for all layers"): _in_rope(theta=10_000.0),
    ("gemma3", "no layer's angles stretched"): _in_rope(kind="default"),
    ("gemma3", "all layers' angles stretched"): _in_rope(kind="linear", factor=8.0),
    ("gemma3", "no norm of queries and keys"): _in_attention(qk_norm=False),
    ("gemma3", "window in the other layer"): _turned,
    ("gemma3", "window one larger"): _ONE_MORE,
    ("mixtral", "weights of the chosen do not sum to 1"): _in_ffn(MoeSpec, renormalise=False),
    ("mixtral", "one expert a token"): _in_ffn(MoeSpec, num_chosen=1),
    ("mixtral", "gate and up exchanged"): _in_names(expert_gate_up=("w3", "w1")),
    ("mixtral", "window one smaller"): _ONE_LESS,
    ("qwen3_moe", "weights of the chosen do not sum to 1"): _in_ffn(MoeSpec, renormalise=False),
    ("qwen3_moe_raw", "weights of the chosen sum to 1"): _in_ffn(MoeSpec, renormalise=True),
    ("qwen3_moe_raw", "three experts a token"): _in_ffn(MoeSpec, num_chosen=3),
}


@pytest.mark.parametrize(("family", "mistake"), MISTAKES, ids=lambda part: part)
def test_a_mistaken_spec_moves_the_logits(
    tmp_path: Path, family: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_checkpoint(tmp_path, family)
    monkeypatch.setattr(checkpoint, "read_spec", lambda config: MISTAKES[family, mistake](read_spec(config)))
    monkeypatch.setattr(SafetensorsReader, "unused", lambda reader: [])  # tensors that the mistaken model does not have
    assert _error_against_transformers(load(tmp_path), model, chunk=101) > 100 * _tolerance(family)


@pytest.mark.parametrize(
    ("fmt", "mistake"), [("gptq", {"checkpoint_format": "gptq_v2"}), ("awq_gemm", {"version": "?"})]
)
def test_a_mistaken_format_moves_the_logits_or_is_refused(tmp_path: Path, fmt: str, mistake: dict[str, str]) -> None:
    model = tiny_checkpoint(tmp_path, "llama", fmt)
    config = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, quantization_config={**config["quantization_config"], **mistake})
    if "version" in mistake:
        with pytest.raises(Exception, match="version='\\?' is not supported"):
            load(tmp_path)
    else:
        assert _error_against_transformers(load(tmp_path), model, chunk=101) > 100 * _TOLERANCE


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
@pytest.mark.parametrize(
    ("family", "fmt"), [*(("llama", fmt) for fmt in FORMATS), ("mixtral", "gptq"), ("qwen3_moe", "awq_gemm")]
)
def test_16_bit_arithmetic_on_a_card_stays_close(tmp_path: Path, family: str, fmt: str) -> None:
    model = tiny_checkpoint(tmp_path, family, fmt)
    # fp16 has 11 bits: 5e-4 a rounding, some dozens of them in two layers.
    assert _error_against_transformers(load(tmp_path, "cuda", dtype="float16"), model, chunk=7) < 2e-2


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
    prompts = {f"r{i}": prompt(5 + 9 * i, seed=i) for i in range(8)}
    config = engine_config(tmp_path, device, **options)
    engine = Engine(load_runner(config, lambda stage, fraction: None), config)
    ours = _run_all(engine, prompts, num_tokens=40, stagger=stagger)
    assert ours == {name: _solo(model, prompt, 40) for name, prompt in prompts.items()}


@on_every_device
@pytest.mark.parametrize("family", ["gemma2", "gemma3_deep", "qwen3_moe"])
def test_greedy_tokens_of_windows_and_experts_do_not_depend_on_company(
    tmp_path: Path, family: str, device: str
) -> None:
    model = tiny_checkpoint(tmp_path, family)
    prompts = {f"r{i}": prompt(5 + 19 * i, seed=i) for i in range(4)}
    config = engine_config(tmp_path, device, max_num_batched_tokens=7)
    engine = Engine(load_runner(config, lambda stage, fraction: None), config)
    ours = _run_all(engine, prompts, num_tokens=20, stagger=3)
    assert ours == {name: _solo(model, prompt, 20) for name, prompt in prompts.items()}


def test_greedy_tokens_do_not_depend_on_preemption(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama", "gptq")
    prompts = {f"r{i}": prompt(5 + 9 * i, seed=i) for i in range(4)}
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4  # slots, keys and values, layers, KV heads, head_dim, fp32
    config = engine_config(tmp_path, kv_gb=24 * block_bytes / 1e9)
    engine = Engine(load_runner(config, lambda stage, fraction: None), config)
    ours = _run_all(engine, prompts, num_tokens=180)  # 4 x 190 tokens want 48 blocks
    assert engine.stats().num_blocks_total == 24
    assert engine.stats().num_preemptions > 0
    assert ours == {name: _solo(model, prompt, 180) for name, prompt in prompts.items()}
