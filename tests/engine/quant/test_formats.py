"""What we do not read is refused from config.json alone, in words that name the key."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint import open_checkpoint
from engine.errors import BadCheckpoint, UnsupportedModel
from engine.quant.formats import open_format
from tests.checkpoints import tiny_checkpoint

_CT = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def _group(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None, **changes}
    return {"config_groups": {"group_0": {**group, "weights": {**weights, **changes.get("weights", {})}}}}


REFUSED = {
    "unknown method": (
        {"quant_method": "bitsandbytes", "bits": 4},
        "quant_method='bitsandbytes'.*gptq, awq, compressed",
    ),
    "fp8": ({"quant_method": "fp8"}, "quant_method='fp8'"),
    "mxfp4": ({"quant_method": "mxfp4"}, "quant_method='mxfp4'"),
    "gptq_p": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_p"}, "checkpoint_format.*'gptq_p'"),
    "gptq marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format.*'marlin'"),
    "gptq marlin flag": ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format"),
    "gptq bits": ({"quant_method": "gptq", "bits": 5}, "bits=5"),
    "gptq without bits": ({"quant_method": "gptq"}, "bits=None"),
    "gptq dynamic bits": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 6}}},
        "bits=6 .dynamic '.*down",
    ),
    "awq bits": ({"quant_method": "awq", "bits": 8}, "bits=8"),
    "awq version": ({"quant_method": "awq", "bits": 4, "version": "?"}, "version='?'"),
    "marlin-24": ({**_CT, "format": "marlin-24"}, "format='marlin-24'"),
    "fp8 weights": ({**_CT, "format": "float-quantized"}, "format='float-quantized'"),
    "nvfp4": ({**_CT, "format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
    "int8 weights and activations": ({**_CT, "format": "int-quantized"}, "format='int-quantized'"),
    "mixed with fp8": (
        {**_CT, "format": "mixed-precision", **_group(format="float-quantized")},
        "config_groups.group_0.format='float-quantized'",
    ),
    "fp4 type": ({**_CT, **_group(weights={"type": "float"})}, "config_groups.group_0.weights.type='float'"),
    "3 bits": ({**_CT, **_group(weights={"num_bits": 3})}, "config_groups.group_0.weights.num_bits=3"),
    "strategy": ({**_CT, **_group(weights={"strategy": "block"})}, "config_groups.group_0.weights.strategy='block'"),
    "W4A8": ({**_CT, **_group(input_activations={"num_bits": 8, "type": "int"})}, "input_activations='int8'"),
    "transform": ({**_CT, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config="),
    "sparse": (
        {**_CT, "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config.format='sparse-24-bitmask'",
    ),
    "kv cache": ({**_CT, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "kv_cache_scheme="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_from_the_config_alone(tmp_path: Path, case: str) -> None:
    quantization, words = REFUSED[case]
    tiny_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(UnsupportedModel, match=words.replace("?", r"\?")):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {"bits": 8}}},
        {"quant_method": "gptq", "bits": 4, "group_size": "many"},
        {"quant_method": "gptq", "bits": 4, "dynamic": ["x"]},
        {"quant_method": "compressed-tensors", "config_groups": ["x"]},
        ["gptq"],
    ],
)
def test_a_config_without_sense_is_a_bad_checkpoint(tmp_path: Path, quantization: object) -> None:
    with pytest.raises(BadCheckpoint, match="quantization_config"):
        open_format(tmp_path, {"quantization_config": quantization})


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_the_older_file_beside_the_config_is_read(tmp_path: Path, name: str) -> None:
    fmt = {
        "quantize_config.json": {"bits": 4, "group_size": 128},
        "quant_config.json": {"w_bit": 4, "zero_point": True},
    }
    (tmp_path / name).write_text(json.dumps(fmt[name]))
    found = open_format(tmp_path, {})
    assert found is not None and found.name == {"quantize_config.json": "gptq", "quant_config.json": "awq"}[name]
    (tmp_path / name).write_text("{")
    with pytest.raises(BadCheckpoint, match=name):
        open_format(tmp_path, {})


def test_a_dense_checkpoint_has_no_format(tmp_path: Path) -> None:
    assert open_format(tmp_path, {}) is None
