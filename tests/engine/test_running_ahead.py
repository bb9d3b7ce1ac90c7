"""A real runner one step ahead: the device feeds itself the ids that the host does not know yet. On a card too."""

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import SamplingParams
from tests.checkpoints import tiny_checkpoint
from tests.engine.limits import Limits
from tests.engine.running import load

_DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def _answers(limits: Limits) -> dict[str, list[int]]:
    """Of twelve requests for eight seats, each second one drawn, some ended by a stop id that is found late."""
    engine = Engine(limits, EngineConfig(model=""))
    for i in range(12):
        prompt = tuple(3 + (7 * i + j * j) % 250 for j in range(5 + 11 * i))
        params = SamplingParams(
            temperature=float(i % 2), seed=i, max_tokens=24, stop_token_ids=tuple(range(i % 3 * 40))
        )
        engine.add(str(i), prompt, params)
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            assert event.token_id is not None
            answers.setdefault(event.request_id, []).append(event.token_id)
        engine.check()
    return answers


@pytest.mark.parametrize("device", _DEVICES)
def test_answers_are_the_same_with_and_without_running_ahead(device: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model", "llama", "gptq")
    runner = load(tmp_path / "model", device)
    in_step, ahead = (
        _answers(Limits(runner, steps_ahead=steps, max_num_seqs=8, max_num_batched_tokens=64)) for steps in (0, 1)
    )
    assert ahead == in_step
    assert len({len(answer) for answer in in_step.values()}) > 1


@pytest.mark.parametrize("device", _DEVICES)
def test_a_card_is_run_ahead_and_a_cpu_is_not(device: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model", "llama")
    assert load(tmp_path / "model", device).steps_ahead == (1 if device == "cuda" else 0)
