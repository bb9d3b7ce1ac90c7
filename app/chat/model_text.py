"""What a model's folder says about text: its tokenizer, its chat template, its sampling defaults."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.chat.channels import THINK, Tags
from app.chat.files import read_json_if_there
from app.chat.template import ChatTemplate
from app.chat.tokenizer import Tokenizer
from app.chat.tools.choose import FORMATS
from app.chat.tools.format import ToolFormat
from app.chat.types import ChatRequest, Effort, Message, SamplingOptions, ToolSpec
from app.errors import AppError
from engine.types import SamplingParams

# Told the fewest tokens that a text can have, before it is tokenised; raises where not even those fit.
AdmitAtLeast = Callable[[int], None]

_KNOWN_TAGS = (THINK, Tags("[THINK]", "[/THINK]"))
_LONG_TEXT = 10_000  # characters; a longer text is rendered and tokenised in a thread (about 10 ms and up)


@dataclass(frozen=True, slots=True)
class ModelText:
    """
    template        None where the model has none
    template_fault  why a template that is there cannot be used; raw continuations do without it
    defaults        generation_config.json
    embeds          its vectors stand for texts: it was trained to that
    """

    folder: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None
    template_fault: AppError | None
    defaults: Mapping[str, Any]
    embeds: bool

    @classmethod
    def load(cls, folder: Path) -> "ModelText":
        """Takes about a second for a large vocabulary. Raises AppError naming the file at fault."""
        template, fault = _template(folder)
        return cls(
            folder=folder,
            tokenizer=Tokenizer(folder),
            template=template,
            template_fault=fault,
            defaults=read_json_if_there(folder / "generation_config.json"),
            # sentence-transformers' list of what follows the decoder; the engine has seen that it can compute it.
            embeds=(folder / "modules.json").is_file(),
        )

    async def chat_prompt(
        self, request: ChatRequest, admit_at_least: AdmitAtLeast, tool_format: ToolFormat | None = None
    ) -> tuple[str, tuple[int, ...]]:
        """The prompt's text and ids. Raises AppError (400)."""
        size = sum(len(message.content) for message in request.messages) + sum(map(_size, request.tools))
        if size > _LONG_TEXT:
            return await asyncio.to_thread(self._chat_prompt, request, admit_at_least, tool_format)
        return self._chat_prompt(request, admit_at_least, tool_format)

    def _chat_prompt(
        self, request: ChatRequest, admit_at_least: AdmitAtLeast, tool_format: ToolFormat | None
    ) -> tuple[str, tuple[int, ...]]:
        template = self._usable_template
        told = (message.content for message in request.messages if message.role in ("system", "user"))
        admit_at_least(self.tokenizer.fewest_tokens("".join(told)))  # a template takes seconds for a huge conversation
        text = template.render(
            request.messages,
            tools=request.tools,
            tool_format=tool_format,
            continue_final_message=request.continue_final_message,
            variables={**_effort(request.reasoning_effort), **request.template_kwargs},
        )
        admit_at_least(self.tokenizer.fewest_tokens(text))
        return text, self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def _usable_template(self) -> ChatTemplate:
        if self.template_fault is not None:
            raise self.template_fault
        if self.template is None:
            raise AppError(
                400,
                "no_chat_template",
                f"{self.folder.name} has no chat template.",
                hint="Use /v1/completions, or put a chat_template.jinja into its folder.",
            )
        return self.template

    def tool_format(self, name: str | None) -> ToolFormat:
        """How the model writes tool calls: as its catalogue entry says, else as its template shows. Raises AppError."""
        return self._usable_template.tool_format if name is None else FORMATS[name]

    def thinking_tags(self, catalogue: tuple[str, str] | None) -> Tags:
        """Around its thinking, if it does any."""
        if catalogue is not None:
            return Tags(*catalogue)
        source = self.template.source if self.template else ""
        return next((tags for tags in _KNOWN_TAGS if tags.closing in source), THINK)

    def thinks(self, tags: Tags, catalogue: tuple[str, str] | None) -> bool:
        """As far as its catalogue entry or its template tells."""
        return catalogue is not None or (self.template is not None and tags.closing in self.template.source)

    async def plain_prompt(self, text: str, admit_at_least: AdmitAtLeast) -> tuple[int, ...]:
        """Ids of a text to be continued. Raises AppError (400)."""
        if len(text) > _LONG_TEXT:
            return await asyncio.to_thread(self._plain_prompt, text, admit_at_least)
        return self._plain_prompt(text, admit_at_least)

    def _plain_prompt(self, text: str, admit_at_least: AdmitAtLeast) -> tuple[int, ...]:
        admit_at_least(self.tokenizer.fewest_tokens(text))
        return self.tokenizer.encode(text, add_special_tokens=True)

    def sampling(self, options: SamplingOptions, catalogue: Mapping[str, float | int]) -> SamplingParams:
        """The caller's word first, then the catalogue's, then the model's own file's, then the engine's default.

        A stop string that is written as one control token never shows in the text, so it becomes a stop id.
        """
        defaults = {**self.defaults, **catalogue}
        stop_ids = [token_id for stop in options.stop if (token_id := self.tokenizer.special_id(stop)) is not None]
        return SamplingParams(
            max_tokens=options.max_tokens,
            min_tokens=options.min_tokens,
            temperature=float(_first_of(options.temperature, defaults.get("temperature"), 1.0)),
            top_p=float(_first_of(options.top_p, defaults.get("top_p"), 1.0)),
            top_k=max(0, int(_first_of(options.top_k, defaults.get("top_k"), 0))),  # some files write -1 for "all"
            min_p=float(_first_of(options.min_p, defaults.get("min_p"), 0.0)),
            repetition_penalty=float(_first_of(options.repetition_penalty, defaults.get("repetition_penalty"), 1.0)),
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logit_bias=options.logit_bias,
            allowed_token_ids=options.allowed_token_ids,
            seed=options.seed,
            stop_token_ids=(*options.stop_token_ids, *stop_ids),
            ignore_eos=options.ignore_eos,
            logprobs=options.logprobs,
            prompt_logprobs=options.prompt_logprobs,
            grammar=options.grammar,
        )


class ModelTexts:
    """Keeps the text side of the model in hand; another folder replaces it."""

    def __init__(self) -> None:
        self._held: ModelText | None = None
        self._loading = asyncio.Lock()

    async def of(self, folder: Path) -> ModelText:
        async with self._loading:
            if self._held is None or self._held.folder != folder:
                self._held = await asyncio.to_thread(ModelText.load, folder)
            return self._held


def text_notes(folder: Path) -> list[str]:
    """What a user should know of a model before the first chat: that there can be none, and why."""
    template, fault = _template(folder)
    try:
        if template is not None:
            template.render((Message(role="user", content="Hello"),))
            return []
    except AppError as error:
        fault = error
    why = fault.text if fault is not None else f"{folder.name} has no chat template."
    return [f"{why} Chats will be refused; raw completions work."]


def _template(folder: Path) -> tuple[ChatTemplate | None, AppError | None]:
    try:
        return ChatTemplate.from_folder(folder), None
    except AppError as fault:
        return None, fault


def _effort(effort: Effort | None) -> Mapping[str, Any]:
    """Under the names by which templates know it."""
    if effort is None:
        return {}
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


def _size(tool: ToolSpec) -> int:
    return len(tool.description) + len(str(tool.parameters))


def _first_of(*candidates: Any) -> Any:
    return next(candidate for candidate in candidates if candidate is not None)
