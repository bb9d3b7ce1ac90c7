"""Grammars in the making, apart from the step loop: the sequences that wait for theirs, and the threads that work."""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from engine.errors import BadRequest, EngineError
from engine.plan import Grammar
from engine.sequence import Sequence
from engine.types import GrammarSpec

_WORKERS = 2  # one slow grammar does not hold up the next


class GrammarDesk:
    """
    compile  runs in a worker; raises BadRequest
    on_done  called there when a grammar is done, well or badly
    """

    def __init__(self, compile: Callable[[GrammarSpec], Grammar], on_done: Callable[[], None]) -> None:
        self._compile, self._on_done = compile, on_done
        self._workers = ThreadPoolExecutor(_WORKERS, "grammar")
        self._waiting: dict[str, tuple[Sequence, Future[Grammar]]] = {}

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._waiting)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return tuple(sequence for sequence, _ in self._waiting.values())

    @property
    def has_compiled(self) -> bool:
        return any(future.done() for _, future in self._waiting.values())

    def add(self, sequence: Sequence, spec: GrammarSpec) -> None:
        future = self._workers.submit(self._compile, spec)
        self._waiting[sequence.request_id] = (sequence, future)
        future.add_done_callback(lambda _: self._on_done())

    def abort(self, request_id: str) -> bool:
        """False if it does not wait here. One that a worker has begun ends by itself; its outcome is dropped."""
        _, future = self._waiting.pop(request_id, (None, None))
        if future is None:
            return False
        future.cancel()
        return True

    def take(self) -> list[tuple[Sequence, Grammar | EngineError]]:
        """Those that are done, in order of arrival; they wait here no longer."""
        done = [request_id for request_id, (_, future) in self._waiting.items() if future.done()]
        return [(sequence, _outcome(future)) for sequence, future in map(self._waiting.pop, done)]

    def wait(self) -> None:
        """Until one of them is done, if there is any."""
        wait([future for _, future in self._waiting.values()], return_when=FIRST_COMPLETED)


def _outcome(future: Future[Grammar]) -> Grammar | EngineError:
    """A fault inside the compiler costs that request alone, whatever it is."""
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, EngineError):
        return error
    return BadRequest(f"The grammar cannot be compiled: {type(error).__name__}: {error}")
