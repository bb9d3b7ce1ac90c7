"""launch.py from outside: a copy of it in a folder of its own, with packages that are a few bytes each."""

import ast
import errno
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from app import settings

ROOT = Path(__file__).parents[1]
PYPROJECT = """
[project]
name = "fireside"
version = "9.8.7"
dependencies = ["torch==2.13.0", "small==1.0", "never-here==1.0; sys_platform == 'no-such-platform'"]
[project.optional-dependencies]
dev = ["pytest==99.0"]
"""
SERVER = """
import json, sys
def main(argv):
    print(json.dumps({"argv": argv, "prefix": sys.prefix}))
    return 3
"""


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


class Clone:
    """A fresh clone with tiny packages. No index is asked: pip looks into `wheels` alone."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        self.folder = folder
        (folder / "app").mkdir(parents=True)
        shutil.copy(ROOT / "launch.py", folder)
        for path in (ROOT / "app").glob("setting*.py"):  # what launch.py reads the flags with
            shutil.copy(path, folder / "app")
        (folder / "app" / "server.py").write_text(SERVER)
        (folder / "pyproject.toml").write_text(PYPROJECT)
        (folder / "constraints.txt").write_text("torch==2.13.0\nsmall==1.0\n")
        self.environment = {
            **os.environ,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": wheels.as_uri(),
            "PIP_CONFIG_FILE": os.devnull,
            "PYTHONPATH": str(folder / "not-for-us"),
        }

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(self.folder / "launch.py"), *arguments],
            env={**self.environment, **environment},
            cwd=self.folder.parent,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def installed(self) -> set[str]:
        return {path.name for path in (self.folder / ".venv").rglob("*.dist-info")}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    write_wheel(folder, "torch", "2.13.0+cpu", {"torch/__init__.py": ""})
    write_wheel(folder, "small", "1.0", {"small.py": ""})
    write_wheel(folder, "pytest", "99.0", {"pytest/__main__.py": "import sys; print(sys.argv[1:]); sys.exit(7)"})
    return folder


@pytest.fixture
def clone(tmp_path: Path, wheels: Path) -> Clone:
    return Clone(tmp_path / "mon dossier é 漢", wheels)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Clone:
    """A clone after its first start. Each test sees to it that it is prepared as that test needs."""
    made = Clone(tmp_path_factory.mktemp("prepared") / "with space é", wheels)
    first = made.run("--port", "0")
    assert "[3/3]" in first.stdout, first.stderr
    return made


@pytest.fixture
def door(clone: Clone) -> Iterator[ModuleType]:
    """The clone's launch.py as a module."""
    spec = importlib.util.spec_from_file_location("launch_of_a_clone", clone.folder / "launch.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def test_the_file_parses_on_an_old_python_so_that_its_message_can_appear() -> None:
    ast.parse((ROOT / "launch.py").read_text(encoding="utf-8"), feature_version=(3, 8))


def test_an_old_python_is_told_what_is_needed(
    door: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert door.main([]) == 1
    assert "needs Python 3.11 or newer" in capsys.readouterr().err


def test_help_lists_every_flag_with_its_default_before_there_is_an_environment(clone: Clone) -> None:
    shown = clone.run("--help", COLUMNS="400")
    assert shown.returncode == 0
    words = " ".join(shown.stdout.split())
    for row in settings.TABLE:
        flag = "--no-browser" if row.name == "browser" else row.flag
        about_this_flag = words.split(f" {flag} ")[-1].split(" --")[0]
        assert f"(default: {row.shown_default})" in about_this_flag
    assert not (clone.folder / ".venv").exists()


@pytest.mark.parametrize("arguments", [["--prot", "1"], ["--port", "many"], ["stray"], ["--por", "1"]])
def test_a_wrong_flag_is_an_error_before_anything_is_installed(clone: Clone, arguments: list[str]) -> None:
    refused = clone.run(*arguments)
    assert refused.returncode == 2
    assert arguments[0] in refused.stderr
    assert not (clone.folder / ".venv").exists()


def test_the_first_start_installs_inside_its_folder_and_goes_on_there(prepared: Clone) -> None:
    started = prepared.run("--model", "x y", "--no-browser")
    assert started.returncode == 3, started.stderr  # the exit code of the app itself
    app = json.loads(started.stdout.splitlines()[-1])
    assert app["argv"] == ["--model", "x y", "--no-browser"]
    assert Path(app["prefix"]) == prepared.folder / ".venv"
    assert {"torch-2.13.0+cpu.dist-info", "small-1.0.dist-info"} <= prepared.installed()


def test_a_second_start_installs_nothing(prepared: Clone) -> None:
    assert "/3]" not in prepared.run().stdout


def test_the_test_command_installs_the_development_set_and_passes_on_arguments_and_exit_code(prepared: Clone) -> None:
    tested = prepared.run("test", "-k", "some thing")
    assert tested.stdout.splitlines()[-1] == "['-k', 'some thing']"
    assert tested.returncode == 7
    assert "/3]" not in prepared.run().stdout  # what holds more than is needed is ready too


def test_without_arguments_the_tests_run_on_all_cores(prepared: Clone) -> None:
    assert prepared.run("test").stdout.splitlines()[-1].startswith("['-n', 'logical'")


def test_a_half_made_environment_is_repaired(prepared: Clone) -> None:
    stamp = prepared.folder / ".venv" / "launch.json"
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "done": False}))
    for path in (prepared.folder / ".venv").rglob("small-1.0.dist-info"):
        shutil.rmtree(path)
    repaired = prepared.run()
    assert "[1/3] Repairing" in repaired.stdout and repaired.returncode == 3
    assert "small-1.0.dist-info" in prepared.installed()


