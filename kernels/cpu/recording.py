"""A step's kernel calls, kept with their arguments and made again: what a CUDA graph is on a card.

Of the 11 ms of a token on two cores 3 were Python that finds out the same each time: shapes, views, outputs. `record`
runs a function and keeps what its ops gave to `call`; `Recording.replay` gives the same arrays to the same kernels,
whatever they hold by then. It is for the caller to put new inputs into the tensors that the function read.
"""

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

Kernel = Callable[..., None]
_Array = np.ndarray[Any, Any]

_LINE = 64  # bytes

_under_way: ContextVar["Recording | None"] = ContextVar("recording under way", default=None)


def call(kernel: Kernel, *arguments: Any) -> None:
    """Run a kernel, tensors given as arrays."""
    recording = _under_way.get()
    if recording is not None:
        recording.keep(kernel, arguments)
    kernel(*(value.numpy() if isinstance(value, torch.Tensor) else value for value in arguments))


def call_parallel(kernel: Kernel, *arguments: Any) -> None:
    """As `call`, for a kernel whose last argument says how many threads are to share its tasks."""
    call(kernel, *arguments, numba.get_num_threads())


def empty(*shape: int) -> torch.Tensor:
    """fp32, not set yet: the place of a result."""
    recording = _under_way.get()
    return torch.empty(shape) if recording is None else recording.empty(shape)


def record(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, "Recording | None"]:
    """The result of `run`, and its recording; None if it computes anything that is no `call`, as then a replay would
    lack it.
    """
    recording = Recording()
    token = _under_way.set(recording)
    try:
        with _Watch() as watch:
            result = run()
    finally:
        _under_way.reset(token)
    recording.result = result
    return result, None if watch.has_computed else recording


class Recording:
    """Results share memory as their tensors come and go in the first run: a step needs little of it, and the same."""

    def __init__(self) -> None:
        self.result: torch.Tensor | None = None  # that of `run`; each replay writes it anew
        self._calls: list[Callable[[], None]] = []
        self._spaces: dict[int, _Array] = {}  # by address
        self._free: dict[int, list[_Array]] = {}  # by size

    def replay(self) -> torch.Tensor:
        """The result, in the memory of the last one's."""
        for call in self._calls:
            call()
        assert self.result is not None, "nothing is replayed before it was recorded"
        return self.result

    def keep(self, kernel: Kernel, arguments: tuple[Any, ...]) -> None:
        self._calls.append(partial(kernel, *map(self._kept, arguments)))

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = 4 * int(np.prod(shape))
        free = self._free.setdefault(size, [])
        space = free.pop() if free else self._new_space(size)
        array = space.view(np.float32).reshape(shape)
        # The tensor's storage holds this array: it goes when the last view of the tensor goes.
        weakref.finalize(array, free.append, space)
        return torch.from_numpy(array)

    def _new_space(self, size: int) -> _Array:
        whole = np.empty(size + _LINE, np.uint8)
        space = whole[-whole.ctypes.data % _LINE :][:size]
        self._spaces[space.ctypes.data] = space
        return space

    def _kept(self, value: Any) -> Any:
        """An argument for the replays. A result must not be held by it, lest its memory never be free."""
        if not isinstance(value, torch.Tensor):
            return value
        array = value.numpy()
        for address, space in self._spaces.items():
            offset = value.data_ptr() - address
            if 0 <= offset < space.nbytes:
                return np.ndarray(array.shape, array.dtype, space, offset, array.strides)
        return array


class _Watch(TorchDispatchMode):
    """Sees what torch is asked to do; views compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.has_computed = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's own question to a mode: True, its default, imports torch._dynamo here, 2 s of a start."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not (function.is_view and _share_memory(result, args[0] if args else None)):
            self.has_computed = True
        return result


def _share_memory(a: Any, b: Any) -> bool:
    """False where either is no single tensor."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
