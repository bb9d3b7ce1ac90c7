"""lm-eval's `local-completions`, in an environment of its own (scripts/lm_eval_client.py)."""

import pytest

from tests.clients.foreign import Results, cells, play_script, venv_command
from tests.clients.stage import Stage
from tests.clients.table import Client

CLIENT = Client("lm-eval", "lm-eval[api]", "requirements/lm_eval.txt")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the packages are installed first


@pytest.fixture(scope="module")
def results(stage: Stage) -> Results:
    return play_script(venv_command("lm_eval"), stage)


@cells("tokens", "logprobs", "completions", "stop")
def test_a_check(feature: str, results: Results) -> None:
    assert results[feature] is None
