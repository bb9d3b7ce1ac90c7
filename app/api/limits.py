"""How much each key may ask: token buckets for requests and for tokens a minute, and the headers that tell of them.

A bucket holds a minute's worth and refills all the time. What a request will cost is known when it is over, so tokens
are taken then and a bucket may go below zero: the next request waits until it is above again.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from app.chat.service import TurnObserver, TurnRecord
from app.errors import AppError

_log = logging.getLogger("fireside.api")

# Whose request the code below this point serves: the guard sets it, and the tasks of a reply inherit it.
caller: ContextVar[str | None] = ContextVar("caller", default=None)


@dataclass(slots=True)
class Bucket:
    """`level` of at most `per_minute`, at time `at_s`."""

    per_minute: int
    level: float
    at_s: float

    def refill(self, now_s: float) -> None:
        self.level = min(self.per_minute, self.level + (now_s - self.at_s) * self.per_minute / 60)
        self.at_s = now_s

    def seconds_until(self, level: float) -> float:
        return max(0.0, (level - self.level) * 60 / self.per_minute)


class Limits:
    """The budgets of all keys, by name. None is no limit."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_minute = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._clock = clock
        self._buckets: dict[str, dict[str, Bucket]] = {}

    def admit(self, name: str) -> None:
        """Count a request. Raises AppError (429), with the time to wait, where a budget is used up."""
        buckets = self._of(name)
        waits = {kind: bucket.seconds_until(1) for kind, bucket in buckets.items()}
        longest = max(waits, key=lambda kind: waits[kind], default=None)
        if longest is not None and waits[longest] > 0:
            raise _used_up(name, longest, buckets[longest].per_minute, waits[longest])
        if "requests" in buckets:
            buckets["requests"].level -= 1

    def spend(self, name: str, num_tokens: int) -> None:
        bucket = self._of(name).get("tokens")
        if bucket is not None:
            bucket.level -= num_tokens

    def headers(self, name: str) -> Mapping[str, str]:
        """OpenAI's x-ratelimit-*: what a minute has, what is left of it, when it is whole again."""
        headers = {}
        for kind, bucket in self._of(name).items():
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level)))
            headers[f"x-ratelimit-reset-{kind}"] = duration(bucket.seconds_until(bucket.per_minute))
        return headers

    def _of(self, name: str) -> Mapping[str, Bucket]:
        now_s = self._clock()
        buckets = self._buckets.get(name)
        if buckets is None:
            buckets = {kind: Bucket(limit, limit, now_s) for kind, limit in self._per_minute.items() if limit}
            self._buckets[name] = buckets
        for bucket in buckets.values():
            bucket.refill(now_s)
        return buckets


class Charging:
    """A TurnObserver that charges each turn to its caller, beside another observer. The page's turns have no caller."""

    def __init__(self, limits: Limits, beside: TurnObserver) -> None:
        self._limits = limits
        self._beside = beside

    def first_token(self, ttft_s: float) -> None:
        self._beside.first_token(ttft_s)

    def token(self, gap_s: float) -> None:
        self._beside.token(gap_s)

    def ended(self, turn: TurnRecord) -> None:
        name = caller.get()
        if name is not None and turn.ttft_s is not None:
            self._limits.spend(name, turn.prompt_tokens + turn.completion_tokens)
        if name:
            _log.info("request %s: of key %s", turn.request_id, name)
        self._beside.ended(turn)


def duration(seconds: float) -> str:
    """As OpenAI writes one: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"


def _used_up(name: str, kind: str, per_minute: int, wait_s: float) -> AppError:
    who = f" for key `{name}`" if name else ""
    return AppError(
        429,
        "rate_limit_exceeded",
        f"Rate limit reached{who}: {per_minute:,} {kind} a minute.",
        hint=f"Please try again in {duration(wait_s)}.",
        retry_after_s=wait_s,
    )
