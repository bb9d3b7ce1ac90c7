"""What counts as a whole model: a folder that lacks anything a load needs does not."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from app.models.store import bytes_on_disk, is_whole, problems

WEIGHTS = save({"w": np.arange(100, dtype=np.float32)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    return tmp_path


@pytest.fixture
def sharded(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        (folder / name).write_bytes(WEIGHTS)
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_whole_model_has_no_problems(folder: Path) -> None:
    assert problems(folder) == []
    assert bytes_on_disk(folder) == len(WEIGHTS) + 4


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_each_needed_file_is_missed(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert len(problems(folder)) == 1
    assert not is_whole(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("damaged", [b"", b'{"a', b"[1]", b"\xff\xfe\xff", b"\0" * 40])
def test_a_json_file_that_is_cut_or_no_object_is_a_problem_also_after_it_was_whole(
    folder: Path, name: str, damaged: bytes
) -> None:
    assert is_whole(folder)
    (folder / name).write_bytes(damaged)
    assert problems(folder) == [f"{name} is no JSON object that can be read"]
    (folder / name).write_text('{"whole": "again"}')
    assert is_whole(folder)


@pytest.mark.parametrize("length", [0, 4, 8, 60, len(WEIGHTS) - 1, len(WEIGHTS) + 1])
def test_weights_of_any_other_length_are_not_whole(folder: Path, length: int) -> None:
    (folder / "model.safetensors").write_bytes((WEIGHTS + b"x")[:length])
    (problem,) = problems(folder)
    assert problem.startswith(f"model.safetensors has {length:,} bytes; its header says ")


@pytest.mark.parametrize("header", [b"{", b"[1]", b'{"w": 3}', b'{"w": {}}'])
def test_weights_with_a_header_of_another_shape_are_a_problem_and_no_crash(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert problems(folder) == ["model.safetensors has no header that can be read"]


def test_a_git_lfs_pointer_is_told_from_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    (problem,) = problems(tmp_path)
    assert "git lfs pull" in problem and "header" not in problem


def test_a_sharded_model_needs_every_shard_of_its_index(sharded: Path) -> None:
    assert problems(sharded) == []
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert problems(sharded) == ["model-00002-of-00002.safetensors is missing"]


def test_shards_without_an_index_are_counted_by_their_names(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert problems(sharded) == []
    (sharded / "model-00001-of-00002.safetensors").unlink()
    assert problems(sharded) == ["model-00001-of-00002.safetensors is missing"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_a_problem_and_no_crash(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    assert problems(sharded) == ["model.safetensors.index.json cannot be read"]


def test_weights_as_gguf_alone_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")
    assert problems(folder) == ["no .safetensors file is there, only GGUF, which Fireside does not read"]


def test_a_folder_that_is_not_there_is_no_model(tmp_path: Path) -> None:
    assert not is_whole(tmp_path / "nothing")
    assert bytes_on_disk(tmp_path / "nothing") == 0
