"""What a setting is, and how each kind of value is read: from a flag, from the environment (text) or from YAML (typed).

Standard library alone: launch.py reads the flags before there is an environment to import from.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


class SettingsError(Exception):
    """A setting that cannot be used: its source, its key, its value and what is allowed.

    setting   the key at fault, where its source is still to be told (`settings.with_source`)
    """

    def __init__(self, text: str, setting: str = "") -> None:
        super().__init__(text)
        self.setting = setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table.

    read          a value from a flag, the environment (text) or YAML (typed) -> the value; raises ValueError
    allowed       completes "it must be ..."
    default_text  what --help shows where the default is no plain value
    applies       when another value holds: at the next start, at the next load of a model, or now
    choices       the words that it may be, where they are few
    takes         a value, a list (the flag may come several times), or nothing: the flag alone turns it on
    is_secret     neither shown nor read from settings.yaml, which would keep it in plain words
    """

    name: str
    default: Any
    read: Callable[[object], Any]
    allowed: str
    help: str
    default_text: str = ""
    takes: Literal["value", "list", "nothing"] = "value"
    applies: Literal["start", "load", "now"] = "start"
    choices: tuple[str, ...] = ()
    is_secret: bool = False

    @property
    def flag(self) -> str:
        """A switch that is on has a flag to turn it off."""
        return ("--no-" if self.default is True else "--") + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return "FIRESIDE_" + self.name.upper()

    @property
    def shown_default(self) -> str:
        """A number as it is shown where it was set."""
        return self.default_text or (f"{self.default:g}" if isinstance(self.default, float) else str(self.default))

    def value(self, raw: object, source: str) -> Any:
        try:
            return self.read(raw)
        except (ValueError, LookupError):
            words = ", ".join(map(str, raw)) if isinstance(raw, list | tuple) and raw else str(raw)
            shown = "not usable" if self.is_secret else repr(words)
            raise SettingsError(f"{source} is {shown}; it must be {self.allowed}.") from None


# --- readers: each raises ValueError or LookupError for what it does not take


def text(raw: object) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError
    return raw.strip()


def folder(raw: object) -> Path:
    try:
        return Path(text(raw)).expanduser().absolute()
    except RuntimeError as error:  # ~name of nobody
        raise ValueError from error


def switch(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}[
        str(raw).strip().lower()
    ]


def whole(low: int, high: int) -> Callable[[object], int]:
    def read(raw: object) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise ValueError
        found = int(raw)
        if not low <= found <= high:
            raise ValueError
        return found

    return read


def number(above: float, at_most: float) -> Callable[[object], float]:
    def read(raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise ValueError
        found = float(raw)
        if not above < found <= at_most:
            raise ValueError
        return found

    return read


def choice(*words: str) -> Callable[[object], str]:
    def read(raw: object) -> str:
        word = text(raw).lower()
        if word not in words:
            raise ValueError
        return word

    return read


def many(one: Callable[[object], Any]) -> Callable[[object], tuple[Any, ...]]:
    """A list of values; in the environment they stand in one line, with commas between them."""

    def read(raw: object) -> tuple[Any, ...]:
        items = [part for part in raw.split(",") if part.strip()] if isinstance(raw, str) else raw
        if not isinstance(items, list | tuple):
            raise ValueError
        return tuple(one(item) for item in items)

    return read


_HOST = re.compile(r"[\w.-]+|\[?[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?\]?|\*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,]+|\*", re.ASCII)


def host(raw: object) -> str:
    """A name or an address alone: no scheme, no path; a port goes with none of our settings."""
    if not _HOST.fullmatch(text(raw)):
        raise ValueError
    return text(raw)


def listening(raw: object) -> str:
    """As `host`, but one alone."""
    if host(raw) == "*":
        raise ValueError
    return host(raw)


def origin(raw: object) -> str:
    """As a browser sends it: small letters, no path; a slash at its end is what one copies along from an address."""
    found = text(raw).lower().removesuffix("/")
    if not _ORIGIN.fullmatch(found):
        raise ValueError
    return found


_KEY = re.compile(r"(?:[\w.-]{1,64}:)?[!-+\--9;-~]{8,512}", re.ASCII)


def key(raw: object) -> str:
    """A key, or a name and a key: what an HTTP header can carry, without commas and colons."""
    if not _KEY.fullmatch(text(raw)):
        raise ValueError
    return text(raw)


def keys(raw: object) -> tuple[str, ...]:
    """A key `none` is none: editors read the same variable, and some want a word in it where no key is asked."""
    return tuple(key(word) for word in many(text)(raw) if word.lower() != "none")


def alias(raw: object) -> tuple[str, str]:
    name, _, model = text(raw).partition("=")
    return text(name), text(model)
