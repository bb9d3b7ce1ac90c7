"""Blocking work beside the event loop, in threads that never hold up the end of the process.

`asyncio.to_thread` uses a pool that the interpreter joins at exit: a download that hangs would keep Ctrl-C waiting.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work()` in a thread of its own and wait for it; its exception is raised here.

    Cancelling the wait does not end the thread: let the work look at a flag where that matters.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Callable[[], T]] = loop.create_future()

    def settle(outcome: Callable[[], T]) -> None:
        if not done.done():
            done.set_result(outcome)

    def run() -> None:
        outcome = _outcome_of(work)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, daemon=True).start()
    return (await done)()


def _outcome_of(work: Callable[[], T]) -> Callable[[], T]:
    """A function that returns what `work` returned, or raises what it raised."""
    try:
        result = work()
    except Exception as caught:
        error = caught

        def again() -> T:
            raise error

        return again
    return lambda: result
