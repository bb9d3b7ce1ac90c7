"""What an engine may be asked for is checked when it is asked."""

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import BadRequest


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_model_len": "abc"}, "max_model_len is 'abc'; it must be of type int or None"),
        ({"max_model_len": 0}, "max_model_len is 0; it must be at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs is True; it must be of type int"),
        ({"max_num_seqs": None}, "max_num_seqs is None; it must be of type int"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization is '0.9'; it must be of type float"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5; it must be above 0 and at most 1"),
        ({"kv_gb": float("nan")}, "kv_gb is nan; it must be above 0"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching is 1; it must be of type bool"),
        ({"model": 5}, "model is 5; it must be of type str"),
        ({"dtype": "int4"}, "dtype is 'int4'; it must be one of auto, float32"),
    ],
)
def test_a_wrong_value_is_refused_by_name_with_what_it_may_be(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        EngineConfig(**{"model": "m", **wrong})


def test_a_whole_number_will_do_for_a_share() -> None:
    assert EngineConfig(model="m", gpu_memory_utilization=1, kv_gb=2).kv_gb == 2
