"""Whether Triton can compile and start kernels on this machine: asked once at load, told in plain words.

Triton brings its own compiler for the card, but builds a small library that starts kernels with the host's C compiler
and Python's header. Imports no triton at the top: that it is broken is one of the answers.
"""

import importlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path

_REFERENCE = "Or start with REFERENCE=1 in the environment: no kernels, and much slower."


def missing_for_kernels() -> str | None:
    """What keeps the card's kernels from running and the next step, in words for a user; None if nothing does."""
    try:
        importlib.import_module("triton")
        importlib.import_module("triton.language")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "triton":
            package = "triton-windows" if sys.platform == "win32" else "triton"
            return f"The card's kernels need the package {package}: pip install {package}. {_REFERENCE}"
        return _broken(error)
    except Exception as error:  # whatever a half-installed package raises
        return _broken(error)
    if sys.platform == "win32":
        return None  # triton-windows brings a compiler and the headers
    return _missing_compiler() or _missing_header()


def _broken(error: Exception) -> str:
    return f"The package triton does not load ({type(error).__name__}: {error}). Install it again. {_REFERENCE}"


def _missing_compiler() -> str | None:
    asked_for = os.environ.get("CC")
    if asked_for and not shutil.which(asked_for):
        return f"CC names the C compiler {asked_for}, which is not there. Unset it or mend it. {_REFERENCE}"
    if any(shutil.which(name) for name in (asked_for, "gcc", "clang", "cc") if name):
        return None
    return (
        "There is no C compiler (gcc, clang), with which Triton builds what starts the card's kernels. Install one, "
        f"such as with: sudo apt install build-essential. {_REFERENCE}"
    )


def _missing_header() -> str | None:
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if header.is_file():
        return None
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    return (
        f"Python's header {header} is not there, which Triton needs to build what starts the card's kernels. Install "
        f"it, such as with: sudo apt install {package}. {_REFERENCE}"
    )
