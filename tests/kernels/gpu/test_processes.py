"""Kernels ordered from processes are compiled there, and found by who makes them afterwards."""

import os
import subprocess
import sys
import textwrap

import pytest

# In a process of its own: this one has kernels interpreted, and may have used the card. A driver that knows its target
# and nothing else stands for the card, so that what is launched is compiled and left at that.
_PROGRAM = """
    import sys
    import torch, triton
    from triton.backends.compiler import GPUTarget
    from kernels.gpu import ahead, norm, processes

    class Driver(processes._Target):
        def get_current_stream(self, device): return 0

    compilers = processes.CompileProcesses(2)
    triton.runtime.driver.set_active(Driver(GPUTarget("cuda", 86, 32)))
    x, residual = torch.randn(2, 5, 256)
    weight = torch.randn(256)

    def work():
        norm.add_rms_norm(x, residual, weight, 1e-3)
        norm.add_rms_norm(None, residual, weight, 1e-3)
        norm.add_rms_norm(x, residual, weight, 1e-3)

    asked = ahead._asked_for(work, compilers)
    if sys.argv[1] == "killed":
        for process in compilers._pool._processes.values():
            process.kill()
    found = []
    triton.knobs.compilation.listener = lambda cache_hit, **rest: found.append(cache_hit)
    kernels = [compilation.compile() for compilation in asked]
    assert all(kernel.asm["cubin"] for kernel in kernels)
    print(found)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there are no such processes elsewhere")
@pytest.mark.parametrize(
    ("fate", "found"),
    [("left alone", "[True, True]"), pytest.param("killed", "[False, False]", marks=pytest.mark.slow)],
)
def test_what_a_process_compiled_is_found_and_what_none_did_is_compiled_here(tmp_path, fate: str, found: str) -> None:
    pytest.importorskip("triton.backends.nvidia")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", textwrap.dedent(_PROGRAM), fate]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == found


@pytest.mark.skipif(sys.platform != "linux", reason="there are no such processes elsewhere")
def test_files_of_the_card_are_closed_and_no_others(tmp_path, monkeypatch) -> None:
    from kernels.gpu import processes

    card, other = tmp_path / "nvidia0", tmp_path / "other"
    monkeypatch.setattr(processes, "_CARD_FILES", str(card))
    of_card, of_other = (os.open(path, os.O_RDWR | os.O_CREAT) for path in (card, other))
    processes._let_go_of_the_card()
    os.fstat(of_other)
    os.close(of_other)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(of_card)
