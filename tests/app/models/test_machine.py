"""Which card is the one that an engine would compute on: the library's order is not CUDA's."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pynvml
import pytest

from app.models import machine
from tests.app.models import fake_nvml


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch)


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
    assert (found.memory.name, found.memory.free, found.capability, found.driver) == ("slow", 10**9, (8, 0), "580.1")
    assert [num_bytes for _, num_bytes in found.memory.held] == [250_000_000]


def test_without_a_driver_there_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError_DriverNotLoaded

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert machine.card() is None


def test_a_card_tells_how_much_it_works() -> None:
    now = machine.machine_now()
    assert (now.memory.name, now.memory.total, now.memory.free) == ("fast", 4 * 10**9, 2 * 10**9)
    assert (now.busy, now.temperature_c, now.power_w) == (0.37, 64.0, 215.4)


def test_what_a_card_does_not_tell_is_left_out_and_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> None:
        raise pynvml.NVMLError_NotSupported

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", refuse)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", refuse)
    now = machine.machine_now()
    assert (now.busy, now.temperature_c, now.power_w) == (None, 64.0, None)


def test_a_busy_processor_is_told_by_whatever_thread_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "card", lambda: None)
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            sum(range(1000))

    worker = threading.Thread(target=work)
    worker.start()
    try:
        with ThreadPoolExecutor(3) as threads:
            found = [each.result().busy for each in [threads.submit(machine.machine_now) for _ in range(3)]]
    finally:
        is_over.set()
        worker.join()
    assert all(busy for busy in found), found
