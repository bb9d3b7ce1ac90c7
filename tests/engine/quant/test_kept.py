"""Packed weights beside a checkpoint: the next load finds the same bits, or nothing."""

import os
import shutil
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.quant import kept
from engine.quant.kept import KeptWeights, PackedModules
from kernels import ops
from kernels.gpu.planar import pack_planar
from tests.checkpoints import tiny_checkpoint
from tests.engine.running import load, logits_in_chunks, prompt

_HOST = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def _packed(seed: int, *, asymmetric: bool = False, ordered: bool = False) -> PackedModules:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (96, 40), generator=generator, dtype=torch.uint8)
    scales = torch.rand(3, 40, generator=generator).half()
    zeros = torch.randint(0, 16, (3, 40), generator=generator) if asymmetric else torch.full((3, 40), 8)
    weight = pack_planar(codes, scales, -zeros.float() * scales.float(), 32)
    order = torch.randperm(96, generator=generator) if ordered else None
    return PackedModules(weight, 96, order, torch.rand(40) if ordered else None)


def _keep(checkpoint: Path, **modules: PackedModules) -> None:
    store = KeptWeights(checkpoint, _HOST, torch.float16, 0)
    for name, packed in modules.items():
        assert store.find([name]) is None
        store.add([name], packed)
    store.finish(["a note"])
    store.close()
    assert store.note == ""


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


@pytest.mark.parametrize("file_bytes", [1, 10**9])
def test_what_was_added_is_found_bit_for_bit(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int
) -> None:
    monkeypatch.setattr(kept, "_FILE_BYTES", file_bytes)
    added = {"q": _packed(0), "k": _packed(1, asymmetric=True), "o": _packed(2, ordered=True)}
    _keep(checkpoint, **added)
    store = KeptWeights(checkpoint, _HOST, torch.float16, 0)
    for name, packed in added.items():
        found = store.find([name])
        assert found is not None
        assert torch.equal(found.weight.codes, packed.weight.codes)
        assert torch.equal(found.weight.dequantize(torch.float32), packed.weight.dequantize(torch.float32))
        assert not found.weight.counters.any() and found.weight.counters.shape == packed.weight.counters.shape
        assert _same(found.order, packed.order) and _same(found.bias, packed.bias)
    assert store.notes == ("a note",)
    assert store.find(["q", "k"]) is None


def test_another_checkpoint_in_the_same_place_finds_nothing_and_takes_the_room(checkpoint: Path) -> None:
    _keep(checkpoint, q=_packed(0))
    (checkpoint / "model.safetensors").write_bytes(b"other weights")
    _keep(checkpoint, q=_packed(1))
    assert len(list(checkpoint.glob("pack*"))) == 1


def test_a_load_that_breaks_off_leaves_nothing(checkpoint: Path) -> None:
    store = KeptWeights(checkpoint, _HOST, torch.float16, 0)
    store.add(["q"], _packed(0))
    store.close()
    assert sorted(path.name for path in checkpoint.iterdir()) == ["config.json", "model.safetensors"]


def test_what_a_killed_load_left_is_removed_when_it_is_old(checkpoint: Path) -> None:
    for name, age_s in (("packing-old", 7200), ("packing-new", 60)):
        (checkpoint / name).mkdir()
        then = time.time() - age_s
        os.utime(checkpoint / name, (then, then))
    KeptWeights(checkpoint, _HOST, torch.float16, 0).close()
    assert [path.name for path in checkpoint.glob("packing-*")] == ["packing-new"]


def test_without_its_index_a_folder_is_not_read(checkpoint: Path) -> None:
    _keep(checkpoint, q=_packed(0))
    next(checkpoint.glob("packed-*/index.json")).write_text('{"modules": {"q"')
    _keep(checkpoint, q=_packed(1))  # which finds nothing before


def test_a_full_disk_is_told_with_its_numbers_and_stops_nothing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(6_000_000_000))
    store = KeptWeights(checkpoint, _HOST, torch.float16, 3_000_000_000)
    assert "they take 3.0 GB, and of the disk's 6.0 GB free" in store.note
    store.add(["q"], _packed(0))
    store.finish([])
    store.close()
    assert not list(checkpoint.glob("pack*"))


def test_a_disk_that_fills_up_meanwhile_stops_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept, "save_file", full)
    store = KeptWeights(checkpoint, _HOST, torch.float16, 0)
    store.add(["q"], _packed(0))
    store.finish([])
    assert "No space left on device" in store.note
    assert not list(checkpoint.glob("pack*"))


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "fmt"), [("llama", "gptq_act_order"), ("mixtral", "awq_gemm")])
def test_on_a_card_the_second_load_unpacks_nothing_and_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, fmt: str
) -> None:
    tiny_checkpoint(tmp_path, family, fmt)
    tokens = prompt(20)
    first = logits_in_chunks(load(tmp_path, "cuda", dtype="float16"), tokens, 20)
    monkeypatch.setattr(ops, "pack_weight", None)
    assert torch.equal(logits_in_chunks(load(tmp_path, "cuda", dtype="float16"), tokens, 20), first)
