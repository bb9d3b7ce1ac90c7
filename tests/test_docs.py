"""What the README and ARCHITECTURE.md say of flags and files is so."""

import re
from pathlib import Path

import pytest

from app import settings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def _flags_of_the_readme() -> dict[str, str]:
    """flag -> its default, from the table."""
    return dict(re.findall(r"^\| `(--[a-z-]+)` \| .+ \| (.+) \|$", README, flags=re.MULTILINE))


def test_the_readme_has_every_flag_and_no_other() -> None:
    flags = {"--no-browser" if row.name == "browser" else row.flag for row in settings.TABLE}
    assert set(_flags_of_the_readme()) == flags


@pytest.mark.parametrize("row", [row for row in settings.TABLE if not row.default_text], ids=lambda row: row.name)
def test_the_readmes_defaults_are_the_tables(row: settings.Setting) -> None:
    assert _flags_of_the_readme()[row.flag] == f"`{row.shown_default}`"


@pytest.mark.parametrize(
    "row",
    [row for row in settings.TABLE if row.name not in ("home", "browser") and row.default_text],
    ids=lambda row: row.name,
)
def test_the_readmes_words_for_a_default_are_those_of_help(row: settings.Setting) -> None:
    assert _flags_of_the_readme()[row.flag] == row.default_text


def test_every_file_of_the_product_has_its_place_in_the_architecture() -> None:
    files = [path for house in ("app", "engine", "kernels") for path in (ROOT / house).rglob("*.py")]
    named = [path for path in files if path.name != "__init__.py"]
    assert named
    assert [str(path.relative_to(ROOT)) for path in named if not re.search(rf"[`/]{path.name}`", ARCHITECTURE)] == []


def test_every_file_that_the_architecture_names_is_there() -> None:
    names = set(re.findall(r"([\w.]+\.(?:py|js|css|yaml))`", ARCHITECTURE))
    there = {path.name for house in ("app", "engine", "kernels", "tests") for path in (ROOT / house).rglob("*.*")}
    assert names - there - {path.name for path in ROOT.iterdir()} == set()


def test_links_lead_to_files() -> None:
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "ARCHITECTURE.md")}
    links = [target for text in texts.values() for target in re.findall(r"\]\(([\w./-]+)", text)]
    assert "docs/screenshot.png" in links
    assert [target for target in links if not (ROOT / target).exists()] == []


def test_the_architecture_stays_one_read() -> None:
    assert len(ARCHITECTURE.splitlines()) <= 120
