"""The body of POST /v1/chat/completions -> ChatRequest."""

from typing import Annotated, Any, get_args

from pydantic import Field

from app.api.body import MAX_MESSAGES, Many, invalid
from app.api.conversation import MessageBody, messages_of, tool_choice_of, tools_of
from app.api.errors import echo
from app.api.numbers import Count, Logprobs
from app.api.protocol import GenerationBody, token_limit
from app.chat.types import ChatRequest, Effort, Message


class ChatBody(GenerationBody):
    messages: Annotated[Many[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: Any = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def requests(self, request_id: str) -> list[ChatRequest]:
        """One request for each of the n answers. Raises AppError (400)."""
        self.check_stream_options()
        messages = messages_of(self.messages)
        tool_choice, tools = tool_choice_of(self.tool_choice, tools_of(self.tools))
        return [
            ChatRequest(
                request_id=f"{request_id}-{choice}",
                model=self.model or "",
                messages=messages,
                sampling=self.sampling(choice, self._max_tokens()),
                tools=tools,
                tool_choice=tool_choice,
                parallel_tool_calls=self.parallel_tool_calls is not False,
                reasoning_effort=self._effort(),
                continue_final_message=self._continues(messages),
                template_kwargs=self.chat_template_kwargs or {},
                keep_last=self.truncate_prompt_tokens,
                reports_progress=self.wants_progress,
                returns_prompt_ids=bool(self.return_token_ids),
                standing=self.standing,
            )
            for choice in range(self.num_choices)
        ]

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "only allowed when `logprobs` is true.")
        return (self.top_logprobs or 0) if self.logprobs else None

    def _max_tokens(self) -> int | None:
        """The newer name wins; SillyTavern sends both."""
        if self.max_completion_tokens is not None:
            return token_limit("max_completion_tokens", self.max_completion_tokens)
        return token_limit("max_tokens", self.max_tokens)

    def _effort(self) -> Effort | None:
        """Also as `reasoning: {"effort": ...}`, which some clients send here too."""
        inner = self.reasoning.get("effort") if isinstance(self.reasoning, dict) else None
        effort = inner if self.reasoning_effort is None else self.reasoning_effort
        if effort is None:
            return None
        known = next((word for word in get_args(Effort) if word == effort), None)
        if known is None:
            raise invalid("reasoning_effort", f"must be one of {', '.join(get_args(Effort))}; got {echo(effort)}.")
        return known  # type: ignore[no-any-return]

    def _continues(self, messages: tuple[Message, ...]) -> bool:
        """A last message of the assistant is its beginning, unless the client says otherwise (vLLM's two flags)."""
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("continue_final_message", "not together with add_generation_prompt.")
        is_open = messages[-1].role == "assistant" and not messages[-1].tool_calls
        if self.continue_final_message and not is_open:
            raise invalid("continue_final_message", "the last message is no text of the assistant's.")
        return is_open and self.continue_final_message is not False and not self.add_generation_prompt
