"""A request made ready for the engine: its prompt as ids that fit, its parameters, and what will read its answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.chat.answer import AnswerText
from app.chat.channels import Channels, Tags, prompt_has_thought, prompt_opens_thinking, text_is_thinking
from app.chat.detokenizer import Detokenizer
from app.chat.fim import fim_prompt
from app.chat.grammars import after_thinking, chat_options, plain_options
from app.chat.model_text import ModelText
from app.chat.types import ChatRequest, CompletionRequest, EmbeddingRequest, FillIn, LoadedModel, SamplingOptions
from app.errors import AppError
from engine.types import ModelInfo, SamplingParams, Standing

_LONGEST_TO_CUT = 16  # contexts


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """
    grammar_param      the field of the request that asked for its grammar
    echo               the prompt, where it is given back
    says_nothing       the echo is all that was asked: the one token that the engine must compute is not given out
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    answer: AnswerText
    standing: Standing
    grammar_param: str | None
    echo: str = ""
    says_nothing: bool = False
    reports_progress: bool = False
    returns_prompt_ids: bool = False


async def chat_job(request: ChatRequest, model: LoadedModel, text: ModelText) -> Job:
    """Raises AppError (400)."""
    room = _Room(model.info, request.sampling.max_tokens, "messages", request.keep_last)
    format = text.tool_format(model.tool_format) if request.tools else None
    tags = text.thinking_tags(model.reasoning)
    prompt, prompt_ids = await text.chat_prompt(request, room.admit_at_least, format)
    is_thinking = _starts_thinking(request, prompt, tags)
    options = chat_options(request, format, text.tokenizer.added_id)
    may_think = text.thinks(tags, model.reasoning) and not prompt_has_thought(prompt, tags)
    if is_thinking or (may_think and not request.continue_final_message):
        options = after_thinking(options, tags, is_open=is_thinking)
    calls = format.parser(request.tools) if format and request.tool_choice != "none" else None
    shown = (*tags, *(format.starts + format.control if calls and format else ()))
    answer = AnswerText(
        _detokenizer(text, options, shown),
        Channels(tags, opened=is_thinking),
        calls,
        single_call=not request.parallel_tool_calls,
        must_call=request.must_call,
    )
    return Job(
        prompt_ids=room.admit(prompt_ids),
        params=_params(text, options, model, reports=request.reports_progress),
        answer=answer,
        standing=request.standing,
        grammar_param=options.grammar_param,
        reports_progress=request.reports_progress,
        returns_prompt_ids=request.returns_prompt_ids,
    )


async def completion_job(request: CompletionRequest, model: LoadedModel, text: ModelText) -> Job:
    """Raises AppError (400)."""
    says_nothing = request.sampling.max_tokens == 0
    options = plain_options(replace(request.sampling, max_tokens=1) if says_nothing else request.sampling)
    room = _Room(model.info, request.sampling.max_tokens, "prompt", request.keep_last)
    prompt_ids = room.admit(await _plain_prompt(request.prompt, text, room))
    is_cut = request.keep_last is not None
    return Job(
        prompt_ids=prompt_ids,
        params=_params(text, options, model, reports=request.reports_progress),
        answer=AnswerText(_detokenizer(text, options, ())),
        standing=request.standing,
        grammar_param=options.grammar_param,
        echo=_echoed(prompt_ids if is_cut else request.prompt, text) if request.echo else "",
        says_nothing=says_nothing,
        reports_progress=request.reports_progress,
        returns_prompt_ids=request.returns_prompt_ids,
    )


async def embedding_prompt(request: EmbeddingRequest, model: LoadedModel, text: ModelText) -> tuple[int, ...]:
    """The ids of what is made into a vector. Raises AppError: 400, or 404 where the model's vectors mean nothing."""
    if not text.embeds:
        raise AppError(
            404,
            "no_embeddings",
            f"`{model.id}` writes text; its vectors do not stand for texts.",
            hint="Load an embedding model, such as Qwen/Qwen3-Embedding-0.6B.",
            param="model",
        )
    room = _Room(model.info, None, "input")
    return room.admit(await _plain_prompt(request.prompt, text, room))


def _detokenizer(text: ModelText, options: SamplingOptions, tags: Sequence[str]) -> Detokenizer:
    ids = frozenset(token_id for tag in tags if (token_id := text.tokenizer.special_id(tag)) is not None)
    return Detokenizer(
        text.tokenizer,
        options.stop,
        options.min_tokens,
        keeps_stop=options.keeps_stop,
        shown=None if options.shows_control_tokens else ids,
    )


