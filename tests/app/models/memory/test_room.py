"""What a loaded model holds, and what of it the system has given."""

import os
from dataclasses import replace

import psutil

from app.models.memory.room import Holding
from tests.fakes import memory_report

_REPORT = replace(memory_report(), weights_bytes=10**9, kv_bytes=10**12)


def test_a_cpus_cache_is_the_systems_until_it_is_written() -> None:
    held = Holding("cpu", os.getpid(), _REPORT, 10**12)
    resident = psutil.Process().memory_info().rss
    assert abs(held.given - resident) < 0.2 * resident
    assert held.given + held.promised == held.num_bytes


def test_a_cards_memory_is_all_given_at_once() -> None:
    held = Holding("cuda", os.getpid(), _REPORT, 10**12)
    assert (held.given, held.promised) == (held.num_bytes, 0)
