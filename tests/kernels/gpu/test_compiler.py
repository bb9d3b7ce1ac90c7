"""What a machine lacks to run the card's kernels is told with the next step."""

import importlib
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from kernels.gpu.compiler import missing_for_kernels


@pytest.fixture(autouse=True)
def whole_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in ("gcc", "my-cc") else None)


def _import_raises(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(name: str) -> Any:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)


def test_a_whole_machine_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_for_kernels() is None
    monkeypatch.setenv("CC", "my-cc")
    assert missing_for_kernels() is None


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    _import_raises(monkeypatch, ModuleNotFoundError("No module named 'triton'", name="triton"))
    assert "pip install triton." in str(missing_for_kernels())
    monkeypatch.setattr(sys, "platform", "win32")
    assert "pip install triton-windows." in str(missing_for_kernels())


@pytest.mark.parametrize(
    "error",
    [ImportError("libtriton.so: cannot open"), ModuleNotFoundError("No module named 'x'", name="x"), OSError("no")],
)
def test_a_broken_triton(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    _import_raises(monkeypatch, error)
    assert f"does not load ({type(error).__name__}: {error})" in str(missing_for_kernels())


def test_no_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no C compiler" in str(missing_for_kernels())
    monkeypatch.setattr(sys, "platform", "win32")
    assert missing_for_kernels() is None


def test_a_compiler_asked_for_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "icc")
    assert "CC names the C compiler icc" in str(missing_for_kernels())


def test_no_header_of_python(tmp_path: Path) -> None:
    (tmp_path / "Python.h").unlink()
    message = str(missing_for_kernels())
    assert str(tmp_path / "Python.h") in message and f"python3.{sys.version_info.minor}-dev" in message
