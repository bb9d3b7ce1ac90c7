"""The server's sentences in the page's languages: each that a page may show has its words in every table.

What the server says is found in its source: string literals of two words and more, {} for each value. The rooms that
only other clients and a terminal hear are left out, as are logs, assertions, SQL and what stands in `_NEVER_SHOWN`.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_WORDS = ROOT / "app" / "ui" / "static" / "words"
_ENTRY = re.compile(r'^  ("(?:[^"\\]|\\.)*"): ("(?:[^"\\]|\\.)*"),$')
_ROOMS = ("app/ui", "app/chat", "app/history", "app/models", "engine")
_API = ("guard", "key_list", "keys", "limits", "library", "loading", "memory", "body", "door", "errors")
_FILES = (
    "app/settings.py",
    "app/settings_table.py",
    "app/errors.py",
    "app/server.py",
    "app/startable.py",
    *(f"app/api/{name}.py" for name in _API),
)
_SILENT = (  # grammars, SQL, a socket's refusals, a terminal's commands and benches: nobody reads these on the page
    *("app/chat/tools", "app/history/rows.py", "app/history/schema.py", "app/history/search.py", "app/ui/live.py"),
    *("app/models/fetch.py", "app/models/quantize.py", "app/models/quantize_job.py", "app/ui/page.py"),
    *("engine/bench", "engine/perplexity.py", "engine/sampling/bench.py", "engine/scheduler.py"),
)
_NO_SENTENCE = re.compile(r"\s*(SELECT|UPDATE|INSERT|DELETE|PRAGMA|BEGIN|WITH|CREATE)\b|.*\bWHERE\b|\n +\w")
_LOGS = ("debug", "info")  # warnings and errors are shown by the Monitor


def _sources() -> Iterator[Path]:
    for room in _ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))
    yield from (ROOT / name for name in _FILES)


def _template(node: ast.AST, values: list[ast.AST]) -> str | None:
    """As a table writes it: {} for each value, which go into `values`; None for what is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_piece(part, values) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _is_text(node):
        return _piece(node.left, values) + _piece(node.right, values)
    return None


def _piece(node: ast.AST, values: list[ast.AST]) -> str:
    text = _template(node, values)
    if text is None:
        values.append(node)
    return "{}" if text is None else text


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_quiet(node: ast.AST) -> bool:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    is_log = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOGS
    return is_docstring or is_log or isinstance(node, ast.Assert)


def _said(node: ast.AST) -> Iterator[str]:
    """Every text within, and those within the values of texts."""
    if _is_quiet(node):
        return
    values: list[ast.AST] = []
    text = _template(node, values)
    if text is not None:
        yield text
    else:
        for name, part in ast.iter_fields(node):
            if name not in ("annotation", "returns"):
                values += [each for each in (part if isinstance(part, list) else [part]) if isinstance(each, ast.AST)]
    for value in values:
        yield from _said(value)


def _sentences() -> dict[str, str]:
    """Template -> the file that says it."""
    found: dict[str, str] = {}
    for path in _sources():
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(_SILENT):
            for text in _said(ast.parse(path.read_text(encoding="utf-8"))):
                words = re.sub(r"%(\.\d)?[sdfr]", "{}", text)
                if _is_sentence(words):
                    found[words] = name
    return found


def _is_sentence(words: str) -> bool:
    has_words = len(re.findall(r"[A-Za-z]{2,}", words)) > 1 and " " in words.strip()
    return has_words and not _NO_SENTENCE.match(words)


def _table(language: str) -> dict[str, str]:
    entries = []
    for path in sorted(_WORDS.glob(f"server_{language}_*.js")):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith('  "')]
        matches = [_ENTRY.match(line) for line in lines]
        assert all(matches), f"{path.name}: a line that is no entry"
        entries += [(json.loads(match[1]), json.loads(match[2])) for match in matches if match]
    twice = {english for english, _ in entries if sum(english == other for other, _ in entries) > 1}
    assert not twice, twice
    return dict(entries)


@pytest.mark.parametrize("language", ["zh"])
def test_every_sentence_of_the_server_has_its_words(language: str) -> None:
    table, said = _table(language), _sentences()
    missing = {words: name for words, name in said.items() if words not in table and words not in _NEVER_SHOWN}
    told = "\n".join(f"{name}: {words!r}" for words, name in missing.items())
    assert not missing, f"Give these a line in app/ui/static/words/server_{language}_*.js:\n{told}"


@pytest.mark.parametrize("language", ["zh"])
def test_every_value_of_a_sentence_is_in_its_words(language: str) -> None:
    for english, words in _table(language).items():
        values = {str(at) for at in range(english.count("{}"))}
        assert set(re.findall(r"\{(\d+)\}", words)) == values, english


def test_what_is_never_shown_is_still_said() -> None:
    assert _NEVER_SHOWN - _sentences().keys() == set()


_NEVER_SHOWN = frozenset(
    {
        "New chat",
        "Open WebUI",
        "File is not a zip file",
        "`python launch.py models --help` lists the commands for models. `python launch.py test [pytest arguments]` "
        "installs the development set and runs the tests. Each flag has an environment name (FIRESIDE_PORT for --port) "
        "and a key in settings.yaml in the home folder (port).",
        "{}\nThe page is at {}; the next message there tries again. To take another model: Ctrl-C, then start with "
        "--model.",
        "text/markdown; charset=utf-8",
        "attachment; filename=\"{}\"; filename*=UTF-8''{}",
        "%(asctime)s %(levelname)s %(name)s: %(message)s",
        "# Fireside's settings; `python launch.py --help` lists them.\n",
        "no token",
        "first after {} ms",
        "request {}: {}{}; model {}, prompt {} tokens ({} cached), answer {}, {}, {} s in all",
        "## (System|User|Thinking|Assistant|File: .+)$",
        "too large",
        "downloader's lines",
        "look after models",
        "# Your own models, written as in Fireside's models.yaml.\n",
        "The engine stopped after a fault of its own.",
        "Request {} has parameters that cannot be read.",
        "vocab size too small",
        "(@answer | @other)",
        "start: ({} blanks?)? @answer",
        "start: {} blanks? @answer",
        "{}\nfree{}: /(?s:.*)/\nblanks: /[ \\n]{1,4}/",
        '{"type": "object"}',
        "start: CHOICE\nCHOICE: {}",
        "Application Support",
        "{}. `python launch.py --help` lists what there is.",
        "4-bit language models on your own machine, as a browser chat and an OpenAI-style endpoint.",
        "Fireside is starting at {} (Ctrl-C ends it).",
        "Fireside is ready: {}  ({}, {} tokens of context)",
        "python -m app.api.keys",
        "Keys for Fireside's API.",
        "The engine {} {}",
        "make a key; its words are shown this once",
        "who it is for: logs and limits go by this name",
        "it may load and unload models too",
        "default: %(default)s",
        "Only its hash is kept, in {}. A running Fireside knows it after a restart.",
        "a catalogue id or a repository (owner/name)",
        "fetch or make again what is damaged or missing, and only that",
        "a repository (owner/name) or a folder",
        "the name it is to have here",
        "of the hub; null forgets the one that is kept",
        "What has come stays",
        "A paused or failed download goes on",
        "Nothing of it stays",
        "must be a whole number from 1 to {}; got {}.",
        "The body is packed as {}.",
        "Send it as plain JSON.",
        "GET, POST, DELETE, OPTIONS",
        "Authorization, Content-Type, api-key, x-api-key, anthropic-version, x-request-id",
        "X-Request-Id, Retry-After, x-should-retry, {}",
        "request {}: {} {} failed",
    }
)
