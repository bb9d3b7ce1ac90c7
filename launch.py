"""The front door: `python launch.py` makes .venv on the first run, re-executes inside it and starts the app.

`python launch.py test [pytest arguments]` does the same with the development set and runs the tests; a first word of
COMMANDS runs that command in the app's place. Standard library only. The file must parse on older Pythons too, so that
they are told what is needed. Installs into .venv alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = VENV / "launch.json"
LOCK = VENV / "launch.lock"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

# The whole suite, a file at a time to each core; four at most, since each may hold torch and models. With arguments
# pytest runs as they say: one process, which can be watched and debugged.
ALL_CORES = ("-n", "logical", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder")
COMMANDS = ("models", "fit", "chat", "doctor", "quantize")  # first words of app.cli's commands
OLDEST_PYTHON = (3, 11)
TORCH_INDEX = "https://download.pytorch.org/whl/"
# Disk that a fresh set-up takes, in bytes: the installed set, what pip unpacks meanwhile and what it caches.
DISK_BYTES = {"cpu": 3_500_000_000, "default": 3_500_000_000, "cuda": 11_000_000_000}


class SetupError(Exception):
    """Set-up cannot go on; the message says why and what to do next."""


class PipError(Exception):
    """pip ended with an error; holds the last lines that it wrote."""


def main(argv: list[str]) -> int:
    if sys.version_info < OLDEST_PYTHON:
        return _refuse(
            "Fireside needs Python {}.{} or newer; this is {}. Install a newer Python "
            "and start it with that one, for example `python3.11 launch.py`.".format(
                *OLDEST_PYTHON, platform.python_version()
            )
        )
    try:
        return _test(argv[1:]) if argv[:1] == ["test"] else _start(argv)
    except SetupError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(_explain_os_error(error))
    except KeyboardInterrupt:
        return _refuse("Stopped. The next start goes on from here.", 130)


def _start(argv: list[str]) -> int:
    from app import settings

    is_command = bool(argv) and argv[0] in COMMANDS
    try:
        if not is_command:
            settings.read_flags(argv)
    except settings.SettingsError as error:
        return _refuse(str(error), 2)
    if not is_inside():
        note_missing_compiler()
    prepare(())
    if not is_inside():
        return replace_process([str(PYTHON), str(ROOT / "launch.py"), *argv])
    if is_command:
        from app.cli import main as cli

        return cli.main(argv)
    from app import server

    return server.main(argv)


def _test(pytest_arguments: list[str]) -> int:
    prepare(("dev",))
    os.chdir(ROOT)
    return replace_process([str(PYTHON), "-m", "pytest", *(pytest_arguments or ALL_CORES)])


def prepare(extras: tuple[str, ...]) -> None:
    """Make .venv hold the pinned set with these extras; costs milliseconds where it does already. Raises SetupError."""
    wanted = wanted_stamp(extras)
    if is_ready(wanted):
        return
    VENV.mkdir(exist_ok=True)
    with _only_one_at_a_time():
        if not is_ready(wanted):  # the one we waited for may have done it
            _install(wanted)


def wanted_stamp(extras: tuple[str, ...]) -> dict:
    """What .venv must be: where it lies, what is pinned, which build of torch, which extras."""
    project = _project()
    named = json.dumps([project["dependencies"], project["optional-dependencies"]])
    pins = hashlib.sha256(named.encode() + (ROOT / "constraints.txt").read_bytes())
    return {"folder": str(VENV), "pins": pins.hexdigest(), "torch": torch_flavour(), "extras": sorted(extras)}


def read_stamp() -> dict:
    """What the last set-up wrote; empty where there was none. `done` is false while one is half-way."""
    try:
        found = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_ready(wanted: dict) -> bool:
    found = read_stamp()
    return (
        found.get("done") is True
        and found.get("pins") == wanted["pins"]
        and set(wanted["extras"]) <= set(found["extras"])
        and _is_sound(found, wanted)
        and not damaged_packages()
    )


def _is_sound(found: dict, wanted: dict) -> bool:
    """Whether .venv can be built upon: not moved, the same build of torch, its Python there and still the same."""
    return (
        found.get("folder") == wanted["folder"]
        and found.get("torch") == wanted["torch"]
        and found.get("python") == venv_python_version()
    )


def damaged_packages() -> list[Path]:
    """The .dist-info of packages whose files are gone: a folder or module at the top that RECORD lists is not there."""
    sites = [*VENV.glob("lib/python*/site-packages"), *VENV.glob("Lib/site-packages")]
    return [info for site in sites for info in site.glob("*.dist-info") if _is_damaged(info)]


def _is_damaged(info: Path) -> bool:
    try:
        record = (info / "RECORD").read_bytes()
    except OSError:
        return True
    tops = set(re.findall(rb'(?m)^"?([^/,"\r\n]+)', record)) - {b"__pycache__"}  # which Python makes again by itself
    return not all((info.parent / os.fsdecode(top)).exists() for top in tops)


def venv_python_version() -> str:
    """ "3.11" where .venv's Python runs, "" where it does not (its base Python was removed, say)."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([str(PYTHON), "-ISc", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _install(wanted: dict) -> None:
    begun = time.monotonic()
    found = read_stamp()
    damaged = damaged_packages()
    sound = _is_sound(found, wanted) and not any(info.name.startswith("pip-") for info in damaged)
    check_disk(wanted["torch"], _size(VENV) if sound else 0)
    extras = sorted({*wanted["extras"], *(found["extras"] if sound else ())})
    if sound:
        _say(1, f"Repairing or updating {VENV}")
        for info in damaged:  # while it stands, pip believes that the package is installed
            shutil.rmtree(info)
        version = found["python"]
    else:
        _say(1, f"Making {VENV} with Python {platform.python_version()}")
        version = make_venv()
    stamp = {**wanted, "extras": extras, "python": version}
    _write_stamp({**stamp, "done": False})
    project = _project()
    try:
        install_torch(wanted["torch"], _torch_version(project))
        packages = [*project["dependencies"], *(line for e in extras for line in project["optional-dependencies"][e])]
        _say(3, f"Installing the other packages ({len(packages) - 1} and what they need)")
        pip_install(packages)
    except PipError as error:
        raise SetupError(_explain_pip_error(str(error))) from None
    finally:
        shutil.rmtree(_pip_folder(), ignore_errors=True)
    _write_stamp({**stamp, "done": True})
    print(f"Set-up took {time.monotonic() - begun:.0f} s.", flush=True)


