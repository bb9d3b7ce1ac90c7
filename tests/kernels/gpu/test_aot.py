"""The GPU kernels compile for the cards they are for, to machine code that keeps the rules: all without a card."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process that compiles: this one may have been told to interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000)


@pytest.fixture(scope="module")
def faults() -> dict[str, list[str]]:
    done = _run("tests/kernels/gpu/judged_kernels.py")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_plain_kernel_has_no_faults(faults: dict[str, list[str]]) -> None:
    assert faults["good copy"] == []


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("converted product", "conversions of integers in the main loop"),
        ("waiting product", "stores to shared memory in the main loop"),
        ("waiting product", "no 16-byte asynchronous copies"),
        ("dense product", "instructions a weight"),
        ("spilling product", "instructions that spill registers"),
        ("spilling product", "bytes of stack"),
        ("spilling product", "bytes of shared memory, the card has 101,376"),
    ],
)
def test_a_kernel_that_breaks_a_rule_is_told_by_it(faults: dict[str, list[str]], kernel: str, words: str) -> None:
    assert any(words in fault for fault in faults[kernel]), faults[kernel]


_SOME = (
    "to 8 rows: 8x64x256",
    "to 16 rows",
    "to 32 rows",
    "tiles of 8 rows",
    "norm 4096",
    "moe group 8",
    "split_kernel 128 fp16 rows 16 a chunk each",
)


def test_kernels_of_each_kind_keep_the_rules_on_the_card_that_most_have() -> None:
    """sm_86 stands for sm_89 too: the machine code is the same but for its name."""
    done = _run("-m", "kernels.gpu.aot", "--archs", "86", *_SOME)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_row_of_the_tables_keeps_the_rules_everywhere() -> None:
    done = _run("-m", "kernels.gpu.aot")
    assert done.returncode == 0, done.stdout + done.stderr
