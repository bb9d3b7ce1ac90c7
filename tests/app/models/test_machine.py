"""Which card is the one that an engine would compute on: the library's order is not CUDA's."""

import os
from types import SimpleNamespace

import pynvml
import pytest

from app.models import machine

# By their place on the bus: name, cores, clock in MHz, UUID.
CARDS = (("slow", 1000, 1500, "GPU-aa11"), ("fast", 9000, 1700, "GPU-bb22"), ("spare", 5000, 1600, "GPU-bb33"))


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    def mib(number: int) -> int:
        return (number + 1) * 2**20

    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: len(CARDS),
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetHandleByUUID": lambda uuid: {"MIG-cc": 2}[uuid],
        "nvmlDeviceGetUUID": lambda number: CARDS[number][3],
        "nvmlDeviceGetName": lambda number: CARDS[number][0].encode(),
        "nvmlDeviceGetNumGpuCores": lambda number: CARDS[number][1],
        "nvmlDeviceGetMaxClockInfo": lambda number, clock: CARDS[number][2],
        "nvmlDeviceGetMemoryInfo": lambda number: SimpleNamespace(free=mib(number), total=2 * mib(number)),
        "nvmlDeviceGetCudaComputeCapability": lambda number: (8, number),
        "nvmlDeviceGetComputeRunningProcesses": lambda number: [SimpleNamespace(pid=os.getpid(), usedGpuMemory=7)],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda number: [SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)],
        "nvmlSystemGetDriverVersion": lambda: "580.1",
    }.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        (None, "fast"),
        ("0", "fast"),
        ("1, 0", "slow"),
        ("2", "spare"),
        ("GPU-aa", "slow"),
        ("GPU-bb33,GPU-aa11", "spare"),
        ("MIG-cc", "spare"),
        ("", None),
        ("-1", None),
        ("3", None),
        ("GPU-dd", None),
        ("MIG-dd", None),
    ],
)
def test_the_first_card_is_the_one_that_cuda_shows_first(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, name: str | None
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = machine.card()
    assert (found.name if found else None) == name


def test_where_cuda_counts_by_the_bus_the_first_card_is_the_first_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    found = machine.first_card()
    assert found is not None
    assert (found.memory.name, found.memory.free, found.capability, found.driver) == ("slow", 2**20, (8, 0), "580.1")
    assert [num_bytes for _, num_bytes in found.memory.held] == [7]


def test_without_a_driver_there_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError_DriverNotLoaded

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert machine.card() is None
