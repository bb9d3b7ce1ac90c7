"""Every reader gives back, bit for bit, what an independent writer put in, over random modules of every variant."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BadCheckpoint
from engine.quant.base import QuantizedTensors
from engine.quant.formats import open_format
from tests import packers
from tests.engine.quant.memory_reader import MemoryReader

_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a module is unpacked where it will be used
few_examples = settings(max_examples=25, deadline=None)

seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
groups = st.sampled_from([32, 64, 128, -1])
outputs = st.integers(1, 5).map(lambda words: 32 * words)
scale_dtypes = st.sampled_from([torch.float16, torch.bfloat16])


def _read(tmp_path_factory: Any, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> QuantizedTensors:
    folder = tmp_path_factory.getbasetemp()  # holds no config of its own
    fmt = open_format(folder, {"quantization_config": config})
    assert fmt is not None
    reader = MemoryReader.of_module("m", {name: tensor.to(_DEVICE) for name, tensor in tensors.items()})
    assert fmt.claims(reader, "m")
    module = fmt.read(reader, "m")
    assert reader.unused() == []
    return module


def _same(module: QuantizedTensors, dense: np.ndarray) -> bool:
    return torch.equal(module.dequantize().T.cpu(), torch.from_numpy(dense))


@few_examples
@given(
    rng=seeds,
    n=outputs,
    k=st.integers(1, 9).map(lambda words: 32 * words),
    group=groups,
    bits=st.sampled_from([2, 3, 4, 8]),
    symmetric=st.booleans(),
    version=st.sampled_from([1, 2]),
    order=st.sampled_from(["absent", "monotonic", "permuted"]),
    dtype=scale_dtypes,
)
def test_gptq(tmp_path_factory, rng, n, k, group, bits, symmetric, version, order, dtype) -> None:
    group_of = packers.permuted_groups(rng, k, k if group == -1 else group) if order == "permuted" else None
    options = dict(group_size=group, bits=bits, symmetric=symmetric, group_of=group_of, scale_dtype=dtype)
    parts = packers.random_parts(rng, n, k, **options)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": order == "permuted",
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    module = _read(tmp_path_factory, config, packers.gptq(parts, version=version, with_g_idx=order != "absent"))
    assert _same(module, parts.dense)
    assert (module.order is not None) == (not np.array_equal(parts.group_of, np.sort(parts.group_of)))


@few_examples
@given(
    rng=seeds,
    n=outputs,
    k=st.integers(1, 9).map(lambda words: 64 * words),
    group=groups,
    layout=st.sampled_from(["gemm", "gemv", "gemv_fast", "llm-awq"]),
    has_zeros=st.booleans(),
)
def test_awq(tmp_path_factory, rng, n, k, group, layout, has_zeros) -> None:
    has_zeros = has_zeros or layout in ("gemv_fast", "llm-awq")
    parts = packers.random_parts(rng, n, k, group_size=group, symmetric=not has_zeros)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": has_zeros, "version": layout}
    if layout == "gemm":
        tensors, dense = packers.awq_gemm(parts, with_zeros=has_zeros), parts.dense
    elif layout == "gemv":
        tensors, dense = packers.awq_gemv(parts, with_zeros=has_zeros), parts.dense
    else:
        zeros_name = "scaled_zeros" if layout == "llm-awq" else "qzeros"
        tensors, dense = packers.awq_gemv_fast(parts, zeros_name=zeros_name), packers.dense_of_gemv_fast(parts)
    assert _same(_read(tmp_path_factory, config, tensors), dense)


@few_examples
@given(
    rng=seeds,
    n=st.integers(1, 150),
    k=st.integers(5, 300),  # up to 4 are one word in 4 bits and in 8
    group=groups,
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    order=st.sampled_from(["absent", "monotonic", "permuted"]),
    early=st.booleans(),
    dtype=scale_dtypes,
)
def test_compressed_tensors(tmp_path_factory, rng, n, k, group, bits, symmetric, order, early, dtype) -> None:
    group_of = packers.permuted_groups(rng, k, k if group == -1 else group) if order == "permuted" else None
    options = dict(group_size=group, bits=bits, symmetric=symmetric, group_of=group_of, scale_dtype=dtype)
    parts = packers.random_parts(rng, n, k, **options)
    tensors = packers.compressed(parts, with_zeros=not symmetric, with_g_idx=order != "absent")
    if early and not symmetric:
        tensors = packers.unpacked_zeros(parts, tensors)
    module = _read(tmp_path_factory, _compressed_config(num_bits=bits, group_size=group), tensors)
    assert _same(module, parts.dense)


def _compressed_config(**weights: object) -> dict[str, object]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"type": "int", **weights}, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}


def _gptq_module(seed: int = 0, **options: Any) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    parts = packers.random_parts(np.random.default_rng(seed), 64, 128, **options)
    return packers.gptq(parts), parts.dense


@pytest.mark.parametrize(
    "older",
    [
        {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "gemm"},
        {"method": "awq", "bits": 4, "group_size": 32, "format": "gemm"},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "exllama"},  # converted at load, GEMM on disk
    ],
)
def test_older_names_of_awq_keys_are_read(tmp_path_factory, older) -> None:
    parts = packers.random_parts(np.random.default_rng(0), 64, 128)
    assert _same(_read(tmp_path_factory, older, packers.awq_gemm(parts)), parts.dense)


@pytest.mark.parametrize(
    "older",
    [{"wbits": 4, "group_size": 32, "sym": False}, {"method": "gptq", "bits": 4, "group_size": 32, "sym": False}],
)
def test_older_names_of_gptq_keys_are_read(tmp_path_factory, older) -> None:
    tensors, dense = _gptq_module()
    assert _same(_read(tmp_path_factory, older, tensors), dense)


def test_dynamic_gives_other_numbers_to_the_modules_that_it_names(tmp_path_factory) -> None:
    tensors, dense = _gptq_module(bits=8, group_size=64)
    dynamic = {"-:.*m.*": {}, "+:n": {"bits": 2}, "m$": {"bits": 8, "group_size": 64}, ".*": {"bits": 3}}
    assert _same(_read(tmp_path_factory, {**GPTQ, "dynamic": dynamic}, tensors), dense)
    with pytest.raises(BadCheckpoint, match=r"qweight has 32 rows; 128 inputs \(g_idx\) of 4 bits take 16"):
        _read(tmp_path_factory, GPTQ, tensors)


def test_the_tensors_decide_the_group_size_where_the_config_is_wrong(tmp_path_factory) -> None:
    tensors, dense = _gptq_module(group_size=32)
    assert _same(_read(tmp_path_factory, {**GPTQ, "group_size": 128}, tensors), dense)


def test_a_v1_zero_point_of_zero_is_stored_as_all_ones_and_read_without_a_carry(tmp_path_factory) -> None:
    parts = packers.with_zeros(packers.random_parts(np.random.default_rng(0), 64, 128), 0)
    tensors = packers.gptq(parts)
    assert bool((tensors["qzeros"] == -1).all())
    assert _same(_read(tmp_path_factory, GPTQ, tensors), parts.dense)


@pytest.mark.parametrize(("said", "version", "zero"), [("gptq", 2, 9), ("gptq_v2", 1, 7)])
def test_a_symmetric_file_of_the_other_version_is_told(tmp_path_factory, said, version, zero) -> None:
    parts = packers.random_parts(np.random.default_rng(0), 64, 128, symmetric=True)
    config = {**GPTQ, "sym": True, "checkpoint_format": said}
    with pytest.raises(BadCheckpoint, match=f"`m`: every zero point is {zero}; .* it is 8"):
        _read(tmp_path_factory, config, packers.gptq(parts, version=version))


@pytest.mark.parametrize(
    ("part", "broken", "words"),
    [
        ("g_idx", lambda g: g + 1, "g_idx names groups 1 to 4; there are 4"),
        ("g_idx", lambda g: torch.where(g == 3, -1, g), "g_idx names groups -1 to 2"),
        ("g_idx", lambda g: torch.where(g == 3, 0, g), "g_idx does not give 32 inputs to each of 4 groups"),
        ("scales", lambda s: s[:, :-1], r"scales are \(4, 63\)"),
        ("scales", lambda s: s[:3], r"scales are \(3, 64\)"),
        ("qzeros", lambda z: z[:, :-1], r"zeros \(4, 56\)"),
        ("qweight", lambda q: q[:-1], "qweight has 15 rows"),
    ],
)
def test_tensors_that_contradict_each_other_name_module_and_numbers(tmp_path_factory, part, broken, words) -> None:
    tensors, _ = _gptq_module()
    with pytest.raises(BadCheckpoint, match="`m`: .*" + words):
        _read(tmp_path_factory, GPTQ, {**tensors, part: broken(tensors[part])})
