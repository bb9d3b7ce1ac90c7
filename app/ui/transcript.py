"""A conversation as the page holds it: turns, what the model is sent of them, and how they look in the chat.

The conversation of a tab lives in that tab (a hidden field that travels with each message), so the server has nothing
that two tabs could share. It is kept apart from the chat widget, which reformats text for the screen.
"""

import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from app.chat.types import Message

NoteKind = Literal["info", "error", "wait"]

# Where the page's Markdown shows "<" as it is: fenced code (to the end of the text where it is still open),
# inline code, and formulas. Everywhere else a tag would be taken as HTML. A formula between single dollars follows
# pandoc's rule (no space inside the dollars, no digit after), so that "$5 and $10" stays money.
_AS_IT_IS = re.compile(
    r"^ {0,3}(?P<fence>`{3,}|~{3,}).*?(?:^ {0,3}(?P=fence)[`~]*[ \t]*$|\Z)"
    r"|(?<!`)(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)"
    r"|\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)"
    r"|(?<![\\$])\$(?P<formula>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?![\d$])",
    re.DOTALL | re.MULTILINE,
)
_TAG_OPENS = re.compile(r"<(?=[A-Za-z/!?])")

LATEX_DELIMITERS: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A message and what came of it.

    turn_id      an id that only its own tab is told, as whoever knows it can stop the turn
    note         what is to be said about the answer ("Stopped.", an error); no part of what the model is sent
    note_kind    how it looks: a remark, a failure, or the line of an answer that has not begun
    thinking_s   seconds from the first word of reasoning to the first of the answer; None while it still thinks
    """

    turn_id: str = ""
    user: str
    reasoning: str = ""
    thinking_s: float | None = None
    answer: str = ""
    note: str = ""
    note_kind: NoteKind = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a tab holds of its latest message.

    turn_id  set from the beginning of its turn on
    turn     set once it has ended, together with the line of its `figures`
    refusal  why it was not sent at all; `refused` is its text, which goes back into the message box
    """

    turn_id: str = ""
    turn: Turn | None = None
    figures: str = ""
    refusal: str = ""
    refused: str = ""


def dump(turns: Iterable[Turn]) -> str:
    return json.dumps([asdict(turn) for turn in turns], ensure_ascii=False)


def load(text: str) -> tuple[Turn, ...]:
    """Raises ValueError where the text is not what `dump` wrote."""
    try:
        return tuple(_turn(fields) for fields in json.loads(text or "[]"))
    except TypeError as error:
        raise ValueError(f"Not a conversation: {error}") from error


def dump_ticket(ticket: Ticket) -> str:
    return json.dumps(asdict(ticket), ensure_ascii=False)


def load_ticket(text: str) -> Ticket:
    """Raises ValueError where the text is not what `dump_ticket` wrote."""
    try:
        fields = json.loads(text or "{}")
        turn = fields.pop("turn", None)
        return Ticket(turn=turn and _turn(turn), **fields)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"Not a ticket: {error}") from error


def conversation(transcript: str, ticket: Ticket) -> tuple[Turn, ...]:
    """All turns that have ended; the latest may have reached the tab's ticket and not yet its transcript."""
    turns = load(transcript)
    if ticket.turn is None or any(turn.turn_id == ticket.turn_id for turn in turns):
        return turns
    return (*turns, ticket.turn)


def _turn(fields: dict[str, Any]) -> Turn:
    turn = Turn(**fields)
    if turn.note_kind not in get_args(NoteKind):
        raise ValueError(f"Not a turn: it has a note of the kind {turn.note_kind!r}.")
    return turn


def messages(turns: Sequence[Turn], user: str, system: str) -> tuple[Message, ...]:
    """What the model is sent: the answered turns, then `user`.

    A turn without any answer (it failed, or was stopped at once) is left out, as chat templates refuse two messages
    of the user in a row; the note of such a turn says so.
    """
    sent = [Message(role="system", content=system)] if system.strip() else []
    for turn in turns:
        if turn.answer:
            sent.append(Message(role="user", content=turn.user))
            sent.append(
                Message(role="assistant", content=turn.answer, reasoning_content=turn.reasoning or None),
            )
    return (*sent, Message(role="user", content=user))


def bubbles(turn: Turn) -> list[dict[str, Any]]:
    """The turn as messages of a Gradio Chatbot: the user's, the folded reasoning, the answer, the note."""
    shown = [_bubble("user", literal(turn.user))]
    if turn.reasoning:
        shown.append(_bubble("assistant", literal(turn.reasoning), metadata=_fold(turn)))
    if turn.answer:
        shown.append(_bubble("assistant", literal(turn.answer)))
    if turn.note:
        shown.append(_bubble("assistant", _note(turn)))
    return shown


def literal(text: str) -> str:
    """Markdown for the chat, in which HTML shows as it was typed instead of being obeyed."""
    pieces: list[str] = []
    end = 0
    for match in _AS_IT_IS.finditer(text):
        formula = match["formula"]
        as_it_is = match.group() if formula is None else f"\\({formula}\\)"
        pieces += [_TAG_OPENS.sub("&lt;", text[end : match.start()]), as_it_is]
        end = match.end()
    return "".join([*pieces, _TAG_OPENS.sub("&lt;", text[end:])])


def _bubble(role: str, text: str, **more: Any) -> dict[str, Any]:
    # A plain string would be stripped and dedented by the widget; a text part is taken as it is.
    return {"role": role, "content": [{"type": "text", "text": text}], **more}


def _fold(turn: Turn) -> dict[str, Any]:
    if turn.thinking_s is None and not turn.note:
        return {"title": "Thinking", "status": "pending"}
    fold: dict[str, Any] = {"title": "Thinking", "status": "done"}
    return fold if turn.thinking_s is None else {**fold, "duration": round(turn.thinking_s, 1)}


def _note(turn: Turn) -> str:
    words = html.escape(" ".join(turn.note.split()))
    return f'<p class="fs-note fs-{turn.note_kind}">{words}</p>'
