"""How fast the running app is, through its own HTTP: start, memory, one client beside eight, first token in company.

    python -m app.bench --model smollm2-135m-instruct

Starts the real server on a free port of the loopback and ends it again; imports nothing of the app. Machines are
noisy: what is compared takes turns, and the median of the rounds' ratios is what counts. The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import psutil

CLIENTS, CLIENT_TOKENS, LONG_PROMPT_TOKENS = 8, 96, 2000
_PATIENCE_S = 600.0
_ROOT = Path(__file__).parents[1]
_START = "import sys; from app.server import main; sys.exit(main(sys.argv[1:]))"
_TOKEN_IDS = range(1000, 30_000)  # ordinary words in every vocabulary that we know


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    subprocess.run([sys.executable, "-m", "app.models.fetch", options.model], cwd=_ROOT, check=True)
    result = measure(options.model, options.rounds, options.starts) | _front_end(options.model)
    for name, value in result.items():
        print(f"{name:<40} {f'{value:,.2f}' if isinstance(value, float) else value!s:>24}")
    print(json.dumps(result))
    return 0


def measure(model: str, rounds: int, starts: int) -> dict[str, Any]:
    """Every figure by its name; of what is measured in rounds or starts, the median."""
    result: dict[str, Any] = {"model": model, "cores": psutil.cpu_count(), "load_average": _load_average()}
    with _running(model):
        pass  # not counted: kernels are compiled and files are read for the first time
    figures = []
    for number in range(starts):
        with _running(model) as server:
            figures.append(asyncio.run(_start_figures(server)))
            if number == starts - 1:
                service = asyncio.run(_service_figures(server, rounds))
                service |= {f"{name}_after": size for name, size in _resident_mb(server).items()}
    result |= {name: statistics.median(start[name] for start in figures) for name in figures[0]}
    return result | service


def _front_end(model: str) -> dict[str, float]:
    """What it adds to each token, beside an engine that costs nothing (app.bench_front)."""
    command = [sys.executable, "-m", "app.bench_front", "--model", model]
    told = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(told.splitlines()[-1])
    return figures


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m app.bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as launch.py takes it")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each comparison (default 5)")
    parser.add_argument("--starts", type=int, default=3, help="starts that are measured, after a first (default 3)")
    options = parser.parse_args(arguments)
    for name in ("rounds", "starts"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1.")
    return options


def _load_average() -> list[float]:
    """Of the last minute, five, fifteen: how busy the machine was when the measurement began."""
    return [round(load, 2) for load in psutil.getloadavg()]


# -- the server ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Server:
    process: "subprocess.Popen[str]"
    url: str
    started: float  # time.perf_counter() when the process was made
    ready_s: float


@contextlib.contextmanager
def _running(model: str) -> Iterator[_Server]:
    """Fireside in a process of its own, from ready to ended."""
    flags = ["--model", model, "--host", "127.0.0.1", "--port", "0", "--no-browser"]
    started = time.perf_counter()
    command = [sys.executable, "-c", _START, *flags]
    process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    family = []
    try:
        url = _wait_for_address(process)
        family = psutil.Process(process.pid).children(recursive=True)
        yield _Server(process, url, started, time.perf_counter() - started)
    finally:
        process.terminate()
        _end(process, family)


def _end(process: "subprocess.Popen[str]", family: list[psutil.Process]) -> None:
    """The server ends within two seconds; whoever is left after ten is killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    _, left = psutil.wait_procs(family, timeout=1)
    for straggler in left:
        straggler.kill()
    process.kill()
    process.wait()


def _wait_for_address(process: "subprocess.Popen[str]") -> str:
    """Read what the server prints, here until it is ready and then in a thread, so that its pipe never fills."""
    assert process.stdout is not None
    patience = threading.Timer(_PATIENCE_S, process.kill)
    patience.start()
    printed = []
    try:
        for line in process.stdout:
            printed.append(line)
            if found := re.search(r"Fireside is ready: (http://\S+)", line):
                threading.Thread(target=process.stdout.read, daemon=True).start()
                return found.group(1)
    finally:
        patience.cancel()
    raise SystemExit("The server ended before it was ready:\n" + "".join(printed))


