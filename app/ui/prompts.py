"""From a chat in the history to the request for its next answer."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from app.chat.types import ChatRequest, Message, SamplingOptions
from app.history.file_text import prompt_text
from app.history.history import History
from app.history.types import Chat, Node

NUM_LIKELIEST = 5  # tokens told at each place, where probabilities are asked


def request_for(
    history: History,
    chat: Chat,
    path: Sequence[Node],
    *,
    model_id: str = "",
    sampling: Mapping[str, Any] | None = None,
    shows_probabilities: bool = False,
) -> ChatRequest:
    """The answer that follows the last node of `path`, or goes on in it where that is an answer.

    model_id, sampling  in place of the chat's own; options that are not named stay the chat's
    Reads the texts of attachments, so it blocks.
    """
    options = {**chat.sampling, **(sampling or {})}
    is_begun = path[-1].role == "assistant" and bool(path[-1].text)
    if path[-1].role == "assistant" and not is_begun:
        path = path[:-1]
    return ChatRequest(
        request_id=f"page-{uuid4().hex}",
        model=model_id or chat.model_id,
        messages=_messages(history, chat.system, path),
        sampling=_sampling(options, shows_probabilities),
        reasoning_effort=options.get("reasoning_effort"),
        continue_final_message=is_begun,
        reports_progress=True,
        returns_prompt_ids=True,
    )


def _messages(history: History, system: str, path: Sequence[Node]) -> tuple[Message, ...]:
    """A message whose answer is empty (it failed, or was stopped at once) is left out with it, as chat templates
    refuse two messages of the user in a row."""
    sent = [Message(role="system", content=system)] if system.strip() else []
    for node, following in zip(path, [*path[1:], None], strict=True):
        if node.role == "assistant":
            if node.text or node.reasoning:
                sent.append(_answer(node))
        elif following is None or following.text or following.reasoning:
            sent.append(Message(role="user", content=_with_files(history, node)))
    return tuple(sent)


def _answer(node: Node) -> Message:
    return Message(role="assistant", content=node.text, reasoning_content=node.reasoning or None)


def _with_files(history: History, node: Node) -> str:
    return prompt_text(node.text, [(each.name, history.attached_text(each.id)) for each in node.attachments])


def _sampling(options: Mapping[str, Any], shows_probabilities: bool) -> SamplingOptions:
    """The names of `app.ui.chat_bodies.SamplingBody` are those of the options, but for what is no sampling."""
    chosen = {name: value for name, value in options.items() if name not in ("stop", "reasoning_effort")}
    stop = tuple(options.get("stop") or ())
    return SamplingOptions(**chosen, stop=stop, logprobs=NUM_LIKELIEST if shows_probabilities else None)