def _params(text: ModelText, options: SamplingOptions, model: LoadedModel, *, reports: bool) -> SamplingParams:
    """Where there is a grammar, the first report says that it is one. Raises AppError (400)."""
    _check_ids(options, model.info.vocab_size)
    params = text.sampling(options, model.sampling)
    return replace(params, reports_progress=True) if reports or params.grammar is not None else params


def _check_ids(options: SamplingOptions, vocab_size: int) -> None:
    """The engine would refuse them too, but cannot know what the request calls them. Raises AppError (400)."""
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        for token_id in getattr(options, name):
            if not 0 <= token_id < vocab_size:
                raise AppError(
                    400,
                    "invalid_token_id",
                    f"`{name}` has token id {token_id}, outside this model's vocabulary of {vocab_size:,}.",
                    param=name,
                )
    if options.allowed_token_ids and options.grammar is not None:
        raise AppError(
            400,
            "unsupported_parameter",
            f"`allowed_token_ids` cannot be kept together with `{options.grammar_param}`.",
            hint="Leave one of them out.",
            param="allowed_token_ids",
        )


def _starts_thinking(request: ChatRequest, prompt: str, tags: Tags) -> bool:
    if request.continue_final_message:
        return text_is_thinking(request.messages[-1].content, tags)
    return prompt_opens_thinking(prompt, tags)


@dataclass(frozen=True, slots=True)
class _Room:
    """The context that a prompt and its answer must fit into; refuses before anything is computed.

    param      the request field that holds the prompt
    keep_last  of a longer prompt only so many last tokens are used; -1 uses as many as fit
    """

    info: ModelInfo
    max_tokens: int | None
    param: str
    keep_last: int | None = None

    def admit(self, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids that are used. Raises AppError (400) where they do not fit."""
        if self.keep_last is not None:
            fitting = self.info.max_model_len - max(self.max_tokens or 0, 1)
            prompt_ids = prompt_ids[-max(1, fitting if self.keep_last < 0 else self.keep_last) :]
        if not prompt_ids:
            raise AppError(400, "empty_prompt", "The prompt has no tokens.", hint="Send some text.", param=self.param)
        self._check(len(prompt_ids))
        return prompt_ids

    def admit_at_least(self, prompt_tokens: int) -> None:
        """As `admit`, for a prompt of which only the least possible length is known yet. One that will be cut may be
        longer, but making it into tokens takes time all the same."""
        if self.keep_last is None or prompt_tokens > _LONGEST_TO_CUT * self.info.max_model_len:
            self._check(prompt_tokens, "at least ")

    def _check(self, prompt_tokens: int, bound: str = "") -> None:
        """Agents look for the first sentence and then shorten their history."""
        length, answer = self.info.max_model_len, self.max_tokens or 0
        if prompt_tokens + max(answer, 1) <= length:
            return
        raise AppError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {length} tokens. However, you requested "
            f"{bound}{prompt_tokens + answer} tokens "
            f"({bound}{prompt_tokens} in the messages, {answer} in the completion).",
            hint=self._next_step(is_full=prompt_tokens + answer == length),
            param="max_tokens" if prompt_tokens < length else self.param,
        )

    def _next_step(self, *, is_full: bool) -> str:
        why = "An answer needs room for 1 token more. " if is_full else ""
        if self.info.max_model_len >= self.info.context_length:
            return f"{why}Please reduce the length of the messages or completion."
        return (
            f"{why}Please reduce the length of the messages or completion, or load the model with a larger context "
            f"(`--max-model-len`, at most {self.info.context_length})."
        )


async def _plain_prompt(prompt: str | tuple[int, ...] | FillIn, text: ModelText, room: _Room) -> tuple[int, ...]:
    if isinstance(prompt, FillIn):
        prompt = fim_prompt(prompt, text.tokenizer.added_id)
    if isinstance(prompt, str):
        return await text.plain_prompt(prompt, room.admit_at_least)
    for token_id in prompt:
        if not 0 <= token_id < room.info.vocab_size:
            raise AppError(
                400,
                "invalid_token_id",
                f"Token id {token_id} is outside this model's vocabulary of {room.info.vocab_size:,}.",
                param=room.param,
            )
    return prompt


def _echoed(prompt: str | tuple[int, ...] | FillIn, text: ModelText) -> str:
    if isinstance(prompt, FillIn):
        return prompt.before
    return prompt if isinstance(prompt, str) else text.tokenizer.decode(prompt)
