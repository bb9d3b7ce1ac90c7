"""Client x version x feature: what the tests of this folder prove, for the end of a run and for docs/clients.md.

    python -m tests.clients.table    # writes the table into docs/clients.md

A test says what it proves by a mark, `@pytest.mark.proves("stream", "usage")`, and its module whose, by `CLIENT`.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
DOCS = _ROOT / "docs" / "clients.md"
_BEGIN, _END = "<!-- the table: python -m tests.clients.table -->", "<!-- end of the table -->"

_PROOFS = "proofs"

FEATURES = {
    "chat": "chat",
    "stream": "stream",
    "usage": "usage",
    "stop": "stop",
    "unicode": "unicode",
    "models": "models",
    "tools": "tools",
    "tool_stream": "tool stream",
    "parallel": "parallel tools",
    "schema": "JSON schema",
    "reasoning": "reasoning",
    "logprobs": "logprobs",
    "completions": "completions",
    "embeddings": "embeddings",
    "tokens": "token count",
    "edits": "edits files",
    "errors": "errors",
    "abort": "abort",
    "real": "real model",
}


@dataclass(frozen=True)
class Client:
    """
    name     as people call it
    package  as its registry calls it
    pins     the file that says its version: constraints.txt, node/package.json, requirements/*.txt
    """

    name: str
    package: str
    pins: str = "constraints.txt"

    @property
    def version(self) -> str:
        if self.pins.endswith(".json"):
            found: str = json.loads((_HERE / self.pins).read_text())["dependencies"][self.package]
            return found
        folder = _ROOT if self.pins == "constraints.txt" else _HERE
        match = re.search(rf"^{re.escape(self.package)}==(\S+)$", (folder / self.pins).read_text(), re.MULTILINE)
        if match is None:
            raise ValueError(f"{self.pins} has no line {self.package}==...: the version of {self.name} is unknown.")
        return match.group(1)


@dataclass(frozen=True)
class Proof:
    client: Client
    feature: str
    is_slow: bool


def proofs_of(item: pytest.Item) -> list[Proof]:
    """What a test proves. Raises ValueError for a feature that the table has no column for."""
    client = getattr(getattr(item, "module", None), "CLIENT", None)
    proofs = []
    for mark in item.iter_markers("proves"):
        for feature in mark.args:
            if client is None or feature not in FEATURES:
                raise ValueError(f"{item.nodeid} proves {feature!r} of {client}: no such cell of the table.")
            proofs.append(Proof(client, feature, item.get_closest_marker("slow") is not None))
    return proofs


def lay_beside(item: pytest.Item) -> None:
    """What a test proves, into its reports: they know no markers, and cross from process to process as plain data."""
    proofs = [(f"{proof.client.name} {proof.client.version}", proof.feature) for proof in proofs_of(item)]
    item.user_properties.append((_PROOFS, proofs))


def proofs_in(report: pytest.TestReport | pytest.CollectReport) -> Iterable[tuple[str, str]]:
    """Pairs of a client with its version and a feature; none in a report of another folder's test."""
    return dict(getattr(report, "user_properties", ())).get(_PROOFS, ())


@dataclass
class Outcomes:
    """How the tests of a run ended, a cell each; the worst counts."""

    rows: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))

    _WORDS = {"passed": "ok", "skipped": "skipped", "failed": "FAILED", "error": "FAILED"}  # noqa: RUF012
    _ORDER = ("ok", "skipped", "FAILED")

    def add(self, proofs: Iterable[tuple[str, str]], kind: str) -> None:
        for client, feature in proofs:
            row, word = self.rows[client], self._WORDS[kind]
            row[feature] = max(row.get(feature, word), word, key=self._ORDER.index)

    def text(self) -> str:
        lines = []
        for client, row in sorted(self.rows.items(), key=lambda pair: pair[0].lower()):
            cells = ", ".join(f"{FEATURES[feature]} {row[feature]}" for feature in FEATURES if feature in row)
            lines.append(f"{client}: {cells}")
        return "\n".join(lines)


def markdown(proofs: Iterable[Proof]) -> str:
    """● in every run, ○ in the slow one."""
    rows: dict[Client, dict[str, str]] = defaultdict(dict)
    for proof in sorted(proofs, key=lambda proof: proof.is_slow):
        rows[proof.client].setdefault(proof.feature, "○" if proof.is_slow else "●")
    lines = [
        "| client | version | " + " | ".join(FEATURES.values()) + " |",
        "|---|---|" + ":-:|" * len(FEATURES),
    ]
    for client, row in sorted(rows.items(), key=lambda pair: pair[0].name.lower()):
        cells = " | ".join(row.get(feature, "") for feature in FEATURES)
        lines.append(f"| {client.name} | {client.version} | {cells} |")
    return "\n".join(lines)


class _Collector:
    def __init__(self) -> None:
        self.proofs: list[Proof] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.proofs = [proof for item in session.items for proof in proofs_of(item)]


def _collected() -> list[Proof]:
    collector = _Collector()
    code = pytest.main(["--collect-only", "-qq", "-m", "", "-p", "no:cacheprovider", str(_HERE)], plugins=[collector])
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"The tests of {_HERE.name} could not be collected.")
    return collector.proofs


def in_docs() -> str:
    """The table as docs/clients.md has it."""
    return DOCS.read_text(encoding="utf-8").split(_BEGIN)[1].split(_END)[0].strip()


def main() -> None:
    text = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(text.replace(in_docs(), markdown(_collected())), encoding="utf-8")


if __name__ == "__main__":
    main()
