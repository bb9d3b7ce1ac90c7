"""What the first load on a card measures is kept, and what it does not reach stays with the table."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.gpu import table, tune, w4_gemm
from kernels.gpu.planar import PlanarWeight, pack_planar
from tests.kernels.gpu.weights import numbers
from tests.kernels.gpu.where import DEVICE


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Configurations in the order of their timing; a smaller tile counts as faster."""
    seen: list[Any] = []

    def time_of(config: table.Config, *rest: Any) -> float:
        seen.append(config)
        return float(config.bn * config.bm + config.blocks_an_sm)

    monkeypatch.setattr(tune, "_time", time_of)
    monkeypatch.setattr(tune, "_file_name", lambda: "card.json")
    monkeypatch.setattr(w4_gemm, "launch", lambda *arguments: None)
    yield seen


def _weights(count: int = 2) -> list[PlanarWeight]:
    return [pack_planar(*numbers(256, 128, 128, has_zeros=False, seed=seed).parts, 128) for seed in range(count)]


def _tune(weights: list[PlanarWeight], folder: Path) -> list[float]:
    shown: list[float] = []
    tune.tune(weights, torch.float16, folder, shown.append)
    return shown


def test_every_weight_of_a_shape_gets_the_fastest_of_at_most_five(timed: list[Any], tmp_path: Path) -> None:
    weights = _weights()
    shown = _tune(weights, tmp_path)
    assert shown == [0.0, 0.25, 0.5, 0.75]
    assert weights[0].measured == weights[1].measured and set(weights[0].measured) == set(tune._BUCKETS)
    for bucket, config in weights[0].measured.items():
        options = tune.candidates(table.card_of(DEVICE), 128, 256, bucket, 2)
        assert config in options and 1 <= len(options) <= 5
        assert w4_gemm.choose(weights[0], bucket, DEVICE) == config


def test_a_second_load_measures_nothing(timed: list[Any], tmp_path: Path) -> None:
    first, second = _weights(), _weights()
    _tune(first, tmp_path / "made" / "anew")
    num_timed = len(timed)
    assert _tune(second, tmp_path / "made" / "anew") == []
    assert len(timed) == num_timed and second[0].measured == first[0].measured


@pytest.mark.parametrize(
    "content", ["", "[1]", '{"a": {"8": [1]}}', '{"a": {"8": 3}}', '{"a": []}', '{"a": {"8": ["x",1,1,1,1,1]}}']
)
def test_a_file_that_is_not_whole_is_measured_again(timed: list[Any], tmp_path: Path, content: str) -> None:
    (tmp_path / "card.json").write_text(content)
    weights = _weights()
    _tune(weights, tmp_path)
    assert timed and weights[0].measured


def test_when_time_is_up_the_rest_stays_with_the_table(
    timed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "_BUDGET_S", -1.0)
    weights = _weights()
    _tune(weights, tmp_path)
    assert weights[0].measured == {} and timed == []


def test_one_time_that_was_off_decides_nothing(
    timed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table's choice was slow once; the others are slower by a tenth whenever they are timed."""
    chosen = {b: table.choose(table.card_of(DEVICE), 128, 256, b) for b in tune._BUCKETS}
    seen: list[table.Config] = []

    def time_of(config: table.Config, *rest: Any) -> float:
        seen.append(config)
        return 1.1 if config not in chosen.values() else 5.0 if seen.count(config) == 1 else 1.0

    monkeypatch.setattr(tune, "_time", time_of)
    weights = _weights()
    _tune(weights, tmp_path)
    assert weights[0].measured == chosen


def test_a_gain_within_the_noise_keeps_the_tables_choice(
    timed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slightly = iter([1.0 - i * 0.001 for i in range(999)])
    monkeypatch.setattr(tune, "_time", lambda *arguments: next(slightly))
    weights = _weights()
    _tune(weights, tmp_path)
    cpu = table.card_of(DEVICE)
    assert weights[0].measured == {b: table.choose(cpu, 128, 256, b) for b in tune._BUCKETS}
