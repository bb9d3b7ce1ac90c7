"""The page's words: every language has every key, with the same names to fill in, and the modules use no other."""

import re
from pathlib import Path

STATIC = Path(__file__).parents[3] / "app" / "ui" / "static"
_ENTRY = re.compile(r'^ {2}"([\w.]+)": "((?:[^"\\]|\\.)*)",$', re.MULTILINE)
_USED = re.compile(r'\bt\("([\w.]+)"|data-t(?:-label)?="([\w.]+)"')


def _words(language: str) -> dict[str, str]:
    files = sorted((STATIC / "words").glob(f"{language}*.js"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    found = _ENTRY.findall(text)
    lines = [line for line in text.splitlines() if line.startswith('  "')]
    assert len(lines) == len(found) == len(dict(found)), f"{language}: a line that is no entry, or a key twice"
    return dict(found)


def test_every_language_has_every_key_with_the_same_names_in_it() -> None:
    english, chinese = _words("en"), _words("zh")
    assert english.keys() == chinese.keys()
    for key, words in english.items():
        assert sorted(re.findall(r"\{\w+\}", words)) == sorted(re.findall(r"\{\w+\}", chinese[key])), key


def test_every_key_that_is_asked_for_is_there() -> None:
    files = [*STATIC.glob("*.js"), *STATIC.parent.glob("*.html")]
    used = {key for path in files for pair in _USED.findall(path.read_text(encoding="utf-8")) for key in pair if key}
    assert used and used - _words("en").keys() == set()
