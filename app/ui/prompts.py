"""From a chat in the history to the request for its next answer."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from uuid import uuid4

from app.chat.types import ChatRequest, Message, SamplingOptions
from app.history.file_text import prompt_text
from app.history.history import History
from app.history.types import Chat, Node, Preset

NUM_LIKELIEST = 5  # tokens told at each place, where probabilities are asked


@dataclass(frozen=True, slots=True)
class Way:
    """How one answer is made.

    model_id  in place of the chat's own; "" leaves it
    preset    in place of all settings of the chat
    sampling  options over those
    """

    model_id: str = ""
    preset: Preset | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def kept(self) -> dict[str, Any]:
        """As it is kept with the answer, beside the model's id."""
        return {"sampling": self.sampling, **({"preset": asdict(self.preset)} if self.preset else {})}

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> "Way":
        """That an answer was made in."""
        preset = Preset(**{"system": "", "sampling": {}, **meta["preset"]}) if meta.get("preset") else None
        return cls(meta.get("model_id") or "", preset, meta.get("sampling", {}))


def request_for(
    history: History, chat: Chat, path: Sequence[Node], way: Way | None = None, *, shows_probabilities: bool = False
) -> ChatRequest:
    """The answer that follows the last node of `path`, or goes on in it where that is an answer.

    Reads the texts of attachments, so it blocks.
    """
    way = way or Way()
    settings = way.preset or chat
    options = {**settings.sampling, **way.sampling}
    is_begun = path[-1].role == "assistant" and bool(path[-1].text)
    if path[-1].role == "assistant" and not is_begun:
        path = path[:-1]
    return ChatRequest(
        request_id=f"page-{uuid4().hex}",
        model=way.model_id or chat.model_id,
        messages=_messages(history, settings.system, path),
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
