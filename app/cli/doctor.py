"""`doctor`: what this machine has of what Fireside needs, each with what to do where it is missing."""

import argparse
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from app.cli.command import Command, json_argument
from app.errors import AppError
from app.models.machine import first_card
from app.models.shelf import ModelShelf
from app.settings import Settings, version

_GB = 1e9
_LEAST_DISK_GB = 10
_HUB_PATIENCE_S = 3.0
_OLDEST_CAPABILITY = (8, 0)
_PACKAGES = ("torch", "triton", "numpy", "numba", "safetensors", "tokenizers", "huggingface_hub", "fastapi", "gradio")
_MARKS = {"ok": "ok      ", "note": "note    ", "problem": "PROBLEM "}


@dataclass(frozen=True, slots=True)
class Finding:
    """state: ok | note (it works, but less well) | problem. fix: the next step of the last two."""

    about: str
    state: str
    found: str
    fix: str = ""


def _run(arguments: argparse.Namespace, settings: Settings) -> int:
    """1 where there is a problem."""
    findings = list(examine(settings))
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(f"{_MARKS[finding.state]}{finding.about}: {finding.found}")
            if finding.fix:
                print(f"        {finding.fix}")
    return int(any(finding.state == "problem" for finding in findings))


def examine(settings: Settings) -> Iterator[Finding]:
    """Side by side, so that a hub that is slow to answer costs no more than itself."""
    with ThreadPoolExecutor(len(_CHECKS)) as pool:
        for found in pool.map(lambda check: list(check(settings)), _CHECKS):
            yield from found


def _versions(settings: Settings) -> Iterator[Finding]:
    found = f"Fireside {version()}, Python {platform.python_version()}, {platform.platform()}"
    yield Finding("versions", "ok", found)
    there = {name: _version_of(name) for name in _PACKAGES}
    missing = [name for name, found in there.items() if found is None and name != "triton"]
    words = ", ".join(f"{name} {found}" for name, found in there.items() if found)
    fix = "Delete .venv and start again: the packages are installed anew."
    yield (
        Finding("packages", "problem", f"{', '.join(missing)} missing", fix)
        if missing
        else Finding("packages", "ok", words)
    )


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpu(settings: Settings) -> Iterator[Finding]:
    found = first_card()
    if found is None:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        what = "no NVIDIA card is usable: models are computed on the CPU"
        fix = "If there is one: install NVIDIA's driver, restart, and see that `nvidia-smi` lists the card."
        if hidden is not None:
            fix += f" CUDA_VISIBLE_DEVICES is {hidden!r} and may hide it."
        yield Finding("GPU", "note", what, fix)
        return
    memory, capability = found.memory, found.capability
    free, total = memory.free / _GB, memory.total / _GB
    yield Finding("GPU", "ok", f"{memory.name}, {free:.1f} of {total:.1f} GB free, driver {found.driver}")
    if capability < _OLDEST_CAPABILITY:
        fix = "The kernels are made for Ampere and newer (RTX 30, 40, A and H cards)."
        yield Finding("GPU", "problem", f"compute capability {capability[0]}.{capability[1]}", fix)
    if "+cpu" in (_version_of("torch") or ""):
        fix = "Delete .venv and start again: the CUDA build is installed where there is a driver."
        yield Finding("PyTorch", "problem", "the CPU build is installed beside an NVIDIA card", fix)
    yield from _compiler()


def _compiler() -> Iterator[Finding]:
    """Triton calls one on Linux when it makes a kernel's launcher."""
    if sys.platform != "linux":
        return
    found = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if found:
        yield Finding("C compiler", "ok", found)
    else:
        yield Finding("C compiler", "problem", "none", "GPU kernels need one: `sudo apt install gcc` (Debian, Ubuntu).")


def _disk(settings: Settings) -> Iterator[Finding]:
    free = shutil.disk_usage(settings.home).free / _GB
    found = f"{free:.1f} GB free in {settings.home}"
    if free < _LEAST_DISK_GB:
        fix = "An 8B model takes 6 GB, and as much again as the card holds it. Free some, or take another --home."
        yield Finding("disk", "problem" if free < 1 else "note", found, fix)
    else:
        yield Finding("disk", "ok", found)


def _port(settings: Settings) -> Iterator[Finding]:
    place = f"{settings.host}, port {settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            if os.name != "nt":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        fix = f"End what listens there (it may be Fireside itself), or choose another: --port {settings.port + 1}."
        yield Finding("port", "note", f"{place} cannot be had: {error.strerror}", fix)
    else:
        yield Finding("port", "ok", f"{place} is free")


def _catalogue(settings: Settings) -> Iterator[Finding]:
    own = settings.home / "models.yaml"
    try:
        shelf = ModelShelf(settings.models_folder)
    except AppError as error:
        yield Finding("models.yaml", "problem", error.text, f"Correct {own}; each line above names its place.")
        return
    here = [entry.id for entry in shelf.entries() if shelf.state(entry).is_whole]
    yield Finding("models", "ok", f"{len(shelf.entries())} known; here: {', '.join(here) or 'none yet'}")
    yield from _half(settings.models_folder)


def _half(models: Path) -> Iterator[Finding]:
    growing = sorted(path.name[1:].removesuffix(".download") for path in models.glob(".*.download") if path.is_dir())
    if growing:
        fix = "`python launch.py models pull NAME` goes on, `models rm NAME` deletes what has come."
        yield Finding("downloads", "note", f"not finished: {', '.join(growing)}", fix)


def _hub(settings: Settings) -> Iterator[Finding]:
    import httpx2
    from huggingface_hub import constants, get_session

    from app.models.hub.token import read_token

    if constants.HF_HUB_OFFLINE:
        fix = "Unset it to search and download."
        yield Finding("hub", "note", "HF_HUB_OFFLINE is set: nothing is downloaded", fix)
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_PATIENCE_S)
    except httpx2.TransportError as error:
        fix = "Check the network, or HF_ENDPOINT where you use a mirror. Models that are here work without it."
        yield Finding("hub", "note", f"{constants.ENDPOINT} cannot be reached ({type(error).__name__})", fix)
        return
    token = "a token is kept" if read_token(settings.home) else "no token (only gated models need one)"
    yield Finding("hub", "ok", f"{constants.ENDPOINT}, {token}")


_CHECKS: tuple[Callable[[Settings], Iterator[Finding]], ...] = (_versions, _gpu, _disk, _port, _catalogue, _hub)


def _arguments(parser: argparse.ArgumentParser) -> None:
    json_argument(parser)


COMMANDS = (Command("doctor", "what this machine has of what Fireside needs, each with a fix", _run, _arguments),)
