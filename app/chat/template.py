"""Messages -> the prompt's text, by the model's own chat template (Jinja, as transformers runs it).

A template comes with a checkpoint, so it is foreign code: it runs in Jinja's immutable sandbox. Templates differ in
what they take; where one refuses a list of messages, or leaves a text out, they are tried again in plainer shapes. One
that says nothing of tools or their calls has them told in words.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.chat.files import bad_checkpoint, read_json_if_there
from app.chat.shapes import Messages, shapes_of
from app.chat.tools.choose import PROBE_KEY, PROBE_NAME, PROBE_VALUE, choose_format
from app.chat.tools.format import ToolFormat
from app.chat.tools.json_calls import loaded
from app.chat.tools.told import told_in_words, tool_as_json
from app.chat.types import Message, ToolCall, ToolSpec
from app.errors import AppError

_log = logging.getLogger("fireside.chat")
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_MARK = "\x02fireside-continues-here\x03"

Names = Mapping[str, Any]


class ChatTemplate:
    """
    source   the template's text
    tokens   its special tokens by name ("bos_token": "<s>")
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        self._template = _environment().from_string(source)
        self._tokens = dict(tokens)

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How a model with this template writes tool calls, as far as it can be seen."""
        return choose_format(self.source, lambda: self._probe("") or self._probe(None))

    @cached_property
    def _shows_tools(self) -> bool:
        probe = (Message(role="user", content="x"),)
        try:
            return PROBE_NAME in self._render(probe, (ToolSpec(name=PROBE_NAME),), False, {}, "")
        except _Refusal:
            return False

    @cached_property
    def _empty_contents(self) -> tuple[str | None, ...]:
        """What a message without text must have as its content for its calls to be shown; () where they never are."""
        return tuple(empty for empty in ("", None) if PROBE_VALUE in (self._probe(empty) or ""))

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate | None":
        """The template of a model folder; None where it has none. Raises AppError where it is no valid Jinja."""
        config = read_json_if_there(folder / "tokenizer_config.json")
        source = _find_source(folder, config)
        if source is None:
            return None
        try:
            return cls(source, _special_tokens(read_json_if_there(folder / "special_tokens_map.json") | config))
        except jinja2.TemplateError as error:
            raise bad_checkpoint(folder / "chat_template", str(error)) from error

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[ToolSpec] = (),
        tool_format: ToolFormat | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, with the head of the assistant's turn at its end.

        tools                    what the model may call
        tool_format              how it writes that; None takes what the template shows
        continue_final_message   end inside the last message instead, so that the model goes on in it
        variables                more of them for the template (enable_thinking, ...)
        Raises AppError (400), with the template's own words, where it takes the messages in no shape
        """
        names = variables or {}
        has_calls = any(message.tool_calls or message.role == "tool" for message in messages)
        if not tools and not has_calls:
            return self._best(messages, (), continue_final_message, names)
        text = None
        if self._shows_tools or not tools:
            empties = self._empty_contents if has_calls else ("",)
            shown = (self._shown(messages, tools, continue_final_message, names, empty) for empty in empties)
            text = next((text for text in shown if text is not None), None)
        if text is not None:
            return text
        plain = told_in_words(messages, tools, tool_format or self.tool_format)
        return self._best(plain, (), continue_final_message, names)

    def _shown(
        self, messages: Messages, tools: Sequence[ToolSpec], continues: bool, variables: Names, empty: str | None
    ) -> str | None:
        """The prompt, if the template takes the messages and has the results of their calls in it."""
        try:
            text = self._best(messages, tools, continues, variables, empty)
        except AppError:
            return None
        return text if _says_all_of_tools(text, messages, tools) else None

    def _best(
        self,
        messages: Messages,
        tools: Sequence[ToolSpec],
        continues: bool,
        variables: Names,
        empty: str | None = "",
    ) -> str:
        """In the first shape that the template takes whole, else in the first that it takes."""
        refusal = None
        incomplete = None
        for shape in shapes_of(messages):
            try:
                text = self._render(shape, tools, continues, variables, empty)
            except _Refusal as error:
                refusal = refusal or error
                continue
            if _says_everything(text, shape):
                return text
            incomplete = incomplete or text
        if incomplete is not None:
            _log.warning("the chat template changes or leaves out the text of a system or user message")
            return incomplete
        raise AppError(
            400,
            "template_refused",
            f"This model's chat template does not take these messages: {str(refusal)[:200]}",
            param="messages",
        )

    def _render(
        self, messages: Messages, tools: Sequence[ToolSpec], continues: bool, variables: Names, empty: str | None
    ) -> str:
        dicts = [_as_dict(message, empty) for message in messages]
        if continues:  # the blank after the mark tells whether the template trims its messages
            dicts[-1]["content"] = f"{messages[-1].content}{_MARK} "
        names: dict[str, Any] = {"tools": [tool_as_json(tool) for tool in tools] or None, "documents": None}
        names |= {**self._tokens, **variables, "messages": dicts, "add_generation_prompt": not continues}
        try:
            text = self._template.render(names)
        except Exception as error:  # foreign code may raise anything
            raise _Refusal(str(error)) from error
        return _cut_at_mark(text) if continues else text

    def _probe(self, empty: str | None) -> str | None:
        """A conversation with a call, as the template writes it; None where it takes none."""
        user, tools = Message(role="user", content="x"), (ToolSpec(name=PROBE_NAME),)
        call = ToolCall(id="000000000", name=PROBE_NAME, arguments=json.dumps({PROBE_KEY: PROBE_VALUE}))
        called = Message(role="assistant", content="", tool_calls=(call,))
        result, said = Message(role="tool", content="x", tool_call_id=call.id), Message(role="assistant", content="x")
        for messages in ((user, called, result, said, user), (user, called, user)):
            try:
                return self._render(messages, tools, False, {}, empty)
            except _Refusal:
                continue
        return None


