"""Log-probabilities of token ids, as the engine gives them -> of tokens as bytes."""

from app.chat.tokenizer import Tokenizer
from app.chat.types import ScoredToken
from engine.types import TokenEvent, TokenLogprobs


class Scores:
    """Those of one answer, gathered until they are taken along with some text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held: list[ScoredToken] = []

    def add(self, event: TokenEvent, prompt_ids: tuple[int, ...]) -> None:
        """What an event brings: on the first one also the prompt's, where they were asked."""
        if event.prompt_logprobs is not None:
            first, *others = prompt_ids
            self._held.append(ScoredToken(self._tokenizer.token_bytes(first), self._is_text(first), None))
            self._held += map(self._scored, others, event.prompt_logprobs)
        if event.token_id is not None and event.logprobs is not None:
            self._held.append(self._scored(event.token_id, event.logprobs))

    def take(self) -> tuple[ScoredToken, ...]:
        held, self._held = tuple(self._held), []
        return held

    def _scored(self, token_id: int, logprobs: TokenLogprobs) -> ScoredToken:
        top = tuple(zip(map(self._tokenizer.token_bytes, logprobs.top_ids), logprobs.top_logprobs, strict=True))
        return ScoredToken(self._tokenizer.token_bytes(token_id), self._is_text(token_id), logprobs.logprob, top)

    def _is_text(self, token_id: int) -> bool:
        return not self._tokenizer.is_special(token_id)