def _resident_mb(server: _Server) -> dict[str, float]:
    """Resident MB (1e6 bytes) of the server and of the engine, its largest child; pages that both map count twice."""
    parent = psutil.Process(server.process.pid)
    engine = max(child.memory_info().rss for child in parent.children())
    return {"server_rss_mb": parent.memory_info().rss / 1e6, "engine_rss_mb": engine / 1e6}


# -- one request ---------------------------------------------------------------------------------------------------


class _Answer(NamedTuple):
    """Seconds are counted from the moment when the request was sent."""

    first_s: float
    whole_s: float
    num_tokens: int
    gaps_s: list[float]  # between one piece of text and the next


async def _ask(client: httpx2.AsyncClient, path: str, **body: Any) -> _Answer:
    """Stream one greedy answer that no end id stops."""
    body |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True}
    sent = time.perf_counter()
    seen_s, num_tokens = [], 0
    async with asyncio.timeout(_PATIENCE_S), client.stream("POST", path, json=body) as reply:
        async for line in reply.aiter_lines():
            chunk = _chunk(line)
            if _text(chunk):
                seen_s.append(time.perf_counter() - sent)
            num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
    whole_s = time.perf_counter() - sent
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(seen_s)]
    return _Answer(seen_s[0] if seen_s else whole_s, whole_s, num_tokens, gaps_s)


def _chunk(line: str) -> dict[str, Any]:
    """One line of the reply; {} for the empty lines and comments between the frames."""
    data = line.removeprefix("data: ")
    if not data.startswith("{"):
        return {}
    chunk: dict[str, Any] = json.loads(data)
    if "error" in chunk:
        raise SystemExit(f"The server refused: {chunk['error']['message']}")
    return chunk


def _text(chunk: dict[str, Any]) -> str:
    """Of a chat or of a completion."""
    choices = chunk.get("choices")
    if not choices:
        return ""
    return choices[0]["delta"].get("content") or "" if "delta" in choices[0] else choices[0]["text"]


@dataclass
class _Client:
    """Asks things that were never asked before, so that the prefix cache gives no more than the template's tokens."""

    http: httpx2.AsyncClient
    source: random.Random

    async def short(self, max_tokens: int = 4) -> _Answer:
        question = f"What do you know about the number {self.source.randrange(10**6)}?"
        messages = [{"role": "user", "content": question}]
        return await _ask(self.http, "/v1/chat/completions", messages=messages, max_tokens=max_tokens)

    async def long(self) -> _Answer:
        """A prompt of LONG_PROMPT_TOKENS and one token of answer: little else than the prompt's computation."""
        prompt = [self.source.choice(_TOKEN_IDS) for _ in range(LONG_PROMPT_TOKENS)]
        return await _ask(self.http, "/v1/completions", prompt=prompt, max_tokens=1)


@contextlib.asynccontextmanager
async def _client(server: _Server) -> Any:
    async with httpx2.AsyncClient(base_url=server.url, timeout=_PATIENCE_S) as http:
        yield _Client(http, random.Random(0))


# -- figures -------------------------------------------------------------------------------------------------------


async def _start_figures(server: _Server) -> dict[str, float]:
    """Of a server that has answered nobody yet."""
    async with _client(server) as client:
        asked_s = time.perf_counter() - server.started
        answer = await client.short()
    return {
        "start_to_ready_s": server.ready_s,
        "start_to_first_token_s": asked_s + answer.first_s,
        **_resident_mb(server),
    }


async def _service_figures(server: _Server, rounds: int) -> dict[str, Any]:
    async with _client(server) as client:
        await client.short()
        return await _throughput(server, client, rounds) | await _first_tokens(client, rounds)


