"""Which grammar an answer is written under: what its tools, its form and its bad words ask, after its thinking."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from app.chat.channels import Tags
from app.chat.tools.format import ToolFormat
from app.chat.tools.grammar import Lark, escaped, free_of
from app.chat.types import ChatRequest, NamedTool, SamplingOptions, ToolSpec
from app.errors import AppError
from engine.types import GrammarKind, GrammarSpec

TokenId = Callable[[str], int | None]  # of a token of its own that is written so

_THE_REST = "FREE"


def chat_options(request: ChatRequest, format: ToolFormat | None, token_id: TokenId) -> SamplingOptions:
    """The request's options with the grammar that its tools and bad words ask for. Raises AppError (400).

    format  how the model writes calls; None where there are no tools
    """
    options = request.sampling
    if format is None:
        return plain_options(options)
    if request.tool_choice == "none":
        return _without(options, [format.call_pattern()], "tool_choice")
    if request.tool_choice != "auto":
        tools = _chosen(request)
        _refuse_bad_words(options, "tool_choice")
        return replace(options, grammar=_calls(tools, format, request, token_id), grammar_param="tools")
    if options.grammar is not None:
        return replace(
            options, grammar=replace(options.grammar, instead=_calls(request.tools, format, request, token_id))
        )
    if any(tool.is_strict for tool in request.tools):
        _refuse_bad_words(options, "tools")
        return replace(options, grammar=_text_or_calls(format, request, token_id), grammar_param="tools")
    return plain_options(options)


def plain_options(options: SamplingOptions) -> SamplingOptions:
    """Of an answer without tools."""
    return _without(options, [], "bad_words")


def after_thinking(options: SamplingOptions, tags: Tags, *, is_open: bool) -> SamplingOptions:
    """A grammar is for what the model says, not for what it thinks before.

    is_open  the answer begins inside the thinking; else thinking comes first only if the model opens it
    """
    if options.grammar is None:
        return options
    opening = "" if is_open else tags.opening
    return replace(options, grammar=replace(options.grammar, after=tags.closing, opening=opening))


def _without(options: SamplingOptions, patterns: Sequence[str], param: str) -> SamplingOptions:
    """A grammar of the texts without bad words, and of no such pattern. An answer of a given form is no call anyway."""
    patterns = [*patterns, *(f".*{escaped(word)}.*" for word in options.bad_words)]
    if not patterns:
        return options
    if options.grammar is not None:
        _refuse_bad_words(options, "a grammar")
        return options
    text = f"start: {_THE_REST}\n{_THE_REST}: {free_of('|'.join(patterns))}"
    return replace(options, grammar=GrammarSpec(GrammarKind.NATIVE, text), grammar_param=param)


def _refuse_bad_words(options: SamplingOptions, other: str) -> None:
    if options.bad_words:
        raise AppError(
            400,
            "unsupported_parameter",
            f"`bad_words` cannot be kept together with {other}.",
            hint="Leave one of them out.",
            param="bad_words",
        )


def _chosen(request: ChatRequest) -> Sequence[ToolSpec]:
    choice = request.tool_choice
    if not isinstance(choice, NamedTool):
        return request.tools
    tools = [tool for tool in request.tools if tool.name == choice.name]
    if not tools:
        raise AppError(
            400,
            "invalid_value",
            f"`tool_choice` names {choice.name[:200]!r}, which is not among the tools.",
            hint=f"There are {', '.join(tool.name for tool in request.tools)[:200]}.",
            param="tool_choice",
        )
    return tools


def _calls(tools: Sequence[ToolSpec], format: ToolFormat, request: ChatRequest, token_id: TokenId) -> GrammarSpec:
    lark = Lark(token_id)
    several = request.parallel_tool_calls and not isinstance(request.tool_choice, NamedTool)
    return GrammarSpec(GrammarKind.NATIVE, lark.source(format.grammar(tools, lark, several=several)))


def _text_or_calls(format: ToolFormat, request: ChatRequest, token_id: TokenId) -> GrammarSpec:
    """Free text, in which a call that begins goes on as one."""
    lark = Lark(token_id, is_lazy=not format.at_start)
    calls = format.grammar(request.tools, lark, several=request.parallel_tool_calls)
    lark.rule(_THE_REST, free_of(format.call_pattern()))
    after = "" if format.at_start else f" {_THE_REST}"
    return GrammarSpec(GrammarKind.NATIVE, lark.source(f"{calls}{after} | {_THE_REST}"))
