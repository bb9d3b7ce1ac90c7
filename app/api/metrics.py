"""The numbers behind GET /metrics: Prometheus text, prefix fireside_, names otherwise as vLLM's, for its dashboards.

A registry of its own for each app, no global one. Turns are told by ChatService (it sees the page's too); the engine's
own counts are read when somebody asks.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from app.chat.service import TurnRecord
from app.errors import AppError
from engine.types import STEP_TOKEN_BOUNDS, EngineStats

_ms = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 50, 100, 200, 500, 1000, 5000)
_INTER_TOKEN = tuple(value / 1000 for value in _ms)
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Metrics:
    """stats   the engine's latest snapshot, None where no model is loaded; must answer at once"""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self.stats = stats
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self._ended = Counter(
            "fireside_request_success",
            "Requests that ended, by reason (stop, length, abort, error)",
            ["finished_reason"],
            registry=self._registry,
        )
        self._refused = Counter(
            "fireside_admission_rejections",
            "Requests refused before their first token, by reason",
            ["reason"],
            registry=self._registry,
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "Request to first token", _SECONDS)
        self._inter_token = self._histogram("inter_token_latency_seconds", "Token to next token", _INTER_TOKEN)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Request to last token", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Waiting in the engine", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "Computing the prompt", _SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "Computing the answer", _SECONDS)
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._generation_tokens = self._histogram("request_generation_tokens", "Answer tokens of a request", _TOKENS)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def latencies(self) -> dict[str, list[tuple[float, int]]]:
        """For people: how many first tokens came, and how many further ones, within each bound (seconds, the last one
        infinite) and above the one before."""
        return {"ttft": _counts(self._ttft), "inter_token": _counts(self._inter_token)}

    def first_token(self, ttft_s: float) -> None:
        """It came, while its answer goes on."""
        self._ttft.observe(ttft_s)

    def token(self, gap_s: float) -> None:
        """One more token came, `gap_s` after the one before it in the same answer."""
        self._inter_token.observe(gap_s)

    def refused(self, error: AppError) -> None:
        """A request was not let in, or not taken."""
        self._refused.labels(error.code or "none").inc()

    def ended(self, turn: TurnRecord) -> None:
        """A turn is over, well or not."""
        if turn.error is not None and turn.ttft_s is None:
            self.refused(turn.error)
            return
        self._ended.labels(turn.reason).inc()
        self._e2e.observe(turn.total_s)
        self._prompt_tokens.observe(turn.prompt_tokens)
        self._generation_tokens.observe(turn.completion_tokens)
        if turn.times is not None:
            self._queue.observe(turn.times.queue_s)
            self._prefill.observe(turn.times.prefill_s)
            self._decode.observe(turn.times.decode_s)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"fireside_{name}", text, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    """Reads EngineStats at each scrape. Its counters start again with a new engine, which Prometheus understands."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats() or EngineStats()
        yield _gauge("num_requests_running", "Requests in the running batch", stats.num_requests_running)
        yield _gauge("num_requests_waiting", "Requests waiting for a place", stats.num_requests_waiting)
        yield _gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", stats.kv_cache_usage)
        yield _gauge("step_host_seconds", "Scheduler time of the last step", stats.step_host_us / 1e6)
        yield _gauge("last_step_age_seconds", "Since the last step ended, while there is work", stats.last_step_age_s)
        yield _counter("prefix_cache_queries", "Prompt tokens looked up", stats.prefix_cache_queries)
        yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_cache_hits)
        yield _counter("num_preemptions", "Sequences sent back to waiting", stats.num_preemptions)
        yield _counter("prompt_tokens", "Prompt tokens computed", stats.prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated", stats.generation_tokens)
        yield _gauge("model_load_seconds", "Time that the model in hand took to load", stats.load_s)
        if stats.device_memory is not None:
            yield _gauge(
                "gpu_memory_used_bytes", "Memory of the card in use, by all programs", stats.device_memory.used_bytes
            )
            yield _gauge("gpu_memory_free_bytes", "Memory of the card that is free", stats.device_memory.free_bytes)
        yield _steps_by_tokens(stats)
        yield _counter("engine_steps", "Steps of the engine", stats.num_steps)


def _counts(histogram: Histogram) -> list[tuple[float, int]]:
    """(upper bound, how many between the one before and it)."""
    (metric,) = histogram.collect()
    within = [(float(s.labels["le"]), int(s.value)) for s in metric.samples if s.name.endswith("_bucket")]
    below = [0, *(count for _, count in within)]
    return [(bound, count - before) for (bound, count), before in zip(within, below, strict=False)]


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"fireside_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"fireside_{name}", text, value=value)


def _steps_by_tokens(stats: EngineStats) -> Metric:
    bounds = [*(str(float(bound)) for bound in STEP_TOKEN_BOUNDS), "+Inf"]
    counts = accumulate(stats.steps_by_tokens or (0,) * len(bounds))
    return HistogramMetricFamily(
        "fireside_iteration_tokens_total",
        "Tokens computed in a step: how full the batch is",
        buckets=list(zip(bounds, counts, strict=True)),
        sum_value=stats.step_tokens,
    )