def make_venv() -> str:
    """A fresh .venv (what was in it goes, except our lock); returns its Python's version."""
    try:
        import ensurepip  # noqa: F401  Debian splits it off; venv fails half-way without it
        import venv
    except ImportError:
        raise SetupError(
            "This Python has no venv module with pip in it. On Debian or Ubuntu: "
            "`sudo apt install python3-venv`, then start again."
        ) from None
    for entry in VENV.iterdir():
        if entry != LOCK:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    try:
        venv.EnvBuilder(with_pip=True, symlinks=os.name != "nt").create(VENV)
    except subprocess.CalledProcessError as error:
        output = (error.output or b"").decode(errors="replace").strip()
        raise SetupError(f"pip could not be put into {VENV}: {output or error}") from None
    version = venv_python_version()
    if not version:
        raise SetupError(f"{PYTHON} was made but does not run. Is {ROOT} on a disk mounted `noexec`?")
    return version


def _write_stamp(stamp: dict) -> None:
    part = STAMP.with_suffix(".part")
    part.write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    os.replace(part, STAMP)


@contextlib.contextmanager
def _only_one_at_a_time():
    """Two first starts at once: the second waits. The system drops the lock with the process that holds it."""
    with open(LOCK, "a+b") as file:
        if not _try_lock(file):
            print("Another start is preparing this folder; waiting for it.", flush=True)
            while not _try_lock(file):
                time.sleep(0.2)
        yield


def _try_lock(file) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
            return False
        raise
    return True


def check_disk(flavour: str, held_bytes: int) -> None:
    free, need = shutil.disk_usage(ROOT).free, max(DISK_BYTES[flavour] - held_bytes, 0)
    if free < need:
        raise SetupError(
            f"The disk of {ROOT} has {free / 1e9:.1f} GB free; setting up needs {need / 1e9:.1f} GB. "
            "Free some space, or move this folder to a larger disk, and start again."
        )


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def torch_flavour() -> str:
    """ "cuda" where an NVIDIA driver is found, "cpu" where none is, "default" where there is one build only (macOS)."""
    if sys.platform == "darwin":
        return "default"
    return "cuda" if has_nvidia_driver() else "cpu"


def has_nvidia_driver() -> bool:
    if shutil.which("nvidia-smi"):
        return True
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    return True


def install_torch(flavour: str, version: str) -> None:
    """Torch first and alone, so that no other package draws in the build of several GB. Raises PipError."""
    if flavour == "cuda":
        _say(2, f"Installing PyTorch {version} for CUDA (about 3 GB to download)")
        if os.name == "nt":
            pip_install([f"torch=={version}"], "--extra-index-url", TORCH_INDEX + "cu130")
        else:
            pip_install([f"torch==={version}"])  # exactly: `==` would also take a `+cpu` build that pip may know
    elif flavour == "cpu" and os.name != "nt":
        _say(2, f"Installing PyTorch {version} for the CPU")
        _install_linux_cpu_torch(version)
    else:
        _say(2, f"Installing PyTorch {version}")
        pip_install([f"torch=={version}"])


