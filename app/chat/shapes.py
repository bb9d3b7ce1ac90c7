"""A conversation in plainer and plainer shapes, each saying the same, for templates that do not take it as it is."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from app.chat.tools.json_calls import loaded
from app.chat.types import Message, ToolCall

Messages = tuple[Message, ...]


def shapes_of(messages: Messages) -> Iterator[Messages]:
    """The messages as they are, then plainer step by step; each shape says the same."""
    seen = [messages]
    yield messages
    for plainer in (*_PLAINER_CALLS, _one_system_message_first, _neighbours_joined, _system_told_by_user):
        shape = plainer(seen[-1])
        if shape != seen[-1]:
            seen.append(shape)
            yield shape


def _short_call_ids(messages: Messages) -> Messages:
    """Mistral's templates take ids of nine letters and digits alone."""
    return tuple(
        replace(
            message,
            tool_calls=tuple(replace(call, id=_short_id(call.id)) for call in message.tool_calls),
            tool_call_id=None if message.tool_call_id is None else _short_id(message.tool_call_id),
        )
        for message in messages
    )


def _short_id(call_id: str) -> str:
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _arguments_as_objects(messages: Messages) -> Messages:
    """Arguments that are no JSON object, as the one member of one: many templates loop over them."""
    return tuple(replace(message, tool_calls=tuple(map(_with_object, message.tool_calls))) for message in messages)


def _with_object(call: ToolCall) -> ToolCall:
    is_object = isinstance(loaded(call.arguments or "{}"), dict)
    return call if is_object else replace(call, arguments=json.dumps({"arguments": call.arguments}))


def _one_call_a_message(messages: Messages) -> Messages:
    """Llama 3's templates take no more; each call is followed by its result, as far as there is one."""
    told: list[Message] = []
    results = {message.tool_call_id: message for message in messages if message.role == "tool"}
    many = {call.id for message in messages if len(message.tool_calls) > 1 for call in message.tool_calls}
    for message in messages:
        if len(message.tool_calls) > 1:
            for index, call in enumerate(message.tool_calls):
                told.append(replace(message, content=message.content if index == 0 else "", tool_calls=(call,)))
                told += [results[call.id]] if call.id in results else []
        elif message.role != "tool" or message.tool_call_id not in many:
            told.append(message)
    return tuple(told)


_PLAINER_CALLS = (_short_call_ids, _arguments_as_objects, _one_call_a_message)


def _one_system_message_first(messages: Messages) -> Messages:
    system = [message for message in messages if message.role == "system"]
    others = tuple(message for message in messages if message.role != "system")
    return (replace(system[0], content=_joined(system)), *others) if system else messages


def _neighbours_joined(messages: Messages) -> Messages:
    joined: list[Message] = []
    for message in messages:
        has_calls = bool(message.tool_calls or (joined and joined[-1].tool_calls))
        if joined and message.role == joined[-1].role and message.role in ("user", "assistant") and not has_calls:
            joined[-1] = replace(joined[-1], content=_joined((joined[-1], message)))
        else:
            joined.append(message)
    return tuple(joined)


def _system_told_by_user(messages: Messages) -> Messages:
    """For templates without a system role."""
    if len(messages) < 2 or messages[0].role != "system" or messages[1].role != "user":
        return messages
    return (replace(messages[1], content=_joined(messages[:2])), *messages[2:])


def _joined(messages: Sequence[Message]) -> str:
    return "\n\n".join(message.content for message in messages if message.content)
