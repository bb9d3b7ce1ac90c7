"""lm-eval's `local-completions`, in an environment of its own (scripts/lm_eval_client.py)."""

import pytest

from tests.clients.foreign import frame, venv_command
from tests.clients.table import Client

CLIENT = Client("lm-eval", "lm-eval[api]", "requirements/lm_eval.txt")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the packages are installed first

results, test_a_check, _ = frame(
    lambda: venv_command("lm_eval"),
    *("tokens", "logprobs", "completions", "stop"),
)
