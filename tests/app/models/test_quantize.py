"""Quantising: what is asked of GPTQModel, what becomes of its result; in the slow set GPTQModel itself."""

import json
import os
import sys
from pathlib import Path

import pytest

from app.cli import main as cli
from app.errors import AppError
from app.models.embedded.forms import Form, ensure_embedded
from app.models.machine import card
from app.models.outline import outline_of_folder
from app.models.quantize import group_size, quantize
from app.models.quantize_job import chunks
from tests.checkpoints import tiny_checkpoint

ROOT = Path(__file__).parents[3]
# A Python that has GPTQModel 7.6, as `python launch.py quantize` makes one; without it the slow test is skipped.
PYTHON = os.environ.get("FIRESIDE_QUANTIZE_PYTHON", "")


def stand_in(folder: Path, code: str) -> Path:
    """In the place of a Python with GPTQModel: told what that would be told."""
    script, path = folder / "stand_in.py", folder / "python"
    script.write_text(f"import json, sys\ntask = json.loads(sys.argv[2])\n{code}\n")
    # Not as the script's own #!, which ends at the first space of a path.
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.skipif(os.name == "nt", reason="needs a script that runs")
def test_the_result_is_whole_and_the_task_has_what_the_job_needs(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "dense", "llama")
    python = stand_in(
        tmp_path,
        "open(task['target'] + '/task.json', 'w').write(json.dumps(task | {'words': len(open(task['text']).read())}))",
    )
    out = tmp_path / "models of a new home" / "out"
    quantize(tmp_path / "dense", out, "awq", python)
    assert [path.name for path in out.iterdir() if not path.name.startswith(".")] == ["task.json"]
    task = json.loads((out / "task.json").read_text())
    assert (task["source"], task["method"], task["group_size"]) == (str(tmp_path / "dense"), "awq", 64)
    assert task["words"] > 20_000


@pytest.mark.skipif(os.name == "nt", reason="needs a script that runs")
def test_a_job_that_fails_leaves_no_model(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "dense", "llama")
    with pytest.raises(AppError, match=r"Could not quantise dense.*exit code 3"):
        quantize(tmp_path / "dense", tmp_path / "out", "gptq", stand_in(tmp_path, "sys.exit(3)"))
    assert not (tmp_path / "out").exists()


def test_a_model_in_4_bits_is_not_quantised_again(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "four", "llama", "gptq")
    with pytest.raises(AppError, match="is gptq with 4 bits already"):
        quantize(tmp_path / "four", tmp_path / "out", "gptq", Path(sys.executable))


def test_groups_are_as_large_as_every_projection_allows(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")  # 64 and 192 inputs
    assert group_size(outline_of_folder(tmp_path)) == 64


def test_the_calibration_is_spread_over_the_whole_text() -> None:
    text = "".join(f"{index:08}" for index in range(100_000))
    found = chunks(text)
    assert len(found) == 128 and found[0].startswith("00000000") and int(found[-1][:8]) > 90_000
    assert chunks("short") == ["short"]


@pytest.mark.skipif(card() is not None, reason="this machine has a card")
def test_awq_without_a_card_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_checkpoint(tmp_path / "dense", "llama")
    assert cli.main(["quantize", str(tmp_path / "dense"), "--method", "awq", "--home", str(tmp_path)]) == 1
    assert "--method gptq runs on a CPU too" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not PYTHON, reason="FIRESIDE_QUANTIZE_PYTHON names no Python that has GPTQModel")
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_the_embedded_model_quantised_by_gptqmodel_answers(
    embedded_home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str
) -> None:
    ensure_embedded(Form.DENSE, embedded_home / "models", lambda stage, fraction: None)
    source = str(embedded_home / "models" / "smollm2-135m-instruct-dense")
    if method == "awq" and card() is None:
        pytest.skip("GPTQModel makes AWQ on a card alone")
    (tmp_path / "text.txt").write_text((ROOT / "README.md").read_text("utf-8")[:9000], encoding="utf-8")
    words = ["quantize", source, "--method", method, "--python", PYTHON, "--home", str(tmp_path)]
    assert cli.main([*words, "--text", str(tmp_path / "text.txt")]) == 0
    told = capfd.readouterr().out
    assert f"smollm2-135m-instruct-dense-own-{method}: {method}" in told
    assert "The capital of France is Paris" in told