class _Refusal(Exception):
    """The template raised."""


def _cut_at_mark(text: str) -> str:
    head, mark, tail = text.rpartition(_MARK)
    if not mark:
        raise _Refusal("it leaves out the last message, which was to be continued.")
    return head if tail.startswith(" ") else head.rstrip()


def _as_dict(message: Message, empty: str | None) -> dict[str, Any]:
    """`empty`: the content of a message that has calls and no text."""
    content = message.content or empty if message.tool_calls else message.content
    extras = {
        "name": message.name,
        "reasoning_content": message.reasoning_content,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [_call_as_dict(call) for call in message.tool_calls] or None,
    }
    return {"role": message.role, "content": content} | {k: v for k, v in extras.items() if v is not None}


def _call_as_dict(call: ToolCall) -> dict[str, Any]:
    """Arguments as an object, which templates loop over; as they were written where they are none."""
    arguments = loaded(call.arguments or "{}")
    function = {"name": call.name, "arguments": arguments if isinstance(arguments, dict) else call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _says_everything(text: str, messages: Messages) -> bool:
    """Some templates skip a role that they do not know without a word."""
    return all(message.content.strip() in text for message in messages if message.role in ("system", "user"))


def _says_all_of_tools(text: str, messages: Messages, tools: Sequence[ToolSpec]) -> bool:
    calls = (call.name for message in messages for call in message.tool_calls)
    results = (message.content.strip() for message in messages if message.role == "tool")
    return all(name in text for name in (*(tool.name for tool in tools), *calls)) and all(
        result in text or json.dumps(result, ensure_ascii=False)[1:-1] in text for result in results
    )


def _find_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Newest layout first: chat_template.jinja, chat_template.json, then tokenizer_config.json."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    found = read_json_if_there(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):  # several, by name
        by_name = {entry["name"]: entry["template"] for entry in found}
        found = by_name.get("default") or next(iter(by_name.values()), None)
    return found or None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its like, written plain or as {"content": ...}."""
    written = {name: config.get(name) for name in _TOKEN_NAMES}
    plain = {name: token["content"] if isinstance(token, dict) else token for name, token in written.items()}
    return {name: token for name, token in plain.items() if token is not None}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a model was never shown."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own way to declare it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def told_of_tokenizer(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json with its special tokens written plain, and the chat template wherever it lies."""
    config = read_json_if_there(folder / "tokenizer_config.json")
    tokens = _special_tokens(read_json_if_there(folder / "special_tokens_map.json") | config)
    return config | tokens | {"chat_template": _find_source(folder, config)}
