"""Text that arrives in pieces, read as if it were whole: a reader is a generator that yields where it needs more text.

So a format's parser is written straight down, and cannot depend on how the text was cut.
"""

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

_T = TypeVar("_T")

Steps = Generator[None, None, _T]  # `yield from` it; each yield waits for more text or for the end

_BLANKS = re.compile(r"\s*")


class Source:
    """What has come and was not taken yet. `is_over`: nothing follows."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self.is_over = False

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def rest(self) -> str:
        return self._text[self._at :]

    def take(self, size: int) -> str:
        taken = self._text[self._at : self._at + size]
        self._at += len(taken)
        return taken

    def put_back(self, text: str) -> None:
        """Taken text that turned out to be something else."""
        self.add("")
        self._text = text + self._text

    def more(self) -> Steps[bool]:
        """Wait for more text; False at the end."""
        if self.is_over:
            return False
        yield
        return True

    def look(self, size: int) -> Steps[str]:
        """The next `size` characters, which stay; fewer at the end only."""
        while len(self._text) - self._at < size and (yield from self.more()):
            pass
        return self._text[self._at : self._at + size]

    def blanks(self) -> Steps[str]:
        """Take the blanks that come next."""
        taken = ""
        while True:
            match = _BLANKS.match(self._text, self._at)
            assert match is not None
            taken += self.take(match.end() - self._at)
            if self.rest or not (yield from self.more()):
                return taken

    def has(self, text: str) -> Steps[bool]:
        """Whether `text` comes next. Waits no longer than it still may."""
        while True:
            seen = self._text[self._at : self._at + len(text)]
            if not text.startswith(seen) or len(seen) == len(text):
                return seen == text
            if not (yield from self.more()):
                return False

    def skip(self, text: str) -> Steps[bool]:
        """Take `text` if it comes next."""
        comes = yield from self.has(text)
        if comes:
            self.take(len(text))
        return comes


def live_size(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of `text` with which one of `tags` begins, without being whole."""
    most = min(max(map(len, tags), default=0) - 1, len(text))
    if most < 1 or not any(tag[0] in text[-most:] for tag in tags):  # nearly always: no tag can have begun
        return 0
    ends = (text[-size:] for size in range(most, 0, -1))
    return next((len(end) for end in ends if any(tag.startswith(end) for tag in tags)), 0)


def first_of(text: str, tags: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of `tags` stands in `text`, and which; the longest where two begin at one place."""
    found = [(text.find(tag), -len(tag), tag) for tag in tags if tag in text]
    return (min(found)[0], min(found)[2]) if found else None
