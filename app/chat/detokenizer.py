"""Token ids of one answer -> its text, piece by piece. Holds back half characters and what may become a stop string.

However the text is cut into pieces, their sum is the same; nothing that was given out has to be taken back.
"""

import codecs
from collections.abc import Container, Sequence

from app.chat.tokenizer import Tokenizer


class Detokenizer:
    """
    stops        strings that end the answer; what follows is never given out
    min_tokens   in the text of so many first tokens no stop string is looked for
    keeps_stop   the stop string itself is given out
    shown        control tokens that are text all the same; None for all of them
    stopped_by   the stop string that was found
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        keeps_stop: bool = False,
        shown: Container[int] | None = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._unstoppable = min_tokens
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(stops, keeps=keeps_stop)

    @property
    def stopped_by(self) -> str | None:
        return self._stops.found

    def feed(self, token_id: int) -> str:
        """The text that is certain with this token; control tokens have none, unless they are shown."""
        self._unstoppable -= 1
        if self._tokenizer.is_special(token_id) and self._shown is not None and token_id not in self._shown:
            return ""
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        return text if self._unstoppable >= 0 else self._stops.feed(text)

    def finish(self, *, is_cut: bool = False) -> str:
        """What was held back, now that nothing follows. Half a character becomes U+FFFD, as in a whole decode.

        is_cut   a limit ended the answer, where the model would have gone on: half a character is no text then. vLLM
                 leaves it out too; who has the answer continued would otherwise have the mark in the middle of it.
        """
        end = "" if is_cut else self._stops.feed(self._utf8.decode(b"", final=True))
        return end + self._stops.finish()


class StopStrings:
    """Cuts a text before the first stop string: the one that is complete first, the longest if several are.

    keeps   cut after it instead
    found   the stop string that was met
    """

    def __init__(self, stops: Sequence[str], *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        match = self._first_match()
        if match is None:
            return self._release(len(self._held) - self._live())
        start, self.found = match
        return self._release(start + (len(self.found) if self._keeps else 0))

    def finish(self) -> str:
        """The held text: no stop string came of it."""
        return "" if self.found is not None else self._release(len(self._held))

    def _first_match(self) -> tuple[int, str] | None:
        starts = ((self._held.find(stop), stop) for stop in self._stops)
        matches = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(matches)[1:] if matches else None

    def _live(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        most = min(self._longest - 1, len(self._held))
        if most < 1 or not any(stop[0] in self._held[-most:] for stop in self._stops):  # nearly always
            return 0
        ends = (self._held[-size:] for size in range(most, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)

    def _release(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        return text
