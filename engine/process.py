"""The child process of one loaded model: load, say Ready, then loop {inbox, engine.step(), outbox}.

Imports nothing heavy at the top: the parent imports this file to spawn it. The runner is named by a string and
imported inside the child, so that tests can bring one without torch.
"""

import faulthandler
import importlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from engine import environment
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadRequest, EngineDied, EngineError, Superseded
from engine.head_start import head_start
from engine.messages import Abort, Failed, Loading, Ready, Resized, ResizeKV, Shutdown, Stats, Submit, ToChild, Tokens

_log = logging.getLogger(__name__)

MODEL_RUNNER = "engine.loading:load_runner"

_STATS_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Start:
    """What a child is told. `load_runner` is "module:function", called with (config, on_progress).

    log_path  file to which all that it writes is appended; None leaves it where the parent's goes
    """

    config: EngineConfig
    load_runner: str
    log_path: str | None = None


class _Wake:
    """Something has changed in the engine while the loop may be asleep."""


def main(start: Start, inbox: Connection, outbox: Connection) -> None:
    """Run until Shutdown or until the parent is gone. Exits with 1 after a fault."""
    environment.prepare()
    if start.log_path is not None:
        _write_into(start.log_path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when we end
    if sys.platform != "win32":  # the parent blocked it until here; what we start ourselves should not inherit that
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    began_s = time.monotonic()
    requests: queue.SimpleQueue[ToChild | _Wake] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(inbox, requests), name="inbox", daemon=True).start()
    try:
        engine = _load(start, requests, outbox)
        _serve(engine, time.monotonic() - began_s, requests, outbox)
    except (BrokenPipeError, ConnectionResetError):
        raise SystemExit(1) from None  # the parent has closed its end: nobody is left to tell
    except EngineError as error:
        _log.info("The load was refused: %s", error.message)
        outbox.send(Failed(None, error.code, error.message))
        raise SystemExit(1) from None
    except Exception as fault:
        _log.exception("The engine stopped after a fault of its own.")
        message = f"The engine stopped after a fault of its own: {type(fault).__name__}: {fault}"
        outbox.send(Failed(None, EngineDied.code, message))
        raise SystemExit(1) from None


def _write_into(log_path: str) -> None:
    """Have all that this process writes appended there, by C libraries too, and what it did last when it crashes."""
    file = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("engine").setLevel(logging.INFO)
    faulthandler.enable()
    if sys.platform != "win32":
        faulthandler.register(signal.SIGUSR1)  # how the parent asks where a process that hangs stands


def _receive(inbox: Connection, requests: queue.SimpleQueue[ToChild | _Wake]) -> None:
    """Empty the pipe at once, so that the parent never waits to write. The parent's death ends us, even mid-step."""
    while True:
        try:
            requests.put(inbox.recv())
        except (EOFError, OSError):
            os._exit(1)


def _load(start: Start, requests: queue.SimpleQueue[ToChild | _Wake], outbox: Connection) -> Engine:
    _log.info("Process %d loads %s.", os.getpid(), start.config)
    outbox.send(Loading("starting", 0.0))
    module, _, function = start.load_runner.partition(":")
    with head_start(start.config.device):
        load_runner = getattr(importlib.import_module(module), function)
    runner = load_runner(start.config, lambda stage, fraction: outbox.send(Loading(stage, fraction)))
    engine = Engine(runner, start.config, on_compiled=lambda: requests.put(_Wake()))
    environment.settle_collector()
    _log.info("Ready: %s, %s", runner.info, runner.memory)
    outbox.send(Ready(runner.info, runner.memory))
    return engine


def _serve(engine: Engine, load_s: float, requests: queue.SimpleQueue[ToChild | _Wake], outbox: Connection) -> None:
    stats_sent_s = 0.0
    outbox.send(Stats(replace(engine.stats(), load_s=load_s)))
    while _take(engine, requests, outbox):
        if engine.can_compute:
            _step(engine, outbox)
        now_s = time.monotonic()
        if not engine.can_compute or now_s - stats_sent_s >= _STATS_EVERY_S:
            outbox.send(Stats(replace(engine.stats(), load_s=load_s)))
            stats_sent_s = now_s


def _take(engine: Engine, requests: queue.SimpleQueue[ToChild | _Wake], outbox: Connection) -> bool:
    """Do all that was asked since the last step; with nothing to compute, sleep until there is. False at Shutdown."""
    message = requests.get() if not engine.can_compute else _next(requests)
    while message is not None:
        if isinstance(message, Shutdown):
            return False
        if not isinstance(message, _Wake):
            _answer(message, engine, outbox)
        message = _next(requests)
    return True


def _next(requests: queue.SimpleQueue[ToChild | _Wake]) -> ToChild | _Wake | None:
    try:
        return requests.get_nowait()
    except queue.Empty:
        return None


def _answer(message: Submit | Abort | ResizeKV, engine: Engine, outbox: Connection) -> None:
    if isinstance(message, ResizeKV):
        _resize(message, engine, outbox)
        return
    if isinstance(message, Abort):
        ended = tuple(event for event in map(engine.abort, message.request_ids) if event is not None)
        if ended:
            outbox.send(Tokens(ended))
        return
    try:
        superseded = engine.add(message.request_id, message.prompt_token_ids, message.params, message.standing)
    except EngineError as refusal:
        outbox.send(Failed(message.request_id, refusal.code, refusal.message, refusal.param))
        return
    except (TypeError, ValueError, AttributeError) as fault:  # values of other types: nothing was taken in
        _log.warning("Request %s has parameters that cannot be read.", message.request_id, exc_info=fault)
        text = f"The request's parameters cannot be read: {type(fault).__name__}: {fault}"
        outbox.send(Failed(message.request_id, BadRequest.code, text))
        return
    for request_id in superseded:
        outbox.send(Failed(request_id, Superseded.code, "A newer request of the same client took this one's place."))


def _resize(message: ResizeKV, engine: Engine, outbox: Connection) -> None:
    try:
        events = engine.resize_kv(message.give_back_bytes)
    except EngineError as refusal:
        outbox.send(Failed(message.request_id, refusal.code, refusal.message))
        return
    if events:
        outbox.send(Tokens(tuple(events)))
    outbox.send(Resized(message.request_id, engine.memory))


def _step(engine: Engine, outbox: Connection) -> None:
    """One step, one message. A step that the runner refuses ends the requests in flight and leaves the engine whole."""
    try:
        events = engine.step()
    except EngineError as refusal:
        for request_id in engine.request_ids:
            engine.abort(request_id)
            outbox.send(Failed(request_id, refusal.code, refusal.message))
        return
    if events:
        outbox.send(Tokens(tuple(events)))
