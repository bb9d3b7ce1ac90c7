"""The words of the history: a chat, a message in its tree, what is attached to it, what a search finds.

Plain and frozen; app.history.history makes them from rows. Times are seconds since 1970.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["user", "assistant"]
# writing -> done | stopped (by the user) | failed (meta says why) | cut (its server ended before it did)
State = Literal["writing", "done", "stopped", "failed", "cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """
    folder      "" is none
    model_id    "" takes the model in hand
    system      its system prompt; "" sends none
    sampling    options that differ from the model's own, by the names of `app.chat.types.SamplingOptions`
    leaf_id     the message at the end of what is shown; None while there is none
    updated_at  of its last message; renaming, pinning and the like do not change it
    """

    id: str
    title: str
    folder: str = ""
    is_pinned: bool = False
    model_id: str = ""
    system: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    leaf_id: str | None = None
    created_at: float = 0.0
    updated_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A file beside a message, without its text, which is read only for a prompt (`History.attached_text`).

    kind       "text" or "pdf": what its text was taken from
    num_bytes  of the file; num_chars of its text
    """

    id: str
    name: str
    kind: str
    num_bytes: int
    num_chars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A message. Those with the same parent are versions of each other; a chat's first messages have None.

    meta          what the page keeps with an answer: its model, figures, why it failed
    version       1 for the first of its versions, of `num_versions`
    """

    id: str
    chat_id: str
    parent_id: str | None
    role: Role
    text: str
    reasoning: str = ""
    state: State = "done"
    attachments: tuple[Attachment, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    created_at: float = 0.0
    version: int = 1
    num_versions: int = 1


@dataclass(frozen=True, slots=True)
class Found:
    """A chat with what was searched. node_id: of its newest such message, None where its title has it."""

    chat: Chat
    node_id: str | None
    excerpt: str


@dataclass(frozen=True, slots=True)
class Preset:
    """A system prompt and sampling under a name, to be put into chats."""

    name: str
    system: str
    sampling: Mapping[str, Any]
