"""The body of POST /v1/completions -> CompletionRequest."""

from typing import Annotated, Any

from pydantic import WithJsonSchema, field_validator

from app.api.body import invalid
from app.api.errors import echo
from app.api.numbers import Logprobs
from app.api.protocol import MAX_CHOICES, GenerationBody, token_limit
from app.chat.types import CompletionRequest, FillIn
from app.errors import AppError

Prompt = str | tuple[int, ...] | FillIn


class CompletionBody(GenerationBody):
    prompt: Annotated[
        Any,
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]}),
    ]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _no_logprobs(cls, logprobs: Any) -> Any:
        """Chat's way to say none."""
        return None if logprobs is False else logprobs

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """With `echo` the prompt is part of the text."""
        return self.logprobs if self.echo else None

    @field_validator("prompt")
    @classmethod
    def _some_prompt(cls, prompt: Any) -> Any:
        if prompt is None or prompt == "" or prompt == []:
            raise AppError(400, "empty_prompt", "`prompt` is empty.", hint="Send some text.", param="prompt")
        return prompt

    def prompts(self) -> list[Prompt]:
        """string | list of strings | token ids | list of lists of token ids -> the prompts. Raises AppError (400)."""
        return [self._with_suffix(prompt) for prompt in self._plain_prompts()]

    def _plain_prompts(self) -> list[str | tuple[int, ...]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt, list):
            if all(map(_is_token_id, self.prompt)):
                return [tuple(self.prompt)]
            return [_one_prompt(index, item) for index, item in enumerate(self.prompt)]
        raise invalid("prompt", f"expected text, token ids, or a list of either; got {echo(self.prompt)}.")

    def _with_suffix(self, prompt: str | tuple[int, ...]) -> Prompt:
        """A text to come after the answer makes the prompt a gap to fill."""
        if not self.suffix:
            return prompt
        if not isinstance(prompt, str):
            raise invalid("suffix", "goes with a prompt of text, not of token ids.")
        return FillIn(prompt, self.suffix)

    def requests(self, request_id: str) -> list[CompletionRequest]:
        """One request for each answer: n for the first prompt, then n for the next. Raises AppError (400)."""
        self.check_stream_options()
        prompts = self.prompts()
        if len(prompts) * self.num_choices > MAX_CHOICES:
            raise invalid("prompt", f"{len(prompts)} prompts of n={self.num_choices}: at most {MAX_CHOICES} answers.")
        return [
            CompletionRequest(
                request_id=f"{request_id}-{index * self.num_choices + choice}",
                model=self.model or "",
                prompt=prompt,
                sampling=self.sampling(choice, self._max_tokens()),
                echo=bool(self.echo),
                keep_last=self.truncate_prompt_tokens,
                reports_progress=self.wants_progress,
                returns_prompt_ids=bool(self.return_token_ids),
                standing=self.standing,
            )
            for index, prompt in enumerate(prompts)
            for choice in range(self.num_choices)
        ]

    def _max_tokens(self) -> int | None:
        """With `echo`, 0 asks for the prompt alone (and its log-probabilities)."""
        return 0 if self.echo and self.max_tokens == 0 else token_limit("max_tokens", self.max_tokens)


def _is_token_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _one_prompt(index: int, item: Any) -> str | tuple[int, ...]:
    if isinstance(item, str) and item:
        return item
    if isinstance(item, list) and item and all(map(_is_token_id, item)):
        return tuple(item)
    raise invalid(f"prompt[{index}]", f"expected text or a list of token ids, not empty; got {echo(item)}.")
