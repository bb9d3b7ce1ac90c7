"""One chat as Markdown, for people: what is shown of it, its system prompt, its files. Out, and in again.

    # Title
    ## System | ## User | ## File: name | ## Thinking | ## Assistant     each with its text below

A line of a text that reads as such a heading gets a backslash before it, which reading takes away again. Blank lines at
both ends of a text, other versions, sampling and figures do not survive: JSON keeps those.
"""

import re
from collections.abc import Iterator
from typing import Literal

from app.history.exchange import WholeChat, WholeFile, WholeMessage, refusal

_HEADING = r"## (System|User|Thinking|Assistant|File: .+)$"
_SECTION = re.compile(f"^{_HEADING}", re.MULTILINE)
_LOOKS_LIKE_ONE = re.compile(rf"^\\*{_HEADING}", re.MULTILINE)
_GUARDED = re.compile(rf"^\\(?=\\*{_HEADING})", re.MULTILINE)
_ROLES: dict[str, Literal["user", "assistant"]] = {"User": "user", "Assistant": "assistant"}


def write_markdown(chat: WholeChat) -> str:
    parts = [f"# {' '.join(chat.title.split()) or 'New chat'}"]
    if chat.system:
        parts.append(_section("System", chat.system))
    for message in _shown(chat):
        parts += _sections_of(message)
    return "\n\n".join(parts) + "\n"


def _shown(chat: WholeChat) -> list[WholeMessage]:
    """From its first message to its leaf."""
    by_id = {message.id: message for message in chat.messages}
    path: list[WholeMessage] = []
    at = chat.leaf_id
    while at is not None:
        path.append(by_id[at])
        at = by_id[at].parent_id
    return path[::-1]


def _sections_of(message: WholeMessage) -> Iterator[str]:
    if message.reasoning:
        yield _section("Thinking", message.reasoning)
    yield _section(message.role.capitalize(), message.text)
    for file in message.attachments:
        yield _section(f"File: {' '.join(file.name.split())}", file.text)


def _section(heading: str, text: str) -> str:
    guarded = _LOOKS_LIKE_ONE.sub(lambda found: "\\" + found[0], text.strip("\n"))
    return f"## {heading}\n\n{guarded}"


def read_markdown(text: str) -> WholeChat:
    """Raises AppError 400 for what has no place in a chat."""
    head, *sections = _SECTION.split(text.replace("\r\n", "\n").removeprefix("\ufeff"))
    title, _, rest = head.strip().partition("\n")
    is_title = re.match(r"#(?= |$)", title)
    if not sections and not (is_title and not rest.strip()):
        raise refusal('it is text, and no chat: it has no line "## User" or "## Assistant"')
    if rest.strip() or (title and not is_title):
        raise refusal('before its first "## User" it has more than a title ("# Title")')
    reading = _Reading()
    for heading, body in zip(sections[::2], sections[1::2], strict=True):
        reading.take(heading, _GUARDED.sub("", body.strip("\n")))
    return reading.chat(title.removeprefix("#").strip())


class _Reading:
    """Sections, one after another, become messages, each below the one before."""

    def __init__(self) -> None:
        self._system = ""
        self._thinking = ""
        self._messages: list[WholeMessage] = []

    def take(self, heading: str, text: str) -> None:
        if heading in _ROLES:
            self._add(_ROLES[heading], text)
        elif heading == "Thinking":
            self._thinking = text
        elif heading == "System":
            self._system = "\n\n".join(filter(None, (self._system, text)))
        else:
            self._attach(heading.removeprefix("File: "), text)

    def chat(self, title: str) -> WholeChat:
        if self._thinking:
            raise refusal('its last "## Thinking" has no "## Assistant" after it')
        leaf_id = self._messages[-1].id if self._messages else None
        return WholeChat(title=title, system=self._system, messages=tuple(self._messages), leaf_id=leaf_id)

    def _add(self, role: Literal["user", "assistant"], text: str) -> None:
        parent_id = self._messages[-1].id if self._messages else None
        its_id = str(len(self._messages))
        message = WholeMessage(id=its_id, parent_id=parent_id, role=role, text=text, reasoning=self._thinking)
        self._messages.append(message)
        self._thinking = ""

    def _attach(self, name: str, text: str) -> None:
        if not self._messages:
            raise refusal(f'its "## File: {name}" comes before any message')
        last = self._messages[-1]
        file = WholeFile(name=name, num_bytes=len(text.encode()), text=text)
        self._messages[-1] = last.model_copy(update={"attachments": (*last.attachments, file)})