def _install_linux_cpu_torch(version: str) -> None:
    """From where pip is set up to look; else from PyTorch's own index; else PyPI's build, which is the CUDA one."""
    cpu_build = f"torch=={version}+cpu"
    try:
        return pip_install([cpu_build], show_errors=False)
    except PipError as error:
        if _is_network_trouble(str(error)) or "No matching distribution" not in str(error):
            raise
    if is_reachable(TORCH_INDEX + "cpu/torch/"):
        return pip_install([cpu_build], "--extra-index-url", TORCH_INDEX + "cpu")
    print("  No CPU build of PyTorch is within reach: taking PyPI's, the CUDA build of several GB.", flush=True)
    check_disk("cuda", _size(VENV))
    return pip_install([f"torch=={version}"])


def is_reachable(url: str) -> bool:
    import urllib.request  # here: it takes longer to import than a second start has to spend

    try:
        with urllib.request.urlopen(url, timeout=4) as answer:
            return answer.status == 200
    except (OSError, ValueError):
        return False


def pip_install(packages: list[str], *options: str, show_errors: bool = True) -> None:
    """pip's progress goes to the screen as it is. Raises PipError with the last lines of what it complained about."""
    command = [str(PYTHON), "-m", "pip", "install", "-c", str(ROOT / "constraints.txt"), *options, *packages]
    tail = []
    with subprocess.Popen(
        command, env=_pip_environment(), stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                tail = [*tail[-11:], line.rstrip()]
                if show_errors:
                    sys.stderr.write(line)
            process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        raise PipError("\n".join(tail))


def clean_environment() -> dict:
    """The environment without what would mix the user's own Python into .venv."""
    dropped = ("PYTHONHOME", "PYTHONPATH", "__PYVENV_LAUNCHER__")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PYTHONNOUSERSITE": "1"}


def _pip_environment() -> dict:
    """pip inside .venv only, asking nothing, unpacking on .venv's own disk (a small /tmp would fill)."""
    _pip_folder().mkdir(exist_ok=True)
    kept = {name: value for name, value in clean_environment().items() if name not in ("PIP_TARGET", "PIP_PREFIX")}
    ours = {"PIP_REQUIRE_VIRTUALENV": "1", "PIP_USER": "0", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(_pip_folder()))
    return {"PIP_RETRIES": "2", **kept, **ours, **places}


def _pip_folder() -> Path:
    return VENV / "pip-tmp"


def _project() -> dict:
    import tomllib  # here: Pythons before 3.11 have none, and must get as far as the message

    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)["project"]


def _torch_version(project: dict) -> str:
    return next(line.split("==")[1].strip() for line in project["dependencies"] if line.startswith("torch=="))


def is_inside() -> bool:
    return Path(sys.prefix).resolve() == VENV.resolve()


def replace_process(command: list[str]) -> int:
    """Go on as `command`. Windows has no true exec (it breaks quoting and the console): there we wait for a child."""
    sys.stdout.flush()
    if os.name != "nt":
        os.execve(command[0], command, clean_environment())
    with subprocess.Popen(command, env=clean_environment()) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:  # the child got it too, and ends in its own way
                continue


def note_missing_compiler() -> None:
    named = os.environ.get("CC")
    if sys.platform != "linux" or not has_nvidia_driver() or any(map(shutil.which, [named or "cc", "gcc", "clang"])):
        return
    print(
        "Note: no C compiler was found; the GPU kernels need one (Debian, Ubuntu: `sudo apt install gcc`).", flush=True
    )


def _explain_pip_error(tail: str) -> str:
    text = tail.lower()
    if "no space left" in text or "errno 28" in text:
        cause = "The disk is full. Free some space and start again."
    elif _is_network_trouble(tail):
        cause = "The package index cannot be reached. Check the network (or pip's proxy settings) and start again."
    else:
        cause = f"Start again; if it stays so, delete {VENV} first."
    return (
        f"pip could not install what is needed. Its last lines:\n\n{tail}\n\n{cause} What is installed so far is kept."
    )


def _is_network_trouble(tail: str) -> bool:
    signs = ("connection", "name resolution", "timed out", "proxyerror", "max retries")
    return any(sign in tail.lower() for sign in signs)


def _explain_os_error(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return f"The disk of {ROOT} is full. Free some space and start again."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.filename or ROOT} cannot be written. Put the folder where you may write, or change its rights."
    raise error


def _refuse(message: str, code: int = 1) -> int:
    print(message, file=sys.stderr, flush=True)
    return code


def _say(step: int, text: str) -> None:
    print(f"[{step}/3] {text}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # set-up ends pip before it ends itself
    sys.exit(main(sys.argv[1:]))
