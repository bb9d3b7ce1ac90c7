"""What lies in a folder becomes tensors by name, or an error that says what is wrong with the files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import BadCheckpoint
from engine.weights.reader import SafetensorsReader


def test_tensors_are_found_in_every_file_of_a_folder_without_an_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "gptq_model-4bit-128g-00001.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "gptq_model-4bit-128g-00002.safetensors")
    reader = SafetensorsReader(tmp_path)
    assert reader.names == {"a", "b"} and reader.header("b")[0] == (3,)
    assert torch.equal(reader.get("a"), torch.ones(2))
    assert reader.unused() == ["b"]


def test_a_second_copy_under_other_names_beside_the_whole_model_is_left_alone(tmp_path: Path) -> None:
    save_file({"model.a": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"layers.a": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert SafetensorsReader(tmp_path).names == {"model.a"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.Q4_K_M.gguf", "GGUF.*get the model as GPTQ, AWQ or plain safetensors"),
        ("pytorch_model.bin", "pickles.*get the model as safetensors"),
        ("README.md", "incomplete"),
    ],
)
def test_a_folder_of_another_format_says_which_to_get_instead(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(BadCheckpoint, match=words):
        SafetensorsReader(tmp_path)


def test_an_index_that_promises_too_much_is_told(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    index = {"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match=r"x\.safetensors does not give 'b'"):
        SafetensorsReader(tmp_path).get("b")