async def _throughput(server: _Server, client: _Client, rounds: int) -> dict[str, Any]:
    """Tokens a second of all clients together, prompts included: one client and CLIENTS at once, in turns.

    The front end's share: seconds of CPU a token in the server's own process, beside those of the engine's; and how
    evenly the tokens of CLIENTS come out of it.
    """
    cpu = _cpu_seconds(server)
    answers: list[_Answer] = []
    pairs = []
    for _ in range(rounds):
        one, alone = await _tokens_per_s(client, 1)
        many, together = await _tokens_per_s(client, CLIENTS)
        pairs.append((one, many))
        answers += [*alone, *together]
    front_s, engine_s = (after - before for before, after in zip(cpu, _cpu_seconds(server), strict=True))
    gaps_ms = sorted(1000 * gap for answer in together for gap in answer.gaps_s)
    p50, p99 = statistics.median(gaps_ms), gaps_ms[int(0.99 * (len(gaps_ms) - 1))]
    return {
        "front_end_cpu_ms_per_token": 1000 * front_s / sum(answer.num_tokens for answer in answers),
        "front_end_to_engine_cpu": front_s / engine_s,
        f"token_gap_p50_ms_{CLIENTS}_clients": p50,
        f"token_gap_p99_ms_{CLIENTS}_clients": p99,
        "token_gap_p99_to_p50": p99 / p50,
        "tokens_per_s_1_client": statistics.median(one for one, _ in pairs),
        f"tokens_per_s_{CLIENTS}_clients": statistics.median(many for _, many in pairs),
        f"ratio_{CLIENTS}_to_1": statistics.median(many / one for one, many in pairs),
        "ratios": [round(many / one, 2) for one, many in pairs],
    }


async def _tokens_per_s(client: _Client, count: int) -> tuple[float, list[_Answer]]:
    began = time.perf_counter()
    answers = await asyncio.gather(*(client.short(CLIENT_TOKENS) for _ in range(count)))
    return sum(answer.num_tokens for answer in answers) / (time.perf_counter() - began), answers


def _cpu_seconds(server: _Server) -> tuple[float, float]:
    """Of the server's process and of the engine's so far, user and system."""
    parent = psutil.Process(server.process.pid)
    engine = max(parent.children(), key=lambda child: child.memory_info().rss)
    front, inner = parent.cpu_times(), engine.cpu_times()
    return front.user + front.system, inner.user + inner.system


class _Turn(NamedTuple):
    """One round: seconds of a short prompt's first token alone and beside a long prompt, and the long one's, alone."""

    idle_s: float
    beside_s: float
    long_s: float
    short_was_first: bool


async def _first_tokens(client: _Client, rounds: int) -> dict[str, Any]:
    turns = [await _turn(client) for _ in range(rounds)]
    return {
        "ttft_idle_ms": 1000 * statistics.median(turn.idle_s for turn in turns),
        "ttft_beside_long_prompt_ms": 1000 * statistics.median(turn.beside_s for turn in turns),
        "long_prompt_alone_ms": 1000 * statistics.median(turn.long_s for turn in turns),
        "ttft_beside_to_idle": statistics.median(turn.beside_s / turn.idle_s for turn in turns),
        "ttft_beside_to_long_prompt": statistics.median(turn.beside_s / turn.long_s for turn in turns),
        "rounds_in_which_the_short_was_first": sum(turn.short_was_first for turn in turns),
    }


async def _turn(client: _Client) -> _Turn:
    idle = await client.short()
    alone = await client.long()
    began = time.perf_counter()
    company = asyncio.create_task(client.long())
    await asyncio.sleep(alone.first_s / 10)  # by now the long prompt is being computed
    waited_s = time.perf_counter() - began
    short = await client.short()
    long = await company
    return _Turn(idle.first_s, short.first_s, alone.first_s, waited_s + short.first_s < long.first_s)


if __name__ == "__main__":
    sys.exit(main())
