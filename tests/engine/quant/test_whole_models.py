"""Checkpoints that mix: a quantised head, modules of other bits, modules left in 16 bits, older names of config keys.

The logits are transformers' on the weights that each checkpoint stands for.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.errors import BadCheckpoint
from engine.loading import load_runner
from tests import packers
from tests.checkpoints import tiny_checkpoint

_TOKENS = torch.randint(3, 259, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def _error(folder: Path, model: PreTrainedModel) -> float:
    runner = load_runner(EngineConfig(model=str(folder), device="cpu", kv_gb=0.01), lambda stage, fraction: None)
    (ours,) = runner.logits_of_all(tuple(_TOKENS))
    with torch.inference_mode():
        theirs = model(torch.tensor([_TOKENS])).logits[0]
    return float((ours - theirs).norm() / theirs.norm())


def _edit(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def _configure(folder: Path, quantization: dict[str, object] | None, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": quantization, **changes}
    (folder / "config.json").write_text(json.dumps(config))


def _quantise(model: PreTrainedModel, folder: Path, modules: dict[str, dict[str, object]]) -> None:
    """Replace modules by GPTQ ones of the given numbers, in the file and in the model."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for seed, (prefix, options) in enumerate(modules.items()):
            linear = model.get_submodule(prefix)
            parts = packers.random_parts(np.random.default_rng(seed), *linear.weight.shape, **options)
            for name in [name for name in tensors if name.startswith(prefix + ".") and not name.endswith("bias")]:
                del tensors[name]
            tensors.update({f"{prefix}.{part}": tensor for part, tensor in packers.gptq(parts).items()})
            with torch.no_grad():
                dense = torch.from_numpy(parts.dense)
                linear.weight.copy_(dense.half() if parts.bits == 8 else dense)  # held in 16 bits

    _edit(folder, edit)


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_quantised_head_is_read_even_where_the_config_still_calls_it_tied(tmp_path: Path, is_tied: bool) -> None:
    model = tiny_checkpoint(tmp_path, "qwen2", "gptq")
    # 259 outputs are no whole words of zero points: the last word is padding in part.
    _quantise(model, tmp_path, {"lm_head": {}})
    _configure(tmp_path, {**_GPTQ, "lm_head": True}, tie_word_embeddings=is_tied)
    assert _error(tmp_path, model) < 1e-5


def test_layers_may_have_their_own_bits_and_groups_or_none(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "qwen2")
    layer = "model.layers.{}.{}_proj".format
    own = {
        layer(0, "self_attn.q"): {"bits": 8},
        layer(0, "self_attn.k"): {"group_size": 64},
        layer(0, "self_attn.v"): {},
        layer(1, "mlp.down"): {"bits": 3, "group_size": -1},
        layer(1, "mlp.up"): {},  # gate stays in 16 bits
    }
    _quantise(model, tmp_path, own)
    dynamic = {r"+:.*\.q_proj": {"bits": 8}, r".*\.k_proj$": {"group_size": 64}, "-:.*gate.*": {}}
    dynamic |= {r"model\.layers\.1\.mlp\.down_proj": {"bits": 3, "group_size": -1}}
    _configure(tmp_path, {**_GPTQ, "dynamic": dynamic})
    assert _error(tmp_path, model) < 1e-5


def test_the_config_in_a_file_of_its_own_gives_the_same_model(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama", "awq_gemm")
    _configure(tmp_path, None)
    with pytest.raises(BadCheckpoint, match="no quantization_config"):
        _error(tmp_path, model)
    older = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(older))
    assert _error(tmp_path, model) < 1e-5


def test_a_module_of_another_width_than_the_config_says_is_named(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama", "gptq")
    _configure(tmp_path, _GPTQ, intermediate_size=160)
    with pytest.raises(BadCheckpoint, match=r"asks for weights of \(320, 64\).*`model.layers.0.mlp.gate_proj` \(192, "):
        _error(tmp_path, model)
