"""A Linear made of packed modules multiplies by the weights that its checkpoint stands for, or says why it does not."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import BadCheckpoint, EngineError
from engine.loading import load_runner
from engine.quant.base import QuantizedTensors
from engine.quant.check import ProductCheck
from engine.quant.formats import open_format
from engine.quant.kept import KeptWeights
from engine.quant.linear import (
    DenseLinear,
    Linear,
    LinearLoader,
    SplitLinear,
    W4Linear,
    packed_weights,
    with_activation,
)
from kernels import ops
from kernels.gpu.planar import PlanarWeight, can_hold, pack_planar
from tests import packers
from tests.checkpoints import tiny_checkpoint
from tests.engine.quant.memory_reader import MemoryReader
from tests.kernels.gpu.weights import numbers
from tests.kernels.gpu.where import DEVICE, ON_CARD

few_examples = settings(max_examples=25, deadline=None)

_CPU = torch.device("cpu")
_COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}


def _compressed(group_size: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "group_size": group_size}
    return {**_COMPRESSED, "config_groups": {"group_0": {"weights": weights}}}


def _loader(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], model_dtype: str = "float16"
) -> LinearLoader:
    fmt = open_format(Path("nowhere"), {"quantization_config": config})
    return LinearLoader(MemoryReader(tensors), fmt, _CPU, torch.float32, model_dtype)


def _named(prefix: str, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{part}": tensor for part, tensor in parts.items()}


def _gptq(
    prefix: str, seed: int, n: int = 64, k: int = 128, **options: Any
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    parts = packers.random_parts(np.random.default_rng(seed), n, k, **options)
    return _named(prefix, packers.gptq(parts)), parts.dense


def _worst_error(linear: Linear, dense: np.ndarray, bias: np.ndarray | float = 0.0) -> float:
    """Of products with 1, 3 and 130 rows (each is computed in its own way), relative to the sums of absolute terms."""
    x = torch.randn(130, dense.shape[1], generator=torch.Generator().manual_seed(1))
    exact = x.double().numpy() @ dense.T.astype(np.float64) + bias
    size = np.abs(x.numpy()) @ np.abs(dense).T + np.abs(bias) + 1e-30
    return max(float((np.abs(linear(x[:rows]).numpy() - exact[:rows]) / size[:rows]).max()) for rows in (1, 3, 130))


@few_examples
@given(
    rng=st.integers(0, 2**32 - 1).map(np.random.default_rng),
    n=st.integers(1, 150),
    k=st.integers(9, 300),
    group=st.sampled_from([32, 64, 128, -1]),
    permuted=st.booleans(),
    has_bias=st.booleans(),
)
def test_any_number_of_inputs_and_a_last_group_with_fewer_give_the_exact_product(
    rng, n, k, group, permuted, has_bias
) -> None:
    group_of = packers.permuted_groups(rng, k, k if group == -1 else group) if permuted else None
    parts = packers.random_parts(rng, n, k, group_size=group, group_of=group_of)
    bias = rng.normal(size=n).astype(np.float32)
    tensors = _named("m", packers.compressed(parts, with_g_idx=permuted))
    if has_bias:
        tensors["m.bias"] = torch.from_numpy(bias)
    linear = _loader(_compressed(group), tensors).load(["m"], (n, k))
    assert isinstance(linear, W4Linear) and linear.shape == (n, k)
    # fp32 rounds to 6e-8; zero points cancel against codes, which costs two more digits at worst.
    assert _worst_error(linear, parts.dense, bias if has_bias else 0.0) < 2e-5


@pytest.mark.parametrize("bits", [2, 3])
def test_modules_of_fewer_bits_stay_packed_and_exact(bits: int) -> None:
    tensors, dense = _gptq("m", 0, bits=bits)
    loader = _loader({**_GPTQ, "bits": bits}, tensors)
    linear = loader.load(["m"], (64, 128))
    assert isinstance(linear, W4Linear)
    assert _worst_error(linear, dense) < 2e-5
    assert loader.notes == (f"Modules of {bits} bits are held in 4 bits, without loss.",)


def test_8_bit_modules_are_held_in_16_bits_and_one_note_says_so() -> None:
    first, dense = _gptq("a", 0, bits=8)
    second, _ = _gptq("b", 1, bits=8)
    loader = _loader({**_GPTQ, "bits": 8}, {**first, **second})
    linear = loader.load(["a"], (64, 128))
    loader.load(["b"], (64, 128))
    assert isinstance(linear, DenseLinear) and linear.weight.dtype == torch.float16
    assert _worst_error(linear, dense) < 2**-11  # one rounding to fp16
    assert loader.notes == ("Modules of 8 bits are held as 16-bit weights: twice their size on disk.",)


def test_scales_of_another_type_than_the_model_are_cast_with_one_note() -> None:
    tensors, dense = _gptq("m", 0)
    loader = _loader(_GPTQ, tensors, model_dtype="bfloat16")
    assert _worst_error(loader.load(["m"], (64, 128)), dense) < 2e-5
    assert loader.notes == ("The model is bfloat16, its scales are float16: cast to float32.",)
    assert _loader(_GPTQ, tensors, model_dtype="float16").notes == ()


_ORDER_A, _ORDER_B = (packers.permuted_groups(np.random.default_rng(seed), 128, 32) for seed in (1, 2))


@pytest.mark.parametrize(
    ("options", "is_fused"),
    [
        ([{}, {}, {}], True),
        ([{"group_of": _ORDER_A}] * 3, True),
        ([{"group_of": _ORDER_A}, {"group_of": _ORDER_A}, {"group_of": _ORDER_B}], False),
        ([{"group_of": _ORDER_A}, {}, {}], False),
        ([{"group_size": 64}, {}, {}], False),
        ([{"bits": 8}, {}, {}], False),
        ([{"bits": 8}] * 3, True),
    ],
    ids=["alike", "one order", "two orders", "one has an order", "group sizes", "bits", "all 8 bits"],
)
def test_modules_are_fused_only_if_bits_groups_and_order_agree(
    options: Sequence[dict[str, Any]], is_fused: bool
) -> None:
    tensors, dense, dynamic = {}, [], {}
    for seed, (prefix, own) in enumerate(zip("qkv", options, strict=True)):
        module, weights = _gptq(prefix, seed, **own)
        tensors.update(module)
        dense.append(weights)
        dynamic[prefix] = {key: value for key, value in own.items() if key != "group_of"}
    linear = _loader({**_GPTQ, "dynamic": dynamic}, tensors).load(list("qkv"), (192, 128))
    assert isinstance(linear, SplitLinear) != is_fused
    assert _worst_error(linear, np.concatenate(dense)) < 2**-11


@pytest.mark.parametrize("dense_dtype", [torch.float16, torch.bfloat16])
def test_a_checkpoint_may_leave_some_modules_in_16_bits(dense_dtype: torch.dtype) -> None:
    tensors, dense = _gptq("q", 0)
    eight, dense_of_eight = _gptq("k", 1, bits=8)
    plain = torch.randn(64, 128).to(dense_dtype)
    loader = _loader({**_GPTQ, "dynamic": {"k": {"bits": 8}}}, {**tensors, **eight, "v.weight": plain})
    linear = loader.load(list("qkv"), (192, 128))
    assert isinstance(linear, SplitLinear)
    assert _worst_error(linear, np.concatenate([dense, dense_of_eight, plain.float().numpy()])) < 2**-11
    assert linear.parts[2].num_bytes == plain.numel() * 2  # not widened by its neighbour of the other 16-bit type


def test_weights_of_another_shape_than_the_config_asks_for_are_named() -> None:
    tensors, _ = _gptq("q", 0)
    with pytest.raises(BadCheckpoint, match=r"asks for weights of \(64, 256\).*`q` \(64, 128\)"):
        _loader(_GPTQ, tensors).load(["q"], (64, 256))


def test_a_module_without_weights_names_what_was_wanted_and_found() -> None:
    with pytest.raises(BadCheckpoint, match="`q`: expected weight, or gptq tensors; found scales"):
        _loader(_GPTQ, {"q.scales": torch.ones(1)}).load(["q"], (64, 128))


@pytest.mark.parametrize(
    ("break_scales", "words"),
    [
        (lambda s: s.index_fill(0, torch.tensor([1]), float("nan")), "64 of 256 scales are infinite or no numbers"),
        (lambda s: s.index_fill(1, torch.tensor([5]), float("inf")), "4 of 256 scales are infinite or no numbers"),
        (lambda s: s * 0, "all 256 scales are 0"),
        (lambda s: s * 0 + 6e4, r"scales reach 6e\+04, weights"),
    ],
    ids=["nan", "inf", "zero", "absurd"],
)
def test_a_garbled_module_is_an_error_that_names_it_and_the_number(break_scales: Any, words: str) -> None:
    tensors, _ = _gptq("model.layers.7.q", 0)
    name = "model.layers.7.q.scales"
    with pytest.raises(BadCheckpoint, match=f"`model.layers.7.q`: {words}"):
        _loader(_GPTQ, {**tensors, name: break_scales(tensors[name])}).load(["model.layers.7.q"], (64, 128))


@pytest.mark.parametrize(
    "fault",
    [
        lambda weight: replace(weight, packed=weight.packed ^ 1),
        lambda weight: replace(weight, packed=weight.packed.flip(1)),
        lambda weight: replace(weight, terms=weight.terms.flip(1)),
        lambda weight: replace(weight, terms=weight.terms * torch.tensor([[1.0], [1.01]])),
    ],
    ids=["codes", "rows", "groups", "zeros"],
)
def test_a_product_that_differs_from_the_checkpoints_numbers_stops_the_load(fault: Any) -> None:
    parts = packers.random_parts(np.random.default_rng(0), 64, 128)
    fmt = open_format(Path("nowhere"), {"quantization_config": _GPTQ})
    assert fmt is not None
    module = fmt.read(MemoryReader.of_module("m", packers.gptq(parts)), "m")
    linear = _loader(_GPTQ, _named("m", packers.gptq(parts))).load(["m"], (64, 128))
    assert isinstance(linear, W4Linear)
    check = ProductCheck([module], linear, _CPU, torch.float32)
    check.check()
    linear.weight = fault(linear.weight)
    with pytest.raises(EngineError, match="`m`: the packed weight gives other products"):
        check.check()


@pytest.mark.parametrize("num_rows", [1, 5, 100])
def test_the_load_tries_every_way_in_which_a_product_is_computed(
    monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    """One kernel that miscomputes is found, whichever number of rows it is for."""
    from kernels import ops

    right, tried = ops.w4_linear, []

    def wrong_from(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        tried.append(x.shape[0])
        return right(x, weight, bias) * (1.01 if _way(x.shape[0]) == _way(num_rows) else 1.0)

    monkeypatch.setattr(ops, "w4_linear", wrong_from)
    tensors, _ = _gptq("m", 0)
    loader = _loader(_GPTQ, tensors)
    loader.load(["m"], (64, 128))
    with pytest.raises(EngineError, match="A kernel is at fault"):
        loader.check_products()
    assert tried


def _way(num_rows: int) -> str:
    return "one" if num_rows == 1 else "few" if num_rows < 96 else "many"


def test_a_damaged_tensor_that_no_format_looks_at_stops_the_load(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama", "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.post_attention_layernorm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="of the first token's 259 logits are infinite or no numbers"):
        load_runner(EngineConfig(model=str(tmp_path), device="cpu", kv_gb=0.01), lambda stage, fraction: None)


def test_the_products_of_a_kind_are_checked_once() -> None:
    tensors = {}
    for layer in range(3):
        for name in ("q", "o"):
            tensors.update(_gptq(f"layers.{layer}.{name}", layer)[0])
    loader = _loader(_GPTQ, tensors)
    for layer in range(3):
        for name in ("q", "o"):
            loader.load([f"layers.{layer}.{name}"], (64, 128))
    assert [check.prefix for check in loader.checks] == ["layers.0.q", "layers.0.o"]
    loader.check_products()
    assert not loader.checks


def test_a_second_load_takes_the_packed_weights_and_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "pack_weight", pack_planar)  # as on a card
    tensors, dense = _gptq("a", 0)
    fmt = open_format(Path("nowhere"), {"quantization_config": _GPTQ})
    for readable in (tensors, {name: torch.empty(0) for name in tensors}):
        kept = KeptWeights(tmp_path, _CPU, torch.float16, 0)
        reader = MemoryReader(readable)
        loader = LinearLoader(reader, fmt, _CPU, torch.float32, "bfloat16", kept)
        assert _worst_error(loader.load(["a"], (64, 128)), dense) < 1e-4
        assert reader.unused() == []
        assert loader.notes == ("The model is bfloat16, its scales are float16: cast to float32.",)
        kept.finish(loader.notes)


def test_gates_and_ups_in_one_product_give_what_the_activation_makes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs in another order, fewer than the weight has, a bias, and who takes the result wants yet another order."""
    monkeypatch.setattr(ops, "_on_card", lambda x: True)
    order, wanted, bias = torch.randperm(60, device=DEVICE), torch.randperm(24, device=DEVICE), torch.randn(48)
    gate_up = W4Linear(_planar(64, 48), 60, order, bias.to(DEVICE, torch.float16))
    down = W4Linear(_planar(24, 16), 24, wanted, None)
    x = torch.randn(5, 60, dtype=torch.float16, device=DEVICE)
    inside = ops.silu_mul(gate_up(x))
    result = down(inside)
    gated = with_activation(gate_up, "silu", down)
    assert gated is not None and gated.shape == (24, 60) and gated.num_bytes == gate_up.num_bytes
    assert torch.equal(gated(x), inside[:, wanted])
    assert torch.equal(down(gated(x)), result)
    assert list(packed_weights([gated])) == [gated.weight.planar]


