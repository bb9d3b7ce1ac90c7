"""The chat: its widgets, and handlers that translate between them and the service.

What keeps an update cheap, however long the chat is: finished turns stay in one Chatbot and the turn in progress is
drawn in a second one below it (Gradio checks and compares a widget's whole value at each update), and the streaming
event has two small outputs only (Gradio rebuilds a widget for each output that an update leaves alone; six outputs
cost 15 ms of CPU an update). The rest of the page follows the ticket, which changes twice a turn.

No event waits for another tab's (`concurrency_limit=None`; the engine does the admission), and there is no `gr.State`
and no unload event, as either would hold one of the six connections that a browser grants a host. An answer in progress
does hold one: six tabs of one browser stream at once, and a seventh (its Stop button too) waits for one of them.
"""

import html
import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Any
from uuid import uuid4

import gradio as gr

from app.chat.types import ChatRequest
from app.ui.sampling import FIELDS, Field, read_sampling
from app.ui.status import Answerer, ModelStatus, StatusSource
from app.ui.transcript import (
    LATEX_DELIMITERS,
    Ticket,
    Turn,
    bubbles,
    conversation,
    dump,
    dump_ticket,
    load,
    load_ticket,
    messages,
)
from app.ui.turn import Answer, RunningTurn

Updates = dict[gr.components.Component, Any]

_WELCOME = "## What is on your mind?\nThe model runs on this machine. Nothing you write leaves it."
_EVENT: dict[str, Any] = {"concurrency_limit": None, "api_visibility": "private", "show_progress": "hidden"}

# What the browser does with an event's inputs; see page.js.
_TAKE = "(...inputs) => window.fireside.takeMessage(...inputs)"
_KEEP = "(transcript) => window.fireside.keep(transcript)"
_KEPT = "() => [sessionStorage.getItem('fireside.transcript') ?? '']"  # may run before page.js does


class ChatTab:
    """Built inside a `gr.Blocks` context; one object serves every browser tab.

    `_running` holds the turns in progress under ids that only their own tab was told.
    """

    def __init__(self, service: Answerer, status: StatusSource) -> None:
        self._service = service
        self._status = status
        self._running: dict[str, RunningTurn] = {}
        self._build_header()
        with gr.Column(elem_id="fs-pane"):
            self.history = _chatbot("Conversation", "fs-history", placeholder=_WELCOME, can_copy=True)
            self.live = _chatbot("Answer in progress", "fs-live")
        with gr.Column(elem_id="fs-composer"):
            self.stats = gr.HTML(elem_id="fs-stats")
            self.box = _message_box()
            gr.HTML("Enter sends, Shift+Enter starts a new line, Esc stops", elem_id="fs-keys")
            self._build_settings()
        self.transcript = gr.Textbox(value="", visible="hidden", elem_id="fs-transcript", label="Transcript")
        self.ticket = gr.Textbox(value="", visible="hidden", elem_id="fs-ticket", label="Ticket")
        self._wire()

    def _build_header(self) -> None:
        with gr.Row(elem_id="fs-header"):
            self.new_chat = gr.Button("New chat", elem_id="fs-new", size="sm", scale=0)

    def _build_settings(self) -> None:
        with gr.Accordion("Advanced", open=False, elem_id="fs-advanced"):
            self.system = gr.Textbox(
                label="System prompt",
                value="",
                lines=2,
                max_lines=6,
                placeholder="How the model is to behave. Empty sends none.",
            )
            with gr.Row():
                self.sampling = [_sampling_box(field) for field in FIELDS]

    def _wire(self) -> None:
        asked = [self.box, self.transcript, self.ticket, self.system, *self.sampling]
        drawn = [self.box, self.history, self.live, self.stats, self.transcript]
        streamed = [self.live, self.ticket]
        self.box.submit(
            self._answer,
            asked,
            streamed,
            trigger_mode="once",
            js=_TAKE,
            **_EVENT,
        )
        self.ticket.change(self._follow, [self.ticket, self.transcript], drawn, **_EVENT)
        self.box.stop(self._stop, [self.ticket], [self.box], queue=False, **_EVENT)
        self.new_chat.click(self._start_anew, [self.ticket], [*drawn, self.ticket], **_EVENT)
        self.transcript.change(None, [self.transcript], None, js=_KEEP, **_EVENT)

    def restore_on_load(self, blocks: gr.Blocks) -> None:
        """A tab that is loaded again shows its conversation again."""
        drawn = [self.history, self.stats, self.transcript]
        blocks.load(self._restore, [self.transcript], drawn, js=_KEPT, queue=False, **_EVENT)

    async def _answer(
        self, text: str, transcript: str, ticket: str, system: str, *sampling: str
    ) -> AsyncIterator[tuple[Any, Any]]:
        """Streams the turn in progress; the ticket says when it has begun and, with the whole turn, when it is over."""
        if not text.strip():
            yield gr.skip(), gr.skip()
            return
        turn_id = secrets.token_urlsafe(16)
        try:
            options = read_sampling(sampling)
        except ValueError as error:
            yield gr.skip(), dump_ticket(Ticket(refused=text, refusal=str(error)))
            return
        turns = conversation(transcript, load_ticket(ticket))
        request = ChatRequest(
            request_id=f"page-{uuid4().hex}", model="", messages=messages(turns, text, system), sampling=options
        )
        begun = dump_ticket(Ticket(turn_id=turn_id))
        async with RunningTurn(self._service, request) as running:
            self._running[turn_id] = running
            try:
                yield bubbles(self._in_progress(text, Answer())), begun
                async for answer in running.updates():
                    yield bubbles(self._in_progress(text, answer)), begun
            finally:
                del self._running[turn_id]
        if not running.is_discarded:
            turn = finished(turn_id, text, running.answer)
            yield (
                bubbles(turn),
                dump_ticket(Ticket(turn_id=turn_id, turn=turn, figures=figures(running.answer, self._status()))),
            )

    def _in_progress(self, text: str, answer: Answer) -> Turn:
        waiting = "" if answer.has_begun else waiting_for(self._status())
        return Turn(
            user=text,
            reasoning=answer.reasoning,
            thinking_s=answer.thinking_s,
            answer=answer.text,
            note=waiting,
            note_kind="wait",
        )

    async def _follow(self, ticket_text: str, transcript: str) -> Updates:
        """Bring the rest of the page to what the ticket says."""
        ticket = load_ticket(ticket_text)
        if ticket.refusal:
            return {self.box: ticket.refused, self.stats: _alert(ticket.refusal)}
        if not ticket.turn_id:
            return {self.box: gr.skip()}
        if ticket.turn is None:
            return {self.box: gr.Textbox(submit_btn=False, stop_btn="Stop"), self.stats: ""}
        turns = conversation(transcript, ticket)
        return {
            self.box: _ready_box(),
            self.history: _all_bubbles(turns),
            self.live: [],
            self.stats: html.escape(ticket.figures),
            self.transcript: dump(turns),
        }

    async def _restore(self, transcript: str) -> Updates:
        try:
            turns = load(transcript)
        except ValueError as error:
            return {self.stats: _alert(f"The conversation that this tab held cannot be read any more: {error}")}
        return {self.history: _all_bubbles(turns), self.transcript: transcript}

    async def _stop(self, ticket: str) -> Any:
        running = self._running.get(load_ticket(ticket).turn_id)
        if running is None:  # it has just ended, or its server has: the button is all that is left of it
            return _ready_box()
        running.stop()
        return gr.skip()

    async def _start_anew(self, ticket: str) -> Updates:
        running = self._running.get(load_ticket(ticket).turn_id)
        if running is not None:
            await running.discard()
        return {
            self.box: _ready_box(),
            self.history: [],
            self.live: [],
            self.stats: "",
            self.transcript: "",
            self.ticket: "",
        }


