"""The app's side of one loaded model: starts the child, sends requests, hands each its own events.

Everything here runs in one event loop, except one thread that reads the child's pipe. Every request that the child
has taken ends with exactly one last event or failure, or with the child; nothing waits for ever.
"""

import asyncio
import contextlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import TypeVar

from engine import process
from engine.config import EngineConfig
from engine.errors import BadRequest, EngineClosed, EngineDied, EngineError, EngineLost, error_from_code
from engine.messages import (
    Abort,
    Failed,
    FromChild,
    Loading,
    Ready,
    Resized,
    ResizeKV,
    Shutdown,
    Stats,
    Submit,
    ToChild,
    Tokens,
)
from engine.process import MODEL_RUNNER, Start
from engine.types import ORDINARY, EngineStats, MemoryReport, ModelInfo, SamplingParams, Standing, TokenEvent

_T = TypeVar("_T")
OnLoading = Callable[[str, float], None]

_LAST_WORDS_S = 0.3  # what a child that hangs is given to write into its log where it hangs
_GRACE_S = 1.0  # what a child is given to end by itself, and again after it was told to terminate
_EXIT_S = 5.0  # from closing its pipe to the end of the process (a driver may have to be torn down)


class EngineClient:
    """A model that answers. Made by `await EngineClient.start(config)`; ended by `await close()`."""

    def __init__(self, start: Start, on_loading: OnLoading | None) -> None:
        self._on_loading = on_loading
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._death: asyncio.Future[EngineError] = self._loop.create_future()  # why nothing can be asked any more
        self._queues: dict[str, asyncio.Queue[TokenEvent | EngineError]] = {}
        self._resizes: dict[str, asyncio.Future[MemoryReport]] = {}
        self._num_resizes = 0
        self._memory: MemoryReport | None = None  # once it is another than at start
        self._leaving: set[str] = set()  # aborted here, and the child has not said yet that they ended
        self._stats = EngineStats()
        self._heard_s = time.monotonic()
        self._process, self._inbox, outbox = _spawn(start)
        threading.Thread(target=self._read, args=(outbox,), name="engine-outbox", daemon=True).start()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        on_loading: OnLoading | None = None,
        load_runner: str = MODEL_RUNNER,
        log_path: str | None = None,
        silence_s: float = math.inf,
    ) -> "EngineClient":
        """Spawn the child and wait until the model is loaded; `on_loading(stage, fraction)` follows it.

        log_path   file to which all that the child writes is appended; None leaves it where ours goes
        silence_s  a child that says nothing of its load for so long hangs, and is ended as by `give_up`

        Raises what the load raised (UnsupportedModel, BadCheckpoint, OutOfMemory, ...), EngineDied if the child ended.
        Cancelling the call ends the child.
        """
        client = cls(Start(config, load_runner, log_path), on_loading)
        try:
            await client._until_ready(silence_s)
        except BaseException:
            await client.close()
            raise
        return client

    async def _until_ready(self, silence_s: float) -> None:
        while not self._ready.done():
            left_s = self._heard_s + silence_s - time.monotonic()
            if left_s <= 0:
                self.give_up(f"The engine hung while it loaded: it said nothing for {silence_s:.0f} s. It was ended.")
            await asyncio.wait({self._ready}, timeout=max(left_s, 0.0))
        self._ready.result()

    @property
    def info(self) -> ModelInfo:
        return self._ready.result().info

    @property
    def memory(self) -> MemoryReport:
        at_start = self._ready.result().memory
        return self._memory or at_start

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """False once the child has ended or was told to."""
        return not self._death.done()

    @property
    def stats(self) -> EngineStats:
        """The child's last snapshot. `last_step_age_s` is seen from here, so that it grows when the child hangs."""
        is_idle = not self._queues and not self._leaving
        return replace(self._stats, last_step_age_s=0.0 if is_idle else time.monotonic() - self._heard_s)

    async def submit(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        standing: Standing = ORDINARY,
    ) -> AsyncGenerator[TokenEvent, None]:
        """Events of one request, the last with a finish_reason. Closing the iterator, or leaving it, aborts it.

        Raises what the engine refuses (ContextTooLong, BadRequest, TooManyRequests), Superseded if a newer one of the
        same client ended it, EngineDied if the child ends.
        """
        self._check_open(request_id)
        queue: asyncio.Queue[TokenEvent | EngineError] = asyncio.Queue()
        if not self._queues and not self._leaving:
            self._heard_s = time.monotonic()
        self._queues[request_id] = queue
        try:
            self._send(Submit(request_id, prompt_token_ids, params, standing))
            while True:
                event = await queue.get()
                if isinstance(event, EngineError):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            if self._queues.get(request_id) is queue:  # the child has not ended it
                del self._queues[request_id]
                self._leaving.add(request_id)
                self._send(Abort((request_id,)))

    async def resize_kv(self, give_back_bytes: int) -> MemoryReport:
        """Have the KV cache smaller by so much than it was made; 0 takes all of it again. Requests go on.

        Raises BadRequest (too much for what runs, or a CPU's cache), OutOfMemory (others have the memory now),
        EngineDied.
        """
        self._num_resizes += 1
        request_id = f"resize-{self._num_resizes}"
        self._check_open(request_id)
        resized: asyncio.Future[MemoryReport] = self._loop.create_future()
        self._resizes[request_id] = resized
        self._send(ResizeKV(request_id, give_back_bytes))
        try:
            return await resized
        finally:
            del self._resizes[request_id]

    async def until_ended(self) -> EngineError:
        """Wait until nothing can be asked any more, and say why: EngineClosed where it was closed."""
        return await asyncio.shield(self._death)

    def give_up(self, why: str) -> None:
        """End a child that hangs: everybody gets EngineDied with these words, and the child is killed.

        Just before, it writes into its log where each of its threads stands (not on Windows).
        """
        self._die(EngineDied(why))
        if sys.platform != "win32" and self._process.pid is not None and not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGUSR1)
        self._loop.call_later(_LAST_WORDS_S, self._process.kill)

    async def close(self) -> None:
        """End the child, within about two seconds whatever it does. Who still waits gets EngineClosed."""
        if self.is_alive:
            is_loading = not self._ready.done()
            self._die(EngineClosed("The model was unloaded or Fireside is ending."))
            if is_loading:
                self._process.terminate()  # it reads no Shutdown before it is ready
            self._send(Shutdown())
        for force in (self._process.terminate, self._process.kill):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _GRACE_S)
                return
            force()
        await self._ended.wait()

    def _check_open(self, request_id: str) -> None:
        if self._death.done():
            death = self._death.result()
            raise type(death)(death.message)
        if request_id in self._queues or request_id in self._leaving:
            raise BadRequest(f"request id {request_id!r} is in use by a request that has not ended.")

    def _send(self, message: ToChild) -> None:
        """A child that is gone reads nothing; the reader thread finds that out and tells everybody."""
        with contextlib.suppress(OSError):
            self._inbox.send(message)

    # -- what comes from the child ----------------------------------------------------------------------------------

    def _read(self, outbox: Connection) -> None:
        """In a thread of its own: pass each message into the loop; at the end of the pipe, see how the child ended."""
        with contextlib.suppress(EOFError, OSError):
            while self._call(self._on_message, outbox.recv()):
                pass
        self._process.join(_EXIT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._call(self._on_end, self._process.exitcode)

    def _call(self, function: Callable[[_T], None], argument: _T) -> bool:
        """Run it in the loop; False if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            return False
        return True

    def _on_message(self, message: FromChild) -> None:
        match message:
            case Tokens(events):
                self._heard_s = time.monotonic()
                for event in events:
                    self._hand_over(event.request_id, event.error or event, is_last=event.finish_reason is not None)
            case Stats(stats):
                self._heard_s = time.monotonic()
                self._stats = stats
            case Failed(None, code, text):
                self._die(error_from_code(code, text))
            case Failed(str() as request_id, code, text) if request_id in self._resizes:
                self._end_resize(request_id, error_from_code(code, text))
            case Resized(request_id, memory):
                self._memory = memory
                self._end_resize(request_id, memory)
            case Failed(str() as request_id, code, text, param):
                self._hand_over(request_id, error_from_code(code, text, param), is_last=True)
            case Loading(stage, fraction):
                self._heard_s = time.monotonic()
                if self._on_loading is not None:
                    self._on_loading(stage, fraction)
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(message)

    def _hand_over(self, request_id: str, event: TokenEvent | EngineError, *, is_last: bool) -> None:
        queue = self._queues.get(request_id)
        if queue is not None:
            queue.put_nowait(event)
        if is_last:
            self._queues.pop(request_id, None)
            self._leaving.discard(request_id)

    def _end_resize(self, request_id: str, outcome: MemoryReport | EngineError) -> None:
        resized = self._resizes.get(request_id)
        if resized is None or resized.done():  # nobody waits for it any more
            return
        if isinstance(outcome, EngineError):
            resized.set_exception(outcome)
        else:
            resized.set_result(outcome)

    def _on_end(self, exit_code: int | None) -> None:
        self._die(EngineLost(f"The engine process ended unexpectedly ({_how_it_ended(exit_code)})."))
        self._inbox.close()
        self._ended.set()

    def _die(self, reason: EngineError) -> None:
        """Nothing can be asked from now on. The first reason is the one that everybody gets."""
        if self._death.done():
            return
        self._death.set_result(reason)
        if not self._ready.done():
            self._ready.set_exception(reason)
            self._ready.exception()  # seen: a load that nobody waits for any more is not worth a warning
        for request_id in tuple(self._queues):
            self._hand_over(request_id, type(reason)(reason.message), is_last=True)
        for request_id in self._resizes:
            self._end_resize(request_id, type(reason)(reason.message))
        self._leaving.clear()


def _spawn(start: Start) -> tuple[multiprocessing.process.BaseProcess, Connection, Connection]:
    """The child, the pipe to it and the pipe from it. Daemonic: it ends with this process, whatever happens."""
    context = multiprocessing.get_context("spawn")
    child_inbox, inbox = context.Pipe(duplex=False)
    outbox, child_outbox = context.Pipe(duplex=False)
    child = context.Process(target=process.main, args=(start, child_inbox, child_outbox), name="engine", daemon=True)
    with _sigint_blocked():
        child.start()
    child_inbox.close()  # the child's ends are open in the child alone, so that its death closes them
    child_outbox.close()
    return child, inbox, outbox


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """What is started here inherits a blocked SIGINT: Ctrl-C, which reaches the whole group, must not end the child's
    Python before `process.main` ignores it. One that comes meanwhile reaches this process as soon as we leave.
    """
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # the first start would run it, and that unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