def test_only_packed_weights_on_a_card_take_the_activation_in() -> None:
    dense, down = DenseLinear(torch.zeros(48, 64), None), W4Linear(_planar(24, 16), 24, torch.arange(24), None)
    assert with_activation(dense, "silu", down) is None and down.order is not None
    packed = W4Linear(_planar(64, 48), 64, None, None)
    assert (with_activation(packed, "silu", down) is None) == (not ON_CARD) == (down.order is not None)


def _planar(k: int, n: int) -> PlanarWeight:
    return pack_planar(*numbers(k, n, k, has_zeros=True).parts, k)


def test_zeros_that_were_rounded_are_whole_to_16_bits_and_as_stored_to_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card, that is: gemv_fast stores each zero times its scale in fp16."""

    def pack(codes, scales, offsets, group_size, dtype):
        is_held = can_hold(group_size, scales, offsets, dtype)
        return pack_planar(codes, scales, offsets, group_size, dtype) if is_held else None

    monkeypatch.setattr(ops, "pack_weight", pack)
    given = numbers(128, 64, 64, has_zeros=True)
    codes, scales, offsets = (part.cpu() for part in (given.codes, given.scales, given.offsets.half().float()))
    module = QuantizedTensors("a", 4, 64, codes, scales, offsets, None, None)
    half, full = (LinearLoader(MemoryReader({}), None, _CPU, t, "float16") for t in (torch.float16, torch.float32))
    assert isinstance(half._build([module]), W4Linear) and half.notes == ()
    exact = full._build([module])
    assert isinstance(exact, DenseLinear) and torch.equal(exact.weight, module.dequantize().T)
    assert "32-bit weights on a card: eight times" in full.notes[0]
