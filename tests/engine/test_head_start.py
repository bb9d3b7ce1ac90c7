"""What is under way while torch is imported: bytecode that an installation lacks, and the context of a card."""

import gc
import importlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine import head_start as tested
from engine.head_start import head_start


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that was installed without bytecode, in torch's place, on a machine of many cores."""
    name = f"bare_{tmp_path.name}"
    folder = tmp_path / "site" / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from . import part\n")
    (folder / "part.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(tested, "_PACKAGES", (name,))
    monkeypatch.setattr(tested, "_MANY_CORES", 1)
    return name


def _no_process(*args: object, **kwargs: object) -> None:
    raise AssertionError("a process was started")


def _wait_for(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.rglob("*.pyc"))) < count:
        assert time.monotonic() < deadline, "no bytecode was made"
        time.sleep(0.05)


def test_bytecode_that_an_installation_lacks_is_made_beside_and_used(bare: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    with head_start("cpu", made):
        _wait_for(made, 2)
        found = importlib.import_module(f"{bare}.part")
    assert found.value == 7
    assert found.__cached__ is not None and Path(found.__cached__).is_relative_to(made)
    assert sys.pycache_prefix is None


def test_a_later_start_finds_the_bytecode_and_starts_no_process(
    bare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    with head_start("cpu", made):
        _wait_for(made, 2)
    monkeypatch.setattr(subprocess, "Popen", _no_process)
    with head_start("cpu", made):
        found = importlib.import_module(bare)
    assert found.__cached__ is not None and Path(found.__cached__).is_relative_to(made)


@pytest.mark.parametrize("why", ["it has its own", "few cores", "the user has a place for it", "nowhere to put it"])
def test_no_bytecode_is_made_where(why: str, bare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Path | None = tmp_path / "made"
    if why == "it has its own":
        monkeypatch.setattr(sys, "dont_write_bytecode", False)
        importlib.import_module(bare)
    elif why == "few cores":
        monkeypatch.setattr(tested, "_MANY_CORES", 10_000)
    elif why == "the user has a place for it":
        monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "theirs"))
    else:
        made = None
    before = sys.pycache_prefix
    monkeypatch.setattr(subprocess, "Popen", _no_process)
    with head_start("cpu", made):
        assert sys.pycache_prefix == before


def test_an_import_that_fails_leaves_the_process_as_it_was(bare: str, tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError), head_start("cpu", tmp_path / "made"):
        assert not gc.isenabled()
        importlib.import_module("no_such_module")
    assert gc.isenabled() and sys.pycache_prefix is None


@pytest.mark.parametrize("device", ["auto", "cuda", "cpu"])
def test_a_machine_without_a_driver_is_no_fault(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def no_library(name: str) -> None:
        asked.append(name)
        raise OSError(name)

    faults: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", faults.append)
    monkeypatch.setattr(tested.ctypes, "CDLL", no_library)
    with head_start(device, None):
        for thread in threading.enumerate():
            if thread.name == "context":
                thread.join()
    assert len(asked) == (device != "cpu") and not faults
