"""How many prompt tokens a step may compute beside sequences that wait for their next token.

Measured on the steps as they come: what one takes without prompt tokens, and what each prompt token adds to that.
"""

# A step may always take twice as long as one without prompt tokens: where that alone exceeds the target, as with large
# models on a CPU, a prompt would otherwise never be through.
_STRETCH = 2.0

# The allowance never falls below this part of the budget, so that a prompt has its first token in a bounded number of
# steps. Chunks smaller than that say nothing about the cost of a token.
_LEAST_PART = 16

_TRUST = 0.5  # in the newest measurement, against all before
_JUMP = 3.0  # a measurement counts for at most this many times the estimate: one stall is no news about the model


class PrefillPace:
    """
    target_s  time between two tokens of a running sequence that prompts should not exceed
    budget    prompt tokens of a step at most
    """

    def __init__(self, target_s: float, budget: int) -> None:
        self._target_s = target_s
        self._budget = budget
        self._least = max(1, budget // _LEAST_PART)
        self._decode_s = 0.0
        self._token_s = 0.0

    @property
    def allowance(self) -> int:
        """Prompt tokens for the next step, if sequences decode in it. The whole budget until there are measurements."""
        limit_s = max(self._target_s, _STRETCH * self._decode_s)
        if self._token_s * self._budget <= limit_s - self._decode_s:
            return self._budget
        return max(self._least, int((limit_s - self._decode_s) / self._token_s))

    def observe(self, step_s: float, num_prompt_tokens: int) -> None:
        """A step took so long. Between one that decodes for a few sequences and for many no difference is made."""
        if num_prompt_tokens == 0:
            self._decode_s = _blend(self._decode_s, step_s)
        elif num_prompt_tokens >= self._least:
            self._token_s = _blend(self._token_s, max(step_s - self._decode_s, 0.0) / num_prompt_tokens)


def _blend(estimate: float, measured: float) -> float:
    if estimate == 0.0:
        return measured
    return estimate + _TRUST * (min(measured, _JUMP * estimate) - estimate)
