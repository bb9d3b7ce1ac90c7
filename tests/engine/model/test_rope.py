"""Angles of every kind of RoPE are transformers', over random numbers of each."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.model.config_reader import ConfigReader
from engine.model.rope import cos_sin_table, inverse_frequencies
from engine.model.rope_config import read_rope
from engine.model.spec import RopeSpec

_HEAD_DIM = 24


def _numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


_THETAS, _FACTORS, _LENGTHS = _numbers(100, 1e6), _numbers(1, 64), st.integers(64, 8192)
_LISTS = st.lists(_numbers(1, 50), min_size=_HEAD_DIM // 2, max_size=_HEAD_DIM // 2)
_OPTIONAL = {"attention_factor": _numbers(0.5, 2)}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what a kind needs, what it may have
    "linear": ({"factor": _FACTORS}, {}),
    "dynamic": ({"factor": _FACTORS}, {}),
    "llama3": (
        {"factor": _FACTORS, "low_freq_factor": _numbers(0.5, 2), "high_freq_factor": _numbers(2.5, 8)}
        | {"original_max_position_embeddings": _LENGTHS},
        {},
    ),
    "yarn": (
        {"factor": _FACTORS, "original_max_position_embeddings": _LENGTHS},
        {"beta_fast": _numbers(8, 64), "beta_slow": _numbers(0.5, 4), "truncate": st.booleans(), **_OPTIONAL}
        | {"mscale": _numbers(0.5, 2), "mscale_all_dim": _numbers(0.5, 2)},
    ),
    "longrope": (
        {"short_factor": _LISTS, "long_factor": _LISTS, "original_max_position_embeddings": _LENGTHS},
        {"factor": _FACTORS, **_OPTIONAL},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_frequencies_and_temperature_are_those_of_transformers(kind: str, data: st.DataObject) -> None:
    needed, optional = KINDS[kind]
    numbers = data.draw(st.fixed_dictionaries({"rope_theta": _THETAS, **needed}, optional=optional))
    max_len = data.draw(st.integers(1, 20_000))
    trained = data.draw(_LENGTHS)
    parameters = {"rope_type": kind, **numbers}
    shape = {"hidden_size": 4 * _HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": trained}
    config = LlamaConfig(**shape, rope_parameters=dict(parameters))
    theirs, temperature = ROPE_INIT_FUNCTIONS[kind](config, seq_len=max_len)
    rope = read_rope(ConfigReader({**shape, "rope_parameters": parameters}), _HEAD_DIM)
    torch.testing.assert_close(inverse_frequencies(rope, max_len), theirs, rtol=2e-6, atol=0.0)
    assert rope.attention_factor == pytest.approx(temperature)


def test_the_table_is_cosines_and_sines_of_each_position_times_the_temperature() -> None:
    table = cos_sin_table(RopeSpec(theta=100.0, rotary_dim=4, attention_factor=2.0), 3)
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]])
    torch.testing.assert_close(table, 2 * torch.stack((angles.cos(), angles.sin()), dim=1))
