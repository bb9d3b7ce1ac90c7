"""Makes formats.safetensors: modules packed by the formats' own tools, beside the numbers that went in.

Not run by the tests. In a virtual environment of its own, on a CPU:
    pip install torch==2.13.0 transformers==5.24.0 gptqmodel==7.6.0 compressed-tensors==0.20.1
    pip download --no-deps --no-binary :all: autoawq==0.2.9  (unpack it: the package no longer imports, its packers do)
    python make.py PATH_OF_THE_UNPACKED_AUTOAWQ
Each case has the tool's tensors as `<case>.<tensor>`, and `<case>/codes`, `/zeros`, `/scales`, `/group_of`.
Made on 2026-11-30. Where a tool can dequantise on a CPU, its own result is compared with those numbers below.
"""

import sys
import types
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from gptqmodel import QuantizeConfig
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file

N, K, GROUP = 32, 128, 32

generator = torch.Generator().manual_seed(20261130)
golden: dict[str, torch.Tensor] = {}


def numbers(bits: int = 4, group: int = GROUP, *, symmetric: bool = False, act_order: bool = False):
    """codes [N, K], zeros and scales [N, groups], group_of [K]; the first zeros are 0 and the largest code."""
    group = K if group == -1 else group
    codes = torch.randint(0, 1 << bits, (N, K), generator=generator)
    zeros = torch.randint(0, 1 << bits, (N, K // group), generator=generator)
    zeros[0], zeros[1] = 0, (1 << bits) - 1
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = (torch.rand(N, K // group, generator=generator) * 0.02 + 0.005).half()
    group_of = torch.arange(K) // group
    if act_order:
        group_of = group_of[torch.randperm(K, generator=generator)]
    return codes, zeros, scales, group_of


def keep(case: str, tensors: dict[str, torch.Tensor], codes, zeros, scales, group_of) -> None:
    golden.update({f"{case}.{name}": tensor.detach().clone().contiguous() for name, tensor in tensors.items()})
    golden[f"{case}/codes"], golden[f"{case}/zeros"] = codes.byte(), zeros.byte()
    golden[f"{case}/scales"], golden[f"{case}/group_of"] = scales.clone(), group_of.byte()


def weight_of(codes, zeros, scales, group_of) -> torch.Tensor:
    return (codes - zeros[:, group_of]).float() * scales.float()[:, group_of]


def linear_of(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = weight
    return linear


def gptq(case: str, bits: int, version: int, *, act_order: bool = False, symmetric: bool = False, group: int = GROUP):
    codes, zeros, scales, group_of = numbers(bits, group, symmetric=symmetric, act_order=act_order)
    config = QuantizeConfig(bits=bits, group_size=group, desc_act=act_order, sym=symmetric)
    module = TorchLinear(
        bits=bits,
        group_size=group,
        sym=symmetric,
        desc_act=act_order,
        in_features=K,
        out_features=N,
        register_buffers=True,
    )
    dense = weight_of(codes, zeros, scales, group_of)
    module.pack_original(linear_of(dense), scales.float(), zeros.float(), group_of.int())
    module.post_init()
    assert torch.equal(module.dequantize_weight().T, dense.half())
    if version == 1:
        convert_gptq_v2_to_v1_format_module(module, config)
    names = ("qweight", "qzeros", "scales", "g_idx")
    keep(case, {name: getattr(module, name) for name in names}, codes, zeros, scales, group_of)


def compressed(case: str, bits: int, group: int, *, symmetric: bool) -> None:
    codes, zeros, scales, group_of = numbers(bits, group, symmetric=symmetric)
    middle = 1 << (bits - 1)
    dense = weight_of(codes, zeros, scales, group_of)
    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **strategy)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": dense, "weight_scale": scales.float()}
    if not symmetric:
        state["weight_zero_point"] = (zeros - middle).to(torch.int8)
    packed = PackedQuantizationCompressor.compress(state, scheme)
    assert torch.allclose(PackedQuantizationCompressor.decompress(packed, scheme)["weight"], dense, atol=1e-7)
    packed["weight_scale"] = packed["weight_scale"].half()
    keep(case, packed, codes, zeros, scales, group_of)


def autoawq(path: Path) -> None:
    package = types.ModuleType("awq")  # its own __init__ imports model classes that transformers no longer has
    package.__path__ = [str(path / "awq")]
    sys.modules["awq"] = package
    for name in ("modules", "modules.linear", "utils"):
        part = types.ModuleType(f"awq.{name}")
        part.__path__ = [str(path / "awq" / name.replace(".", "/"))]
        sys.modules[f"awq.{name}"] = part
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.modules.linear.gemv import WQLinear_GEMV
    from awq.modules.linear.gemv_fast import WQLinear_GEMVFast
    from awq.utils.packing_utils import dequantize_gemm

    for case, kind, turns in (
        ("awq_gemm", WQLinear_GEMM, True),
        ("awq_gemv", WQLinear_GEMV, False),
        ("awq_gemv_fast", WQLinear_GEMVFast, False),
    ):
        codes, zeros, scales, group_of = numbers()
        dense = weight_of(codes, zeros, scales, group_of)
        given = (scales.T.contiguous(), zeros.T.contiguous().float()) if turns else (scales, zeros.float())
        module = kind.from_linear(linear_of(dense), 4, GROUP, scales=given[0], zeros=given[1])
        if case == "awq_gemm":
            unpacked = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, GROUP)
            assert torch.equal(unpacked.T, dense.half())
        keep(
            case,
            {name: getattr(module, name) for name in ("qweight", "qzeros", "scales")},
            codes,
            zeros,
            scales,
            group_of,
        )


def main() -> None:
    gptq("gptq_v1", 4, 1)
    gptq("gptq_v1_sym", 4, 1, symmetric=True, group=-1)
    gptq("gptq_v2", 4, 2)
    gptq("gptq_v2_act_order", 4, 2, act_order=True)
    for bits in (2, 3, 8):
        gptq(f"gptq_v1_{bits}bit", bits, 1)
    compressed("ct_sym", 4, GROUP, symmetric=True)
    compressed("ct_asym", 4, GROUP, symmetric=False)
    compressed("ct_channel", 4, -1, symmetric=True)
    compressed("ct_8bit", 8, GROUP, symmetric=False)
    autoawq(Path(sys.argv[1]))
    save_file(golden, Path(__file__).with_name("formats.safetensors"))


if __name__ == "__main__":
    main()
