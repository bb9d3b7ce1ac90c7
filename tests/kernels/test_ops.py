"""The face of the kernels: what importing it costs."""

import subprocess
import sys


def test_importing_the_face_compiles_no_cpu_kernels() -> None:
    """On a card numba would be half a second of the start, and a minute of compiling on the first."""
    code = "import sys, kernels.ops, engine.loading; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
