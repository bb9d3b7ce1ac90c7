"""Modules packed by GPTQModel, AutoAWQ and compressed-tensors themselves are read as the numbers that went in.

tests/data/golden/make.py made the file and says how.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.quant.formats import open_format
from tests.engine.quant.memory_reader import MemoryReader

_GOLDEN = load_file(Path(__file__).parents[2] / "data" / "golden" / "formats.safetensors")
CASES = sorted({name.split("/")[0] for name in _GOLDEN if "/" in name})


def _config(case: str) -> dict[str, Any]:
    if case.startswith("ct"):
        return {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    if case.startswith("awq"):
        return {"quant_method": "awq", "bits": 4, "group_size": 32, "version": case.removeprefix("awq_")}
    bits = next((bits for bits in (2, 3, 8) if case.endswith(f"_{bits}bit")), 4)
    config = {"quant_method": "gptq", "bits": bits, "group_size": -1 if "sym" in case else 32, "sym": "sym" in case}
    version = "gptq_v2" if "v2" in case else "gptq"
    return {**config, "checkpoint_format": version, "meta": {"quantizer": ["gptqmodel:7.6.0"]}}


@pytest.mark.parametrize("case", CASES)
def test_a_module_packed_by_the_formats_own_tool(case: str) -> None:
    fmt = open_format(Path("nowhere"), {"quantization_config": _config(case)})
    assert fmt is not None
    module = fmt.read(MemoryReader({k: v for k, v in _GOLDEN.items() if k.startswith(case + ".")}), case)
    codes, zeros, scales, group_of = (_GOLDEN[f"{case}/{part}"] for part in ("codes", "zeros", "scales", "group_of"))
    assert torch.equal(module.codes, codes.T if module.order is None else codes.T[module.order])
    assert torch.equal(module.scales, scales.T)
    scaled_zeros = -zeros.T.float() * scales.T.float()
    assert torch.equal(module.offsets, scaled_zeros.half().float() if case == "awq_gemv_fast" else scaled_zeros)
    if case != "awq_gemv_fast":
        zeros_of_input = zeros[:, group_of.long()].float()
        assert torch.equal(module.dequantize().T, (codes - zeros_of_input) * scales[:, group_of.long()].float())


def test_every_format_and_number_of_bits_has_a_golden_module() -> None:
    assert {case.split("_")[0] for case in CASES} == {"gptq", "awq", "ct"}
    assert len(CASES) == 14


def test_a_zero_of_0_borrows_from_its_neighbour_in_what_gptqmodel_writes() -> None:
    """Read field by field, as other writers' files are, the same words give a wrong zero: both ways are needed."""
    case = "gptq_v1"
    config = {key: value for key, value in _config(case).items() if key != "meta"}
    fmt = open_format(Path("nowhere"), {"quantization_config": config})
    assert fmt is not None
    module = fmt.read(MemoryReader({k: v for k, v in _GOLDEN.items() if k.startswith(case + ".")}), case)
    wrong = module.offsets != -_GOLDEN[f"{case}/zeros"].T.float() * module.scales.float()
    assert bool((_GOLDEN[f"{case}/zeros"][0] == 0).all()) and bool(wrong[:, 1].any())