def finished(turn_id: str, text: str, answer: Answer) -> Turn:
    """The turn as it stays in the conversation, with a word on why it ended where it did not end by itself."""
    note = answer.error or _ending(answer)
    if not answer.text:
        note = f"{note or 'The model said nothing.'} This message stays here, but later answers will not know of it."
    return Turn(
        turn_id=turn_id,
        user=text,
        reasoning=answer.reasoning,
        thinking_s=answer.thinking_s,
        answer=answer.text,
        note=note,
        note_kind="error" if answer.error else "info",
    )


def _ending(answer: Answer) -> str:
    if answer.is_stopped:
        return "Stopped."
    if answer.finish_reason == "length":
        return "Cut here: the answer reached its limit of tokens (Max tokens under Advanced, or the model's context)."
    return ""


def waiting_for(status: ModelStatus) -> str:
    """What an answer that has not begun is waiting for."""
    if status.state == "ready":
        return "Reading your message"
    if status.state != "loading":
        return "Waiting for a model"
    share = "" if status.fraction is None else f" ({status.fraction:.0%})"
    return f"Your message is sent as soon as {status.model_id} is loaded: {status.stage or 'loading'}{share}"


def figures(answer: Answer, status: ModelStatus) -> str:
    """One line on an answer: its speed, its beginning, and what the conversation takes of the context."""
    known = []
    if answer.timings is not None and answer.timings.predicted_per_second:
        known.append(f"{answer.timings.predicted_per_second:.1f} tokens/s")
    if answer.ttft_s is not None:
        known.append(f"first token after {answer.ttft_s:.2f} s")
    if answer.usage is not None:
        room = f" of {status.max_model_len:,}" if status.max_model_len else ""
        known.append(f"{answer.usage.total_tokens:,}{room} tokens of context used")
    return " · ".join(known)


def _all_bubbles(turns: Iterable[Turn]) -> list[dict[str, Any]]:
    return [bubble for turn in turns for bubble in bubbles(turn)]


def _alert(words: str) -> str:
    return f'<span class="fs-error" role="alert">{html.escape(words)}</span>'


def _chatbot(label: str, elem_id: str, placeholder: str | None = None, can_copy: bool = False) -> gr.Chatbot:
    return gr.Chatbot(
        label=label,
        elem_id=elem_id,
        show_label=False,
        container=False,
        height=None,
        autoscroll=False,
        buttons=["copy"] if can_copy else [],
        feedback_options=None,
        latex_delimiters=LATEX_DELIMITERS,
        layout="bubble",
        placeholder=placeholder,
    )


def _message_box() -> gr.Textbox:
    return gr.Textbox(
        label="Message",
        elem_id="fs-box",
        value="",
        show_label=False,
        container=False,
        autofocus=True,
        lines=1,
        max_lines=10,
        placeholder="Write a message",
        submit_btn="Send",
    )


def _ready_box() -> gr.Textbox:
    return gr.Textbox(submit_btn="Send", stop_btn=False)


def _sampling_box(field: Field) -> gr.Textbox:
    """Text rather than a number widget, since that one has no way to show "not set"."""
    return gr.Textbox(value="", label=field.label, placeholder="model's own", max_lines=1, min_width=120)
