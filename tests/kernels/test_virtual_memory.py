"""Addresses that stay and memory that comes and goes: over a driver that is none, and on a card over its own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.virtual_memory import CudaDriver, VirtualBuffer

PIECE = 10


class CountingDriver:
    """A card of `room` pieces; refuses what a real one would."""

    granularity = PIECE

    def __init__(self, room: int) -> None:
        self.room, self.backed, self.reserved, self.last = room, dict[int, int](), dict[int, int](), 0
        self.opened: set[int] = set()

    def reserve(self, num_bytes: int) -> int:
        address = 1000 * (len(self.reserved) + 1)
        self.reserved[address] = num_bytes
        return address

    def back(self, address: int, num_bytes: int) -> int:
        if len(self.backed) == self.room:
            raise MemoryError
        assert num_bytes == PIECE and address not in self.backed
        assert any(start <= address and address + PIECE <= start + size for start, size in self.reserved.items())
        self.last += 1
        self.backed[address] = self.last
        return self.last

    def open(self, address: int, num_bytes: int) -> None:
        pieces = set(range(address, address + num_bytes, PIECE))
        assert pieces <= set(self.backed) and not pieces & self.opened
        self.opened |= pieces

    def release(self, address: int, num_bytes: int, handle: int) -> None:
        assert self.backed.pop(address) == handle
        self.opened.discard(address)

    def free(self, address: int, num_bytes: int) -> None:
        assert self.reserved.pop(address) == num_bytes
        assert not any(address <= piece < address + num_bytes for piece in self.backed)


@given(st.lists(st.integers(0, 95), max_size=10))
def test_exactly_the_beginning_is_backed_by_whole_pieces(sizes: list[int]) -> None:
    driver = CountingDriver(room=100)
    buffer = VirtualBuffer(driver, 95)
    for size in sizes:
        kept = dict(driver.backed)
        buffer.resize(size)
        expected = {buffer.address + at for at in range(0, size, PIECE)}
        assert set(driver.backed) == expected == driver.opened
        assert all(kept.get(at, handle) == handle for at, handle in driver.backed.items()), "content was lost"


def test_a_card_without_room_leaves_the_buffer_as_it_was() -> None:
    driver = CountingDriver(room=5)
    buffer = VirtualBuffer(driver, 100)
    buffer.resize(30)
    kept = dict(driver.backed)
    with pytest.raises(MemoryError):
        buffer.resize(60)
    assert driver.backed == kept and buffer.num_backed == 30


def test_nothing_is_left_of_a_buffer_that_nobody_has() -> None:
    driver = CountingDriver(room=5)
    buffer = VirtualBuffer(driver, 30)
    buffer.resize(25)
    del buffer
    assert not driver.backed and not driver.reserved


@pytest.mark.gpu
def test_memory_goes_back_to_the_system_and_the_beginning_stays() -> None:
    size = 256 << 20
    buffer = VirtualBuffer(CudaDriver(), size)
    buffer.resize(size)
    tensor = buffer.tensor((size // 2,), torch.bfloat16)
    tensor.fill_(3.0)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    buffer.resize(size // 2)
    assert torch.cuda.mem_get_info()[0] - free == pytest.approx(size // 2, abs=2**22)
    assert bool((tensor[: size // 4] == 3.0).all())
    free = torch.cuda.mem_get_info()[0]
    buffer.resize(size)
    assert free - torch.cuda.mem_get_info()[0] == pytest.approx(size // 2, abs=2**22)
    tensor[size // 4 :].fill_(4.0)
    assert bool((tensor[: size // 4] == 3.0).all()) and bool((tensor[size // 4 :] == 4.0).all())
