"""A dense model into 4 bits, by GPTQModel in a virtual environment of its own; what comes out is a model of the shelf.

The environment lies in the home folder and is made at the first use (some GB). Its packages and ours cannot share one.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Literal

from app.errors import AppError
from app.models.making import require_space, scratch_folder, sole_maker, unseen, whole_folder
from app.models.outline import Outline, outline_of_folder

GPTQMODEL = "gptqmodel==7.6.0"  # the newest that takes torch 2.13
TRANSFORMERS = "transformers==5.24.0"
_TORCH_INDEX = "https://download.pytorch.org/whl/"
_CUDA_VENV_BYTES, _CPU_VENV_BYTES = 8_000_000_000, 2_500_000_000
_GROUP_SIZES = (128, 64, 32)
_JOB = Path(__file__).with_name("quantize_job.py")
_ROOT = Path(__file__).parents[2]

Method = Literal["gptq", "awq"]


def make_python(home: Path) -> Path:
    """The Python that has GPTQModel: made where it is not there, and made anew where that was broken off."""
    folder = home / "quantize-venv"
    python, stamp = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python"), folder / "ready"
    with sole_maker(home, "quantize-venv", unseen):
        if stamp.is_file() and stamp.read_text("utf-8") == GPTQMODEL and python.exists():
            return python
        torch = metadata.version("torch")
        needed = _CPU_VENV_BYTES if torch.endswith("+cpu") else _CUDA_VENV_BYTES
        require_space(home, needed, "GPTQModel's own environment")
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)], "make an environment")
        pip = [str(python), "-m", "pip", "install"]
        # Alone, so that its own index is asked for nothing else, whether it can be reached or not.
        _run([*pip, "--no-deps", f"torch=={torch}", *_torch_source(torch)], "install PyTorch")
        _run([*pip, f"torch=={torch}", TRANSFORMERS, GPTQMODEL], "install GPTQModel")
        stamp.write_text(GPTQMODEL, encoding="utf-8")
    return python


def _torch_source(version: str) -> list[str]:
    """Where pip finds the same build as ours: PyPI has others than one with a name, such as 2.13.0+cpu."""
    _, _, build = version.partition("+")
    return ["--extra-index-url", _TORCH_INDEX + build] if build else []


def quantize(source: Path, target: Path, method: Method, python: Path, text: Path | None = None) -> None:
    """`target` comes to be whole or not at all. text: to calibrate on; our own documents where there is none.

    Raises AppError: for a model that is quantised already, or where GPTQModel ends with an error
    """
    outline = outline_of_folder(source)
    if outline.stated is not None:
        what = f"{source.name} is {outline.stated.method} with {outline.stated.bits} bits already."
        raise AppError(400, "bad_request", what, hint="Choose a dense model.", param="model")
    with (
        sole_maker(target.parent, target.name, unseen),
        scratch_folder(target.parent, target.name) as scratch,
        whole_folder(target) as making,
    ):
        require_space(scratch, sum(path.stat().st_size for path in source.glob("*.safetensors")), target.name)
        calibration = scratch / "calibration.txt"
        calibration.write_text(text.read_text("utf-8") if text else _our_words(), encoding="utf-8")
        task = {
            "source": str(source.absolute()),
            "target": str(making),
            "method": method,
            "group_size": group_size(outline),
            "text": str(calibration),
        }
        _run([str(python), str(_JOB), json.dumps(task)], f"quantise {source.name}", cwd=scratch)  # it leaves logs there


def group_size(outline: Outline) -> int:
    """The usual 128 inputs a scale, or as many as divide the inputs of every projection. Raises AppError for none."""
    inputs = {shape[1] for name, (shape, _) in outline.tensors.items() if _is_projection(name, shape)}
    fitting = [size for size in _GROUP_SIZES if all(count % size == 0 for count in inputs)]
    if not fitting:
        raise AppError(501, "unsupported_model", f"Inputs of {sorted(inputs)} do not divide into groups of 32.")
    return fitting[0]


def _is_projection(name: str, shape: Iterable[int]) -> bool:
    return ".layers." in name and name.endswith(".weight") and len(tuple(shape)) == 2


def _our_words() -> str:
    """English and code: the documents that come with Fireside."""
    return "\n".join(path.read_text("utf-8") for path in sorted((*_ROOT.glob("*.md"), *_ROOT.glob("docs/*.md"))))


def _run(command: list[str], what: str, cwd: Path | None = None) -> None:
    """Its words go to the terminal as they are. Raises AppError."""
    code = subprocess.run(command, check=False, cwd=cwd).returncode
    if code:
        raise AppError(500, "quantize_failed", f"Could not {what}: its last lines above say why (exit code {code}).")
