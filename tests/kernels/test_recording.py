"""Kernel calls that are kept and made again."""

import subprocess
import sys
from pathlib import Path

import torch

from kernels.cpu.recording import Recording, call, empty, record

ROOT = Path(__file__).parents[2]


def _double(x, out) -> None:
    out[:] = 2 * x


def _doubled(x: torch.Tensor) -> torch.Tensor:
    out = empty(*x.shape)
    call(_double, x, out)
    return out


def test_a_replay_reads_what_its_inputs_hold_by_then() -> None:
    x = torch.ones(3)
    first, recording = record(lambda: _doubled(_doubled(x).view(3)[:2]))
    assert first.tolist() == [4.0, 4.0]
    x[:] = torch.tensor([5.0, 6.0, 7.0])
    assert recording is not None
    assert recording.replay().tolist() == [20.0, 24.0]


def test_what_torch_computes_cannot_be_replayed() -> None:
    x = torch.ones(2, 3)
    for run in (
        lambda: _doubled(x) + 1,
        lambda: _doubled(x.t().reshape(6)),  # a copy, though it goes by the name of a view
        lambda: _doubled(x).mul_(2),
        lambda: _doubled(torch.zeros(2)),
    ):
        result, recording = record(run)
        assert recording is None
        assert torch.equal(result, run())


def test_results_that_live_at_once_share_no_memory_and_others_do() -> None:
    recording = Recording()
    first, second = recording.empty((4, 8)), recording.empty((4, 8))
    assert first.data_ptr() != second.data_ptr()
    assert first.data_ptr() % 64 == second.data_ptr() % 64 == 0
    part, place = first.view(-1)[3:], first.data_ptr()
    del first
    assert recording.empty((4, 8)).data_ptr() != place  # a view of it lives
    del part
    assert recording.empty((4, 8)).data_ptr() == place


def test_a_recording_that_failed_leaves_none_under_way() -> None:
    def fail() -> torch.Tensor:
        raise ValueError

    try:
        record(fail)
    except ValueError:
        assert empty(3).data_ptr() != 0
        x = torch.ones(2)
        assert torch.equal(_doubled(x), 2 * x)


def test_to_record_imports_no_compiler_of_torchs() -> None:
    """It would cost a start 2 s."""
    code = """
import sys, torch
from kernels.cpu.recording import record
x = torch.ones(3)
record(lambda: x.view(3, 1))
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
