"""API keys: who may ask. Kept as hashes, in memory and in the key file; `python -m app.api.keys new NAME` makes one.

The hash is one SHA-256. A slow hash protects passwords, which can be guessed from a list; the keys in the file are
drawn here with 256 bits, which no list has, and each request would pay for the slowness.
"""

import argparse
import hashlib
import hmac
import os
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.settings import Settings, SettingsError, default_home

KEY_FILE = "api-keys"

_LINE = re.compile(r"([\w.-]{1,64})\s+(user|admin)\s+sha256:([0-9a-f]{64})", re.ASCII)
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its words. `name` is what logs and limits know it by."""

    name: str
    digest: bytes = field(repr=False)
    is_admin: bool = False


class Keyring:
    """The keys that are let in. Without any, nobody is asked for one."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self.take(keys)

    def take(self, keys: Sequence[ApiKey]) -> None:
        """These are let in from now on, and no others."""
        self._keys = tuple(sorted(keys, key=lambda key: key.is_admin))

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        return self._keys

    @property
    def has_admin(self) -> bool:
        return any(key.is_admin for key in self._keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, words: str) -> ApiKey | None:
        """The key that is written so. Each is compared to its end, so that time tells nothing."""
        digest = digest_of(words)
        found = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        return found[-1] if found else None  # admin keys are last: who is both is an admin

    def named(self, name: str) -> ApiKey | None:
        return next((key for key in reversed(self._keys) if key.name == name), None)

    @classmethod
    def of(cls, settings: Settings) -> "Keyring":
        """The keys of flags, environment and key file. Raises SettingsError for a file that cannot be read."""
        path = settings.key_file or settings.home / KEY_FILE
        in_file = read_key_file(path) if settings.key_file or path.is_file() else []
        users = [_given(text, f"key-{i}", is_admin=False) for i, text in enumerate(settings.api_key, 1)]
        admins = [_given(text, f"admin-{i}", is_admin=True) for i, text in enumerate(settings.admin_key, 1)]
        return cls([*in_file, *users, *admins])


def digest_of(words: str) -> bytes:
    return hashlib.sha256(words.encode("utf-8", "surrogatepass")).digest()


def read_key_file(path: Path) -> list[ApiKey]:
    """One key a line: its name, `user` or `admin`, its hash. Raises SettingsError with the place of a mistake."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise SettingsError(f"The key file {path} cannot be read: {why}.", "key_file") from None
    keys = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise SettingsError(
                f"{path}:{number} is no line of a key file (NAME user|admin sha256:HEX). "
                "Make keys with `python -m app.api.keys new NAME`."
            )
        keys.append(ApiKey(found[1], bytes.fromhex(found[3]), found[2] == "admin"))
    return keys


def add_key(path: Path, name: str, *, is_admin: bool) -> str:
    """Draw a key, append its hash to the file, which its owner alone may read, and return its words.

    Raises SettingsError where the name is taken or the file cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise SettingsError(
            f"{name!r} is no name for a key: letters, digits, dots, dashes and underscores, 64 at most."
        )
    if path.is_file() and any(key.name == name for key in read_key_file(path)):
        raise SettingsError(f"{path} has a key `{name}` already. Delete its line first, or choose another name.")
    words = f"fs-{secrets.token_urlsafe(32)}"
    line = f"{name} {'admin' if is_admin else 'user'} sha256:{digest_of(words).hex()}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise SettingsError(f"The key file {path} cannot be written: {error.strerror}.") from None
    return words


def remove_key(path: Path, name: str) -> None:
    """Take a key out of the file; the other lines stay as they are. Raises SettingsError where it is not there."""
    if not path.is_file() or all(key.name != name for key in read_key_file(path)):
        raise SettingsError(f"{path} has no key `{name}`.")
    lines = path.read_text("utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.startswith("#") or line.split(maxsplit=1)[:1] != [name]]
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write("".join(kept))
        fresh.replace(path)
    except OSError as error:
        raise SettingsError(f"The key file {path} cannot be written: {error.strerror}.") from None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m app.api.keys", description="Keys for Fireside's API.")
    ways = parser.add_subparsers(dest="way", required=True)
    new = ways.add_parser("new", help="make a key; its words are shown this once")
    new.add_argument("name", help="who it is for: logs and limits go by this name")
    new.add_argument("--admin", action="store_true", help="it may load and unload models too")
    home = Path(os.environ.get("FIRESIDE_HOME") or default_home())
    new.add_argument("--key-file", type=Path, default=home / KEY_FILE, help="default: %(default)s")
    asked = parser.parse_args(argv)
    try:
        words = add_key(asked.key_file, asked.name, is_admin=asked.admin)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    print(words)
    print(f"Only its hash is kept, in {asked.key_file}. A running Fireside knows it after a restart.", file=sys.stderr)
    return 0


def _given(text: str, spare_name: str, *, is_admin: bool) -> ApiKey:
    """KEY or NAME:KEY, as settings have checked it."""
    name, mark, words = text.partition(":")
    return ApiKey(name, digest_of(words), is_admin) if mark else ApiKey(spare_name, digest_of(text), is_admin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
