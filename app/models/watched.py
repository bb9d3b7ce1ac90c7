"""An engine as turns get it: what becomes of each request is told to the model's conduct, which may refuse it."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from app.chat.types import EngineLike
from app.models.conduct import Conduct, fingerprint_of
from engine.errors import EngineClosed, EngineDied
from engine.types import ORDINARY, SamplingParams, Standing, TokenEvent


class WatchedEngine:
    """Implements `app.chat.types.EngineLike` over the engine of one child."""

    def __init__(self, engine: EngineLike, conduct: Conduct) -> None:
        self._engine = engine
        self._conduct = conduct
        self._at_its_death: set[int] = set()

    async def submit(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        standing: Standing = ORDINARY,
    ) -> AsyncGenerator[TokenEvent, None]:
        """As the engine's own. Raises AppError for a request at which the engine died before."""
        fingerprint = fingerprint_of(prompt_token_ids, params)
        self._conduct.check_request(fingerprint)
        has_tokens = False
        try:
            async with aclosing(self._engine.submit(request_id, prompt_token_ids, params, standing)) as events:
                async for event in events:
                    if event.finish_reason is not None:  # before it is handed on: nobody need ask for more
                        self._conduct.answered(fingerprint)
                    has_tokens = has_tokens or event.token_id is not None
                    yield event
        except GeneratorExit:
            if has_tokens:
                self._conduct.served()
            raise
        except EngineClosed:
            raise
        except EngineDied:
            if fingerprint not in self._at_its_death:  # n answers to one request are one request
                self._at_its_death.add(fingerprint)
                self._conduct.suspect(fingerprint)
            raise
