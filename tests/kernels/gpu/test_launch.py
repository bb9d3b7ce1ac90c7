"""A launch finds the kernel that Triton compiled for such arguments, and asks Triton for all others."""

from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from kernels.gpu.launch import Launchable


def _scale(x, out, size, factor, BLOCK: tl.constexpr, WAY: tl.constexpr):
    pass


class _Compiled:
    def __init__(self) -> None:
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launched.append((grid, args))


class _Kernel(JITFunction):
    """Compiles nothing and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(_scale)
        self.compiled = _Compiled()
        self.asked: list[Any] = []

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **constants: Any) -> _Compiled:
        self.asked.append((grid, args, constants))
        return self.compiled


_WORDS = torch.zeros(64, dtype=torch.int32)
_ALIGNED = _WORDS[(-(_WORDS.data_ptr() // 4)) % 4 :]
_CONSTANTS = {"WAY": "silu", "num_warps": 2, "BLOCK": 8}


def test_the_second_launch_of_a_kind_goes_to_what_the_first_was_compiled_to() -> None:
    kernel = _Kernel()
    launchable = Launchable(kernel)
    launchable[(3,)](_ALIGNED, None, 32, 0.5, **_CONSTANTS)
    assert kernel.asked == [((3,), (_ALIGNED, None, 32, 0.5), _CONSTANTS)] and not kernel.compiled.launched
    other = _ALIGNED[16:]
    launchable[(4, 5)](other, None, 48, 0.25, **_CONSTANTS)
    assert len(kernel.asked) == 1
    ((grid, args),) = kernel.compiled.launched
    assert grid == (4, 5, 1) and args[0] is other and args[1:] == (None, 48, 0.25, 8, "silu")


@pytest.mark.parametrize(
    "changed",
    [
        {"x": _ALIGNED[1:]},
        {"x": _ALIGNED.float()},
        {"x": None},
        {"size": 1},
        {"size": 33},
        {"size": 2**31},
        {"factor": 1},
        {"WAY": "gelu"},
        {"num_warps": 4},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_triton_compiles_apart_is_asked_for_apart(changed: dict[str, Any]) -> None:
    kernel = _Kernel()
    launchable = Launchable(kernel)
    given = {"x": _ALIGNED, "out": None, "size": 32, "factor": 0.5}
    for values in (given, given | changed, given, given | changed):
        constants = _CONSTANTS | {name: value for name, value in changed.items() if name in _CONSTANTS}
        constants = constants if values is not given else _CONSTANTS
        launchable[(1,)](*[values[name] for name in given], **constants)
    assert len(kernel.asked) == 2 and len(kernel.compiled.launched) == 2


def test_where_launches_are_left_out_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _Kernel()
    launchable = Launchable(kernel)
    for _ in range(2):
        launchable[(1,)](_ALIGNED, None, 32, 0.5, **_CONSTANTS)
    monkeypatch.setattr(JITFunction, "run", lambda *args, **constants: None)
    launchable[(1,)](_ALIGNED, None, 32, 0.5, **_CONSTANTS)
    assert len(kernel.asked) == 2 and len(kernel.compiled.launched) == 1


def test_runtime_arguments_by_name_are_refused() -> None:
    with pytest.raises(AssertionError, match="go by place"):
        Launchable(_Kernel())[(1,)](_ALIGNED, None, 32, factor=0.5, **_CONSTANTS)
