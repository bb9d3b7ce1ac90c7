"""What the README and ARCHITECTURE.md say of flags and files is so."""

import re
from collections.abc import Iterator
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
    flags = {row.flag for row in settings.TABLE}
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


def _files_of_the_architecture() -> Iterator[str]:
    """Paths in the table of rooms: `api/chat.py` `models.py` in one row stand for two files of that folder."""
    house = ""
    for row in re.findall(r"^\| (.+?) \|", ARCHITECTURE.split("## One message's way")[0], flags=re.MULTILINE):
        if entered := re.match(r"\*\*`(\w+/)`\*\*$", row):
            house = entered.group(1)
        folder = ""
        for path in re.findall(r"`([\w/]+\.(?:py|js|css|yaml))`", row):
            folder = path[: path.rindex("/") + 1] if "/" in path else folder
            yield house + folder + path.rpartition("/")[2]


def test_the_architecture_places_every_file_of_the_product_and_no_other() -> None:
    found = [path.relative_to(ROOT) for house in ("app", "engine", "kernels") for path in (ROOT / house).rglob("*.*")]
    ours = [path for path in found if "vendor" not in path.parts and path.name != "__init__.py"]
    files = {path.as_posix() for path in ours if path.suffix in (".py", ".js", ".css")}
    assert set(_files_of_the_architecture()) == files | {"launch.py", "models.yaml"}


def test_links_lead_to_files() -> None:
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "ARCHITECTURE.md")}
    links = [target for text in texts.values() for target in re.findall(r"\]\(([\w./-]+)", text)]
    assert "docs/screenshot.png" in links
    assert [target for target in links if not (ROOT / target).exists()] == []


def test_the_architecture_stays_one_read() -> None:
    assert len(ARCHITECTURE.splitlines()) <= 120
