"""`chat`: a conversation in the terminal, with the running Fireside or one that is started for it."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

from app.cli.command import Command
from app.cli.memory import show_passing
from app.cli.server import Server, any_server, server_arguments
from app.errors import AppError
from app.settings import Settings

_HELP = """\
/new             forget the conversation
/undo            take the last message and its answer back
/system TEXT     tell the model how to be; without TEXT, as it is by itself
/model NAME      go on with another model; without NAME, which one it is
/help            this
/exit            end (so does Ctrl-D); Ctrl-C stops an answer
A line that ends with \\ goes on in the next one."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="?", help="ask this alone; without it, what is piped in, or a conversation")
    parser.add_argument("--model", default="", help="default: the one in hand")
    parser.add_argument("--system", default="", help="how the model should be")
    parser.add_argument("--temperature", type=float, help="default: the model's")
    parser.add_argument("--max-tokens", type=int, help="of an answer (default: what the context leaves)")
    server_arguments(parser)


def _chat(arguments: argparse.Namespace, settings: Settings) -> int:
    flags = ("--model", arguments.model) if arguments.model else ()
    show_passing("Looking for Fireside")
    with any_server(arguments, settings, *flags) as server:
        talk = Talk(server, arguments)
        message = arguments.message or ("" if sys.stdin.isatty() else sys.stdin.read())
        if message:
            show_passing("")
            talk.say(message)
            return 0
        if not sys.stdin.isatty():
            return 0
        return _converse(talk)


def _converse(talk: "Talk") -> int:
    with suppress(ImportError):  # not on Windows: there the console has its own line editing
        import readline  # noqa: F401  `input` then keeps the lines typed before

    talk.greet()
    while (typed := _typed()) is not None:
        try:
            if not talk.obey(typed):
                return 0
        except AppError as error:
            print(error.text, file=sys.stderr)
    print()
    return 0


def _typed() -> str | None:
    """A message, of one line or more; None at the end. Ctrl-C begins it anew."""
    lines: list[str] = []
    while True:
        try:
            line = input("  " if lines else "> ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()
            lines = []
            continue
        if not line.endswith("\\"):
            return "\n".join([*lines, line]).strip()
        lines.append(line[:-1])


class Talk:
    """A conversation: what was said, with whom, and how."""

    def __init__(self, server: Server, arguments: argparse.Namespace) -> None:
        self._server = server
        self._model, self._system = arguments.model, arguments.system
        options = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
        self._options = {name: value for name, value in options.items() if value is not None}
        self._turns: list[dict[str, str]] = []

    def greet(self) -> None:
        """Wait for the model in hand, and name it."""
        name = self._model
        if not name and self._server.get("/health")["state"] != "empty":  # the first message loads it then
            try:
                name = self._server.until_loaded(show_passing)
            finally:
                show_passing("")
        print(f"{name or 'Fireside'} at {self._server.url}. /help lists what you can type, /exit ends.")

    def obey(self, typed: str) -> bool:
        """A command or a message. False: it was the last."""
        word, _, rest = typed.partition(" ")
        if word in ("/exit", "/quit"):
            return False
        commands: dict[str, Callable[[str], None]] = {
            "/new": lambda rest: self._turns.clear(),
            "/undo": lambda rest: self._undo(),
            "/system": self._be,
            "/model": self._choose,
            "/help": lambda rest: print(_HELP),
        }
        if word in commands:
            commands[word](rest.strip())
        elif word.startswith("/") and word[1:].isalpha():
            print(f"There is no {word}; /help lists what there is.", file=sys.stderr)
        elif typed:
            self.say(typed)
        return True

    def say(self, message: str) -> None:
        """Print the answer as it comes. Ctrl-C stops it; what came is kept. Raises AppError: then nothing is."""
        asked = [*self._turns, {"role": "user", "content": message}]
        before = [{"role": "system", "content": self._system}] if self._system else []
        body = {"model": self._model, "messages": [*before, *asked], "stream": True, **self._options}
        body["stream_options"] = {"include_usage": True}
        answer = ""
        printed = _Printed()
        with closing(self._server.stream("/v1/chat/completions", body)) as chunks:
            try:
                for text in printed.each(chunks):
                    answer += text
            except KeyboardInterrupt:
                print("\nStopped.", file=sys.stderr)
        printed.end()
        self._turns = [*asked, {"role": "assistant", "content": answer}]

    def _undo(self) -> None:
        self._turns = self._turns[:-2]

    def _be(self, system: str) -> None:
        self._system = system

    def _choose(self, name: str) -> None:
        if name:
            found = self._server.get(f"/v1/models/{name}")
            self._model = found["id"]
        print(self._model or self._server.get("/health")["model"] or "No model is in hand.")


class _Printed:
    """An answer on its way to the screen: its thinking pale, and how fast it was."""

    def __init__(self) -> None:
        self._is_pale = False
        self._figures = ""

    def each(self, chunks: Iterator[dict[str, Any]]) -> Iterator[str]:
        """The pieces of the answer itself, each printed."""
        for chunk in chunks:
            timings = chunk.get("timings") or {}
            if timings.get("predicted_per_second"):
                self._figures = f"{timings['predicted_n']} tokens, {timings['predicted_per_second']:.1f} a second"
            for choice in chunk["choices"]:
                delta = choice["delta"]
                self._print(delta.get("reasoning_content") or "", is_pale=True)
                text = delta.get("content") or ""
                self._print(text, is_pale=False)
                if text:
                    yield text

    def _print(self, text: str, *, is_pale: bool) -> None:
        if not text:
            return
        if is_pale != self._is_pale and sys.stdout.isatty():
            print("\033[2m" if is_pale else "\033[0m\n", end="")
        self._is_pale = is_pale
        if not is_pale or sys.stdout.isatty():  # a pipe gets the answer alone
            print(text, end="", flush=True)

    def end(self) -> None:
        is_seen = sys.stdout.isatty()
        print("\033[0m" if is_seen else "")
        if is_seen and self._figures:
            print(f"\033[2m{self._figures}\033[0m")


COMMANDS = (Command("chat", "a conversation in the terminal", _chat, _arguments),)