@pytest.mark.parametrize("lost", ["torch", "small.py"])
def test_a_package_whose_files_are_gone_is_installed_again(prepared: Clone, lost: str) -> None:
    prepared.run()
    [path] = (prepared.folder / ".venv").glob(f"[Ll]ib/**/site-packages/{lost}")
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    repaired = prepared.run()
    assert "[1/3] Repairing" in repaired.stdout and repaired.returncode == 3, repaired.stderr
    assert path.exists()
    assert "/3]" not in prepared.run().stdout


def test_an_environment_whose_pip_is_gone_is_made_anew(prepared: Clone) -> None:
    prepared.run()
    [pip] = (prepared.folder / ".venv").glob("[Ll]ib/**/site-packages/pip")
    shutil.rmtree(pip)
    assert "[1/3] Making" in prepared.run().stdout
    assert (pip / "__init__.py").exists()


def test_an_environment_whose_python_is_gone_or_that_was_moved_is_made_anew(prepared: Clone) -> None:
    for path in (prepared.folder / ".venv").rglob("python*"):
        if path.is_symlink():
            path.unlink()
    assert "[1/3] Making" in prepared.run().stdout
    moved = prepared.folder.rename(prepared.folder.with_name("moved ü"))
    prepared.folder = moved
    assert "[1/3] Making" in prepared.run().stdout
    assert "/3]" not in prepared.run().stdout


def test_without_a_network_the_error_says_so_and_the_next_step(prepared: Clone) -> None:
    pyproject = prepared.folder / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("small==1.0", "small==1.1"))
    (prepared.folder / "constraints.txt").write_text("torch==2.13.0\n")
    closed_port = {
        "PIP_NO_INDEX": "0",
        "PIP_FIND_LINKS": "",
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
        "PIP_RETRIES": "1",
    }
    stopped = prepared.run(**closed_port)
    assert stopped.returncode == 1
    assert "cannot be reached. Check the network" in stopped.stderr
    assert "small==1.1" in stopped.stderr  # pip's own last lines


class FakePip:
    """Answers each call with the next of `errors` ("" is success) and remembers what was asked."""

    def __init__(self, module: ModuleType, *errors: str) -> None:
        self.module = module
        self.errors = list(errors)
        self.calls: list[list[str]] = []

    def __call__(self, packages: list[str], *options: str, show_errors: bool = True) -> None:
        self.calls.append([*packages, *options])
        error = self.errors.pop(0) if self.errors else ""
        if error:
            raise self.module.PipError(error)


NONE_FOUND = "ERROR: No matching distribution found for torch==2.13.0+cpu"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="other systems have other builds of torch")


@linux_only
@pytest.mark.parametrize(
    ("errors", "index_answers", "last_call"),
    [
        ([], False, ["torch==2.13.0+cpu"]),
        ([NONE_FOUND], True, ["torch==2.13.0+cpu", "--extra-index-url", "https://download.pytorch.org/whl/cpu"]),
        ([NONE_FOUND], False, ["torch==2.13.0"]),
    ],
)
def test_without_a_card_the_cpu_build_comes_from_the_nearest_place_that_has_it(
    door: ModuleType, monkeypatch: pytest.MonkeyPatch, errors: list[str], index_answers: bool, last_call: list[str]
) -> None:
    pip = FakePip(door, *errors)
    monkeypatch.setattr(door, "pip_install", pip)
    monkeypatch.setattr(door, "is_reachable", lambda url: index_answers)
    monkeypatch.setattr(door, "check_disk", lambda flavour, held_bytes: None)
    door.install_torch("cpu", "2.13.0")
    assert pip.calls[-1] == last_call


