"""An engine as turns get it: what becomes of each request is told to the model's conduct, which may refuse it.

A request that got nothing yet when its engine was lost, without a word of whose fault it was, is asked of the next one,
once: nobody has seen a part of its answer. Those that were there at a death begin one at a time, so that the next death
tells which of them it was.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass

from app.chat.types import LoadedModel
from app.models.memory.conduct import Conduct, fingerprint_of
from app.models.memory.resident import Engine
from engine.errors import EngineClosed, EngineDied, EngineLost
from engine.types import ORDINARY, SamplingParams, Standing, TokenEvent


@dataclass(slots=True)
class _Request:
    """num_times  that an engine was asked"""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    standing: Standing
    fingerprint: int
    num_times: int = 0
    has_begun: bool = False
    has_tokens: bool = False


class WatchedEngine:
    """Implements `app.chat.types.EngineLike` over the engine of one child.

    successor  the model with its next engine
    """

    def __init__(
        self, engine: Engine, conduct: Conduct, successor: Callable[[], AbstractAsyncContextManager[LoadedModel]]
    ) -> None:
        self._engine = engine
        self._conduct = conduct
        self._successor = successor
        self._at_its_death: set[int] = set()

    def submit(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        standing: Standing = ORDINARY,
    ) -> AsyncGenerator[TokenEvent, None]:
        """As the engine's own. Raises AppError for a request at which the engine died before."""
        fingerprint = fingerprint_of(prompt_token_ids, params)
        return self._serve(_Request(request_id, prompt_token_ids, params, standing, fingerprint))

    async def _serve(self, request: _Request) -> AsyncGenerator[TokenEvent, None]:
        try:
            async with aclosing(self._ask(request)) as events:
                async for event in events:
                    yield event
            return
        except EngineLost:
            if request.has_begun or request.num_times > 1:
                raise
        async with self._successor() as model:
            assert isinstance(model.engine, WatchedEngine)
            async with aclosing(model.engine._serve(request)) as events:
                async for event in events:
                    yield event

    async def _ask(self, request: _Request) -> AsyncGenerator[TokenEvent, None]:
        async with AsyncExitStack() as until_it_has_tokens:
            is_alone = self._conduct.is_suspect(request.fingerprint)
            if is_alone:
                await until_it_has_tokens.enter_async_context(self._conduct.alone)
                if not self._engine.is_alive:
                    raise EngineLost("The engine ended before this request's turn came.")
            self._conduct.check_request(request.fingerprint)
            request.num_times += 1
            async with aclosing(self._tell(request)) as events:
                async for event in events:
                    if is_alone and request.has_tokens:
                        await until_it_has_tokens.aclose()
                        is_alone = False
                    yield event

    async def _tell(self, request: _Request) -> AsyncGenerator[TokenEvent, None]:
        """The engine's events; the conduct is told how it ends."""
        of_engine = self._engine.submit(request.request_id, request.prompt_token_ids, request.params, request.standing)
        try:
            async with aclosing(of_engine) as events:
                async for event in events:
                    request.has_begun = True
                    request.has_tokens = request.has_tokens or event.token_id is not None
                    if event.finish_reason is not None:  # before it is handed on: nobody need ask for more
                        self._conduct.answered(request.fingerprint)
                    yield event
        except GeneratorExit:
            if request.has_tokens:
                self._conduct.served()
            raise
        except EngineClosed:
            raise
        except EngineDied:
            if request.fingerprint not in self._at_its_death:  # n answers to one request are one request
                self._at_its_death.add(request.fingerprint)
                self._conduct.suspect(request.fingerprint)
            raise
