"""What is under way while torch is imported: the context of a card, and what the import will read."""

import ctypes
import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

from engine import head_start as tested
from engine import read_ahead
from engine.head_start import head_start


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Libraries that are asked for on a machine that seems to have a card; there is none."""
    names: list[str] = []
    monkeypatch.setattr(tested, "_has_card", lambda: True)

    def no_library(name: str) -> None:
        names.append(name)
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    return names


def _wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name in ("context", "read-ahead"):
            thread.join()


@pytest.mark.parametrize("device", ["auto", "cuda", "cpu"])
def test_a_machine_without_a_driver_is_no_fault(
    device: str, asked_for: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", faults.append)
    with head_start(device):
        _wait_for_threads()
    assert len(asked_for) == (device != "cpu") and not faults


@pytest.mark.parametrize(("device", "has_card"), [("cpu", True), ("auto", False)])
def test_without_a_card_to_use_nothing_is_begun(device: str, has_card: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "_has_card", lambda: has_card)
    monkeypatch.setattr(subprocess, "Popen", None)
    with head_start(device):
        assert not {thread.name for thread in threading.enumerate()} & {"context", "read-ahead"}


def test_an_import_that_fails_leaves_the_process_as_it_was(asked_for: list[str]) -> None:
    with pytest.raises(ModuleNotFoundError), head_start("cpu"):
        assert not gc.isenabled()
        raise ModuleNotFoundError
    assert gc.isenabled()


def test_what_is_needed_whole_is_read_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch/__pycache__/a.pyc", "torch/nn/__pycache__/b.pyc", "numpy/__pycache__/c.pyc"]
    wanted += ["nvidia/cu13/lib/libnvrtc.so.13", "triton/_C/libtriton.so"]
    others = ["torch/a.py", "torch/lib/libtorch_cuda.so", "torch/testing/__pycache__/d.pyc", "other/__pycache__/e.pyc"]
    for name in wanted + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(3 * 2**20 + 1))
    opened: list[str] = []

    def reading(path: Path, mode: str, buffering: int) -> IO[bytes]:
        opened.append(str(path.relative_to(tmp_path)))
        return open(path, mode, buffering)  # type: ignore[return-value]

    monkeypatch.setattr(read_ahead, "open", reading, raising=False)
    read_ahead.main(tmp_path)
    assert sorted(opened) == sorted(wanted)


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is read ahead elsewhere")
def test_the_reader_runs_by_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", read_ahead.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_reader_is_told_where_torch_lies(asked_for: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **rest: commands.append(command) or _Ended())
    with head_start("auto"):
        _wait_for_threads()
    if sys.platform == "linux":
        assert (Path(commands[0][-1]) / "torch" / "__init__.py").is_file()


class _Ended:
    def wait(self) -> int:
        return 0