@linux_only
def test_a_network_that_fails_is_not_taken_for_a_missing_cpu_build(
    door: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(door, "Retrying: Connection refused\n" + NONE_FOUND)
    monkeypatch.setattr(door, "pip_install", pip)
    with pytest.raises(door.PipError):
        door.install_torch("cpu", "2.13.0")
    assert len(pip.calls) == 1


@linux_only
def test_with_a_card_a_cpu_build_that_pip_knows_is_not_taken(door: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(door)
    monkeypatch.setattr(door, "pip_install", pip)
    door.install_torch("cuda", "2.13.0")
    assert pip.calls == [["torch===2.13.0"]]


def test_a_new_driver_means_an_environment_made_anew(door: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "venv_python_version", lambda: "3.11")
    monkeypatch.setattr(door, "torch_flavour", lambda: "cpu")
    found = {**door.wanted_stamp(()), "python": "3.11", "done": True}
    monkeypatch.setattr(door, "read_stamp", lambda: found)
    assert door.is_ready(door.wanted_stamp(()))
    assert not door.is_ready(door.wanted_stamp(("dev",)))
    monkeypatch.setattr(door, "torch_flavour", lambda: "cuda")
    assert not door.is_ready(door.wanted_stamp(()))


def test_a_disk_without_room_is_found_before_anything_is_made(
    door: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(door.shutil, "disk_usage", lambda path: SimpleNamespace(free=700_000_000))
    monkeypatch.setattr(door, "torch_flavour", lambda: "cpu")
    assert door.main([]) == 1
    assert "has 0.7 GB free; setting up needs 3.5 GB" in capsys.readouterr().err
    assert not door.PYTHON.exists()


def test_a_full_disk_in_the_middle_is_told_as_such(door: ModuleType) -> None:
    assert "disk is full" in door._explain_pip_error("ERROR: [Errno 28] No space left on device")
    assert "disk of" in door._explain_os_error(OSError(errno.ENOSPC, "No space left on device"))


def test_a_folder_without_write_access_is_named(door: ModuleType) -> None:
    told = door._explain_os_error(PermissionError(errno.EACCES, "Permission denied", "/some/where/.venv"))
    assert told.startswith("/some/where/.venv cannot be written.")


def test_a_python_without_ensurepip_is_told_which_package_to_install(
    door: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    monkeypatch.setattr(door, "check_disk", lambda flavour, held_bytes: None)
    assert door.main([]) == 1
    assert "sudo apt install python3-venv" in capsys.readouterr().err


def test_a_second_first_start_waits_for_the_first(
    door: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installs: list[dict[str, Any]] = []
    ready = threading.Event()
    monkeypatch.setattr(door, "is_ready", lambda wanted: ready.is_set())
    monkeypatch.setattr(door, "_install", installs.append)
    door.VENV.mkdir()
    second = threading.Thread(target=door.prepare, args=((),))
    with door._only_one_at_a_time():
        second.start()
        second.join(timeout=0.5)
        assert second.is_alive()
        ready.set()
    second.join(timeout=30)
    assert not second.is_alive()
    assert installs == []
    assert "waiting for it" in capsys.readouterr().out


def test_pip_can_only_install_into_the_environment(door: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX"):
        monkeypatch.setenv(name, "/somewhere/else")
    monkeypatch.setenv("PIP_USER", "1")
    door.VENV.mkdir()
    environment = door._pip_environment()
    assert not {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX"} & set(environment)
    assert (environment["PIP_USER"], environment["PIP_REQUIRE_VIRTUALENV"]) == ("0", "1")
    assert environment["PYTHONNOUSERSITE"] == "1"
    assert door.VENV in door.PYTHON.parents


@linux_only
def test_a_missing_compiler_is_a_note_and_only_beside_a_card(
    door: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(door.shutil, "which", lambda name: None)
    for has_card in (False, True):
        monkeypatch.setattr(door, "has_nvidia_driver", lambda has_card=has_card: has_card)
        door.note_missing_compiler()
        assert ("no C compiler" in capsys.readouterr().out) is has_card


@linux_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ending_in_the_middle_of_pip_ends_pip_too(
    door: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    pip = tmp_path / "pip"
    pip.write_text(f"#!/bin/sh\necho $$ > '{tmp_path}/pid'\nexec sleep 60 2>&1\n")
    pip.chmod(0o755)
    code = (
        f"import runpy, signal; signal.signal({int(number)}, signal.default_int_handler)\n"
        f"door = runpy.run_path({str(door.ROOT / 'launch.py')!r})\n"
        f"door['VENV'].mkdir(); door['pip_install'].__globals__['PYTHON'] = {str(pip)!r}\n"
        "door['pip_install'](['torch'])"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True) as process:
        for _ in range(600):
            if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip():
                break
            time.sleep(0.05)
        process.send_signal(number)
    assert process.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
