"""Logs of engines: what is kept when they grow, and what is shown."""

from pathlib import Path

import pytest

from app.models.memory.engine_logs import EngineLogs


def test_notes_and_an_engines_lines_stand_in_one_file_and_its_end_is_shown(tmp_path: Path) -> None:
    logs = EngineLogs(tmp_path / "logs")
    path = logs.begin("owner/model:1")
    assert path is not None and Path(path).parent == tmp_path / "logs"
    with open(path, "ab") as engine:
        engine.write(b"first\nodd \xff byte\n")
    logs.note("owner/model:1", "The engine died.")
    first, odd, note = logs.tail("owner/model:1", 10)
    assert first == "first" and "odd" in odd and note.endswith("FIRESIDE The engine died.")
    assert logs.tail("owner/model:1", 1) == [note]
    assert logs.tail("another", 5) == []


def test_a_large_log_is_turned_over_under_a_child_that_goes_on_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.models.memory.engine_logs._MOST_BYTES", 100)
    logs = EngineLogs(tmp_path)
    path = logs.begin("m")
    assert path is not None
    with open(path, "ab", buffering=0) as child:
        for number in range(40):
            child.write(f"line {number}\n".encode())
            logs.turn_over("m")
        assert Path(path).stat().st_size <= 110
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 220
    assert logs.tail("m", 3) == ["line 37", "line 38", "line 39"]


def test_without_a_place_to_write_the_engine_starts_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    logs = EngineLogs(tmp_path / "file" / "logs")
    assert logs.begin("m") is None
    logs.note("m", "x")
    assert logs.tail("m", 5) == []
