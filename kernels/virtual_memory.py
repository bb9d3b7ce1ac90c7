"""A card's memory behind fixed addresses: reserved once, and backed by as much memory as is wanted at the moment.

What is given back goes to the system at once, for any program; what a tensor has below the cut stays where it is. Over
the driver's own calls (cuMemAddressReserve, cuMemCreate, cuMemMap: CUDA driver API, virtual memory management), since
torch can only free whole tensors.
"""

import ctypes
import sys
import weakref
from typing import Any, Protocol

import torch

_PINNED, _ON_DEVICE, _READ_WRITE, _OUT_OF_MEMORY = 1, 1, 3, 2  # of cuda.h


class Driver(Protocol):
    """Addresses and handles are plain numbers; sizes are multiples of `granularity`."""

    granularity: int

    def reserve(self, num_bytes: int) -> int: ...

    def back(self, address: int, num_bytes: int) -> int:
        """Put new memory behind an address; returns its handle. Raises MemoryError if the card has no more."""
        ...

    def open(self, address: int, num_bytes: int) -> None:
        """Let all that was put behind addresses be read and written."""
        ...

    def release(self, address: int, num_bytes: int, handle: int) -> None: ...

    def free(self, address: int, num_bytes: int) -> None: ...


class VirtualBuffer:
    """Bytes on the card at an address that never changes, of which the first `num_backed` exist."""

    def __init__(self, driver: Driver, most_bytes: int) -> None:
        """Nothing of it exists until `resize`."""
        self._driver = driver
        self._piece = driver.granularity
        self.most_bytes = _rounded_up(most_bytes, self._piece)
        self.address = driver.reserve(self.most_bytes)
        self._handles: list[int] = []
        weakref.finalize(self, _give_up, driver, self.address, self.most_bytes, self._handles)

    @property
    def num_backed(self) -> int:
        return len(self._handles) * self._piece

    def resize(self, num_bytes: int) -> None:
        """Have at least `num_bytes` exist, and no more than the granularity asks for; the beginning keeps its content.

        Nothing that runs on the card may still use what is given back. Raises MemoryError, and is as before, if the
        card has no more.
        """
        wanted = _rounded_up(num_bytes, self._piece)
        assert wanted <= self.most_bytes, "more than was reserved"
        before = self.num_backed
        try:
            while self.num_backed < wanted:
                self._handles.append(self._driver.back(self.address + self.num_backed, self._piece))
            if before < wanted:  # at once: it takes the driver longer than the rest
                self._driver.open(self.address + before, wanted - before)
        except MemoryError:
            self._cut(before)
            raise
        self._cut(wanted)

    def _cut(self, num_bytes: int) -> None:
        while self.num_backed > num_bytes:
            handle = self._handles.pop()
            self._driver.release(self.address + self.num_backed, self._piece, handle)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """All that was reserved, as a tensor; what does not exist must not be touched. The beginning must exist."""
        owner = _Bytes(self, self.most_bytes)
        flat = torch.as_tensor(owner, device="cuda").view(dtype)
        count = torch.Size(shape).numel()
        return flat[:count].view(shape)


def _give_up(driver: Driver, address: int, num_reserved: int, handles: list[int]) -> None:
    """Once neither the buffer nor a tensor of it is left."""
    piece = driver.granularity
    while handles:
        driver.release(address + (len(handles) - 1) * piece, piece, handles.pop())
    driver.free(address, num_reserved)


class _Bytes:
    """Memory in the words by which libraries hand it to each other; keeps the buffer alive as long as the tensor."""

    def __init__(self, buffer: VirtualBuffer, num_bytes: int) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "strides": None,
            "data": (buffer.address, False),
            "version": 3,
        }


def _rounded_up(num_bytes: int, piece: int) -> int:
    return -(-num_bytes // piece) * piece


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("device", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaDriver:
    """The driver of the first card, whose context torch has made."""

    def __init__(self) -> None:
        torch.cuda.init()
        self._cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        location = _Location(_ON_DEVICE, torch.cuda.current_device())
        self._allocation = _Allocation(kind=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._allocation), 0)
        self.granularity = granularity.value

    def reserve(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        sizes = (ctypes.c_size_t(num_bytes), ctypes.c_size_t(0))
        self._call("cuMemAddressReserve", ctypes.byref(address), *sizes, ctypes.c_uint64(0), ctypes.c_uint64(0))
        return address.value

    def back(self, address: int, num_bytes: int) -> int:
        handle, size, at = ctypes.c_uint64(), ctypes.c_size_t(num_bytes), ctypes.c_uint64(address)
        allocation = ctypes.byref(self._allocation)
        self._call("cuMemCreate", ctypes.byref(handle), size, allocation, ctypes.c_uint64(0))
        self._call("cuMemMap", at, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        return handle.value

    def open(self, address: int, num_bytes: int) -> None:
        at, size = ctypes.c_uint64(address), ctypes.c_size_t(num_bytes)
        self._call("cuMemSetAccess", at, size, ctypes.byref(self._access), ctypes.c_size_t(1))

    def release(self, address: int, num_bytes: int, handle: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def free(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code == _OUT_OF_MEMORY:
            raise MemoryError(f"{name}: the card has no memory left")
        if code:
            raise RuntimeError(f"{name} failed with CUDA error {code}")
