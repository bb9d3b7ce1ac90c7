"""What may be given as a prompt or a message, and the room that it must fit into."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from app.chat.model_text import ModelText
from app.chat.types import Message
from engine.types import ModelInfo

Prompt = str | Sequence[int] | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]

# A prompt on its way to its text and ids, told how to refuse one that is too long before it is tokenised.
Prepare = Callable[[Callable[[int], None]], Coroutine[Any, Any, tuple[str | None, tuple[int, ...]]]]


def as_list(prompts: Any) -> list[Prompt]:
    """One prompt or several; a list of numbers is one."""
    is_one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if is_one else list(prompts)


async def plain_prompt(
    text: ModelText, prompt: Prompt, admit_at_least: Callable[[int], None]
) -> tuple[str | None, tuple[int, ...]]:
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise ValueError(f'A prompt has {", ".join(prompt)}; it must have "prompt" or "prompt_token_ids".')
        (prompt,) = prompt.values()
    if isinstance(prompt, str):
        return prompt, await text.plain_prompt(prompt, admit_at_least)
    return None, tuple(map(_token_id, prompt))


def _token_id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"A prompt of token ids has {value!r:.100} among them; all must be whole numbers.")
    return value


def conversations_of(messages: Conversation | Sequence[Conversation]) -> list[tuple[Message, ...]]:
    """One conversation or several, checked. Raises ValueError."""
    is_one = len(messages) > 0 and isinstance(messages[0], Mapping)
    return [tuple(map(_message, conversation)) for conversation in ([messages] if is_one else messages)]


def _message(message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f'A message is {message!r}; it must be like {{"role": "user", "content": "Hello"}}.')
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_text_part(part) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"A message has the content {content!r}; it must be text, or a list of text parts.")
    if message.get("role") not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"A message has the role {message.get('role')!r}; it must be system, user, assistant or tool.")
    if unknown := message.keys() - {"role", "content", "name", "reasoning_content"}:
        raise ValueError(f"A message has {', '.join(sorted(unknown))}, which Fireside does not read.")
    extras = {key: message[key] for key in ("name", "reasoning_content") if key in message}
    return Message(role=message["role"], content=content, **extras)


def _text_part(part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f"A message has the part {part!r}; this model reads text parts only.")
    return str(part["text"])


def check_room(info: ModelInfo, index: int, max_tokens: int, num_tokens: int) -> None:
    """Raises ValueError for a prompt that does not fit with its answer; `num_tokens` may be the least possible."""
    if num_tokens + max(max_tokens, 1) > info.max_model_len:
        raise ValueError(
            f"Prompt {index} has {num_tokens:,} tokens and its answer up to {max_tokens:,}; this model is loaded with "
            f"room for {info.max_model_len:,}. Shorten it, or load the model with a larger max_model_len."
        )
