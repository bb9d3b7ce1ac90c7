"""The bench of the running app, against a real server whose model says one letter."""

import multiprocessing
from pathlib import Path

import psutil
import pytest

from app import bench, bench_front
from tests.fakes import byte_model_folder

_LONE_SERVER = str(Path(__file__).with_name("lone_server.py"))


def test_every_figure_is_measured_and_no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRESIDE_HOME", str(tmp_path))
    monkeypatch.setattr(bench, "_START", f"import runpy; runpy.run_path({_LONE_SERVER!r}, run_name='__main__')")
    monkeypatch.setattr(bench, "_TOKEN_IDS", range(32, 127))  # all that the letters' vocabulary has
    monkeypatch.setattr(bench, "CLIENT_TOKENS", 8)
    others = set(psutil.Process().children(recursive=True))
    result = bench.measure("letters", rounds=2, starts=1)
    assert set(psutil.Process().children(recursive=True)) <= others
    assert all(value > 0 for value in result.values() if isinstance(value, float)), result
    assert len(result["ratios"]) == 2
    assert result["start_to_first_token_s"] > result["start_to_ready_s"]


def test_what_the_front_end_adds_to_each_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_front, "TOKENS", 4)
    result = bench_front.measure(byte_model_folder(tmp_path / "letters"), [3])
    assert multiprocessing.active_children() == []
    assert [*result] == [f"front_end_{what}_3_streams" for what in ("p50_ms", "p99_ms", "cpu_ms_per_token")]
    assert 0 < result["front_end_p50_ms_3_streams"] <= result["front_end_p99_ms_3_streams"]


def test_a_refusal_ends_the_bench_with_the_servers_words() -> None:
    with pytest.raises(SystemExit, match="refused: no such model"):
        bench._chunk('data: {"error": {"message": "no such model"}}')


def test_comments_and_the_end_mark_are_no_chunks() -> None:
    assert [bench._chunk(line) for line in (": keep-alive", "", "data: [DONE]")] == [{}, {}, {}]
