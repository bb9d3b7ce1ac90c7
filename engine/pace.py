"""How many prompt tokens a step may compute beside sequences that wait for their next token.

Learned from the steps as they come: the time of one is fitted as a fixed part, one for each sequence that decodes, and
one for each prompt token.
"""

from collections.abc import Sequence

# A step may always take twice as long as one without prompt tokens in which all decode who run or wait. Where that
# alone exceeds the target, as with large models on a CPU, a prompt would otherwise never be through, and of many that
# come at once the first would be answered before the last is read, in batches that are never full.
_STRETCH = 2.0

# The allowance never falls below this part of the budget, so that a prompt has its first token in a bounded number of
# steps. Chunks smaller than that say nothing about the cost of a token.
_LEAST_PART = 16

_JUMP = 3.0  # a step counts for at most this many times what was expected: one stall is no news about the model

Vector = tuple[float, float, float]


class PrefillPace:
    """
    target_s  time between two tokens of a running sequence that prompts should not exceed
    budget    prompt tokens of a step at most
    """

    def __init__(self, target_s: float, budget: int) -> None:
        self._target_s = target_s
        self._budget = budget
        self._least = max(1, budget // _LEAST_PART)
        self._step_s = _Fit()

    def allowance(self, num_decoding: int, num_coming: int = 0) -> int:
        """Prompt tokens for the next step, in which `num_decoding` sequences decode while the prompts of `num_coming`
        are not computed yet. The whole budget until there are measurements.
        """
        decode_s = self._step_s.at(self._features(num_decoding, 0))
        limit_s = max(self._target_s, _STRETCH * self._step_s.at(self._features(num_decoding + num_coming, 0)))
        whole_s = self._step_s.at(self._features(num_decoding, self._budget))
        if whole_s <= limit_s:
            return self._budget
        return max(self._least, int(self._budget * (limit_s - decode_s) / (whole_s - decode_s)))

    def observe(self, step_s: float, num_decoding: int, num_prompt_tokens: int) -> None:
        """A step took so long."""
        if num_prompt_tokens == 0 or num_prompt_tokens >= self._least:
            self._step_s.observe(self._features(num_decoding, num_prompt_tokens), step_s)

    def _features(self, num_decoding: int, num_prompt_tokens: int) -> Vector:
        """Of like size, but for the sequences: while their number has not changed, the fixed part has all."""
        return 1.0, num_decoding / 64, num_prompt_tokens / self._budget


class _Fit:
    """Recursive least squares of y = weights . x; weights below 0 count as 0.

    Old observations are forgotten in the direction of new ones alone (Kulhavy and Karny 1984): what did not vary for
    long keeps its weight.
    """

    _KEPT = 0.85  # of what older observations say in a direction, at each in that direction
    _UNCERTAIN = 1e3

    def __init__(self) -> None:
        self._weights: Sequence[float] = (0.0, 0.0, 0.0)
        self._spread = [[self._UNCERTAIN if i == j else 0.0 for j in range(3)] for i in range(3)]

    def at(self, x: Vector) -> float:
        return sum(max(weight, 0.0) * feature for weight, feature in zip(self._weights, x, strict=True))

    def observe(self, x: Vector, y: float) -> None:
        expected = self.at(x)
        surprise = (min(y, _JUMP * expected) if expected else y) - _dot(self._weights, x)
        towards = [_dot(row, x) for row in self._spread]
        spread = _dot(towards, x)
        self._weights = [w + t / (1 + spread) * surprise for w, t in zip(self._weights, towards, strict=True)]
        shrink = (self._KEPT * spread - (1 - self._KEPT)) / (spread * self._KEPT * (1 + spread))
        for row, t in zip(self._spread, towards, strict=True):
            row[:] = [number - shrink * t * other for number, other in zip(row, towards, strict=True)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
