"""What a person may set: one table of settings drives --help, the environment names, settings.yaml and every check.

Order: flag > environment > settings.yaml in the home folder > default; each value remembers where it came from.
Standard library alone at import, since launch.py reads the flags before there is an environment to import from.
"""

import argparse
import difflib
import math
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

SETTINGS_FILE = "settings.yaml"


class SettingsError(Exception):
    """A setting that cannot be used: its source, its key, its value and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """
    model                   catalogue id, Hugging Face repository (owner/name) or folder
    host, port              where the page and the endpoint listen; port 0 takes a free one
    home                    folder of models, settings.yaml and everything else that Fireside keeps
    browser                 open the page when it is up
    max_model_len ... kv_gb as in `engine.config.EngineConfig`; None leaves the choice to the engine
    api_key, admin_key      as they were given, each maybe with a name before it ("laptop:abc..."); they never get into
                            a file or a log
    key_file                of hashed keys (app.api.keys); None takes <home>/api-keys where that is there
    allow_no_key            serve other machines without any key
    allowed_host            names beside this machine's own under which the server may be asked
    allowed_origin          web pages elsewhere that may call; "*" for all
    requests_per_minute ... of each key; None is no limit
    ssl_certfile ...        HTTPS with this certificate, or with one that Fireside makes
    model_alias             further names of models: (name, what --model takes)
    model_fallback          an unknown name in a request means the model in hand
    load_on_request         a request that names a model which is not loaded has it loaded
    max_models              that are in memory at once
    idle_timeout            seconds after which a model that nobody uses is let go of; None keeps it
    drain_timeout           seconds that answers of a model may go on which another one is to take the place of
    step_timeout            seconds without the end of a step after which an engine counts as hung
    load_timeout            seconds without a word of an engine that loads
    sources                 for each of the above, where its value came from ("flag --port", "default", ...)
    """

    model: str
    host: str
    port: int
    home: Path
    browser: bool
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    gpu_memory_utilization: float
    gpu_memory_gb: float | None
    kv_cache_dtype: str
    keep_packed: bool
    quantize_lm_head: str
    kv_gb: float | None
    api_key: tuple[str, ...] = field(repr=False)
    admin_key: tuple[str, ...] = field(repr=False)
    key_file: Path | None
    allow_no_key: bool
    allowed_host: tuple[str, ...]
    allowed_origin: tuple[str, ...]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    ssl_certfile: Path | None
    ssl_keyfile: Path | None
    ssl_self_signed: bool
    model_alias: tuple[tuple[str, str], ...]
    model_fallback: bool
    load_on_request: bool
    max_models: int
    idle_timeout: float | None
    drain_timeout: float
    step_timeout: float | None
    load_timeout: float
    log_level: str
    sources: Mapping[str, str]

    @property
    def models_folder(self) -> Path:
        return self.home / "models"

    @property
    def is_https(self) -> bool:
        return self.ssl_self_signed or self.ssl_certfile is not None


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
        return self.default_text or str(self.default)

    def value(self, raw: object, source: str) -> Any:
        try:
            return self.read(raw)
        except (ValueError, LookupError):
            shown = "not usable" if self.is_secret else repr(str(raw))
            raise SettingsError(f"{source} is {shown}; it must be {self.allowed}.") from None


def version() -> str:
    """The version of Fireside, from pyproject.toml, which is its only place."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def default_home() -> Path:
    """The platform's folder for a user's data, with the name of this app."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "Fireside"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "Fireside"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "fireside"


def _text(raw: object) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError
    return raw.strip()


def _folder(raw: object) -> Path:
    return Path(_text(raw)).expanduser().absolute()


def _switch(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}[
        str(raw).strip().lower()
    ]


def _whole(low: int, high: int | None = None) -> Callable[[object], int]:
    def read(raw: object) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise ValueError
        number = int(raw)
        if number < low or (high is not None and number > high):
            raise ValueError
        return number

    return read


def _number(above: float, at_most: float = float("inf")) -> Callable[[object], float]:
    def read(raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise ValueError
        number = float(raw)
        if not above < number <= at_most or math.isinf(number):
            raise ValueError
        return number

    return read


def _choice(*words: str) -> Callable[[object], str]:
    def read(raw: object) -> str:
        word = _text(raw).lower()
        if word not in words:
            raise ValueError
        return word

    return read


def _many(one: Callable[[object], Any]) -> Callable[[object], tuple[Any, ...]]:
    """A list of values; in the environment they stand in one line, with commas between them."""

    def read(raw: object) -> tuple[Any, ...]:
        items = [part for part in raw.split(",") if part.strip()] if isinstance(raw, str) else raw
        if not isinstance(items, list | tuple):
            raise ValueError
        return tuple(one(item) for item in items)

    return read


_KEY = re.compile(r"(?:[\w.-]{1,64}:)?[!-+\--9;-~]{8,512}", re.ASCII)


def _key(raw: object) -> str:
    """A key, or a name and a key: what an HTTP header can carry, without commas and colons."""
    if not _KEY.fullmatch(_text(raw)):
        raise ValueError
    return _text(raw)


def _keys(raw: object) -> tuple[str, ...]:
    """A key `none` is none: editors read the same variable, and some want a word in it where no key is asked."""
    return tuple(key for key in _many(_text)(raw) if key.lower() != "none" and _key(key))


def _alias(raw: object) -> tuple[str, str]:
    name, _, model = _text(raw).partition("=")
    return _text(name), _text(model)


KV_CACHE_DTYPES = ("auto", "fp32", "fp16", "bf16", "int8")
_LOG_LEVELS = ("debug", "info", "warning", "error")

TABLE: tuple[Setting, ...] = (
    Setting(
        name="model",
        default="smollm2-135m-instruct",
        read=_text,
        allowed="a catalogue id, a Hugging Face repository (owner/name) or a folder",
        help="model to load: a catalogue id, a Hugging Face repository (owner/name) or a folder",
    ),
    Setting(
        name="host",
        default="127.0.0.1",
        read=_text,
        allowed="a host name or an address of this machine",
        help="address to listen on; 0.0.0.0 lets other machines in",
    ),
    Setting(
        name="port",
        default=8000,
        read=_whole(0, 65535),
        allowed="a whole number from 0 to 65535 (0 takes a free port)",
        help="port of the page and of the endpoint; 0 takes a free one",
    ),
    Setting(
        name="home",
        default=None,
        read=_folder,
        allowed="a folder",
        help="folder of models and settings.yaml",
        default_text=str(default_home()),
    ),
    Setting(
        name="browser",
        default=True,
        read=_switch,
        allowed="true or false",
        help="do not open the page in a browser",
        default_text="the browser is opened",
        takes="nothing",
    ),
    Setting(
        name="max_model_len",
        applies="load",
        default=None,
        read=_whole(1),
        allowed="a whole number of tokens, 1 or more",
        help="tokens that a conversation may hold, prompt and answer together",
        default_text="the model's context, or what fits in memory",
    ),
    Setting(
        name="max_num_seqs",
        applies="load",
        default=32,
        read=_whole(1),
        allowed="a whole number, 1 or more",
        help="requests computed at once; more wait in line",
    ),
    Setting(
        name="max_num_batched_tokens",
        applies="load",
        default=None,
        read=_whole(1),
        allowed="a whole number of tokens, 1 or more",
        help="tokens computed in one step at most",
        default_text="512 on a CPU, 2048 on a GPU, 8192 on one of 40 GB",
    ),
    Setting(
        name="gpu_memory_utilization",
        applies="load",
        default=0.90,
        read=_number(0.0, 1.0),
        allowed="a number above 0 and at most 1",
        help="share of the GPU's memory that may be used",
    ),
    Setting(
        name="gpu_memory_gb",
        applies="load",
        default=None,
        read=_number(0.0),
        allowed="a number of GB above 0",
        help="act as a GPU with so many GB (24 for a 3090 or 4090)",
        default_text="all that the card has",
    ),
    Setting(
        name="kv_cache_dtype",
        applies="load",
        default="auto",
        read=_choice(*KV_CACHE_DTYPES),
        choices=KV_CACHE_DTYPES,
        allowed="one of " + ", ".join(KV_CACHE_DTYPES),
        help=f"type of the KV cache: {', '.join(KV_CACHE_DTYPES)}",
    ),
    Setting(
        name="keep_packed",
        applies="load",
        default=True,
        read=_switch,
        allowed="true or false",
        help="do not keep 4-bit weights beside a model as the card holds them: saves disk, each load takes longer",
        default_text="kept",
        takes="nothing",
    ),
    Setting(
        name="quantize_lm_head",
        applies="load",
        default="auto",
        read=_choice("auto", "on", "off"),
        choices=("auto", "on", "off"),
        allowed="one of auto, on, off",
        help="hold the output layer in 8 bits; auto does so with 4-bit models on a GPU",
    ),
    Setting(
        name="kv_gb",
        applies="load",
        default=None,
        read=_number(0.0),
        allowed="a number of GB above 0",
        help="size of the KV cache, in GB",
        default_text="what is left; on a CPU a quarter of free memory, at most 4",
    ),
    Setting(
        name="api_key",
        default=(),
        read=_keys,
        allowed="KEY or NAME:KEY, the key 8 to 512 printable characters without blank, comma and colon",
        help="a key that requests must bring, KEY or NAME:KEY; may be given several times",
        default_text="no key is asked",
        takes="list",
        is_secret=True,
    ),
    Setting(
        name="admin_key",
        default=(),
        read=_keys,
        allowed="KEY or NAME:KEY, the key 8 to 512 printable characters without blank, comma and colon",
        help="a key that may also load and unload models; may be given several times",
        default_text="where there are keys, nobody may",
        takes="list",
        is_secret=True,
    ),
    Setting(
        name="key_file",
        default=None,
        read=_folder,
        allowed="a file",
        help="file of hashed keys, as `python -m app.api.keys` writes it",
        default_text="`api-keys` in the home folder, where it is there",
    ),
    Setting(
        name="allow_no_key",
        default=False,
        read=_switch,
        allowed="true or false",
        help="serve other machines without any key",
        default_text="refused",
        takes="nothing",
    ),
    Setting(
        name="allowed_host",
        default=(),
        read=_many(_text),
        allowed="a host name",
        help="another name under which the server may be asked; may be given several times",
        default_text="this machine's names and every IP address",
        takes="list",
    ),
    Setting(
        name="allowed_origin",
        default=(),
        read=_many(_text),
        allowed="an origin such as https://chat.example.org, or *",
        help="web pages elsewhere that may call, such as https://chat.example.org; may be given several times",
        default_text="pages of this machine",
        takes="list",
    ),
    Setting(
        name="requests_per_minute",
        default=None,
        read=_whole(1),
        allowed="a whole number, 1 or more",
        help="requests that each key may send in a minute",
        default_text="no limit",
    ),
    Setting(
        name="tokens_per_minute",
        default=None,
        read=_whole(1),
        allowed="a whole number of tokens, 1 or more",
        help="tokens, prompt and answer, that each key may use in a minute",
        default_text="no limit",
    ),
    Setting(
        name="ssl_certfile",
        default=None,
        read=_folder,
        allowed="a file",
        help="certificate (PEM) for HTTPS",
        default_text="plain HTTP",
    ),
    Setting(
        name="ssl_keyfile",
        default=None,
        read=_folder,
        allowed="a file",
        help="private key (PEM) of that certificate",
        default_text="in the certificate's file",
    ),
    Setting(
        name="ssl_self_signed",
        default=False,
        read=_switch,
        allowed="true or false",
        help="HTTPS with a certificate that Fireside makes and keeps in the home folder",
        default_text="plain HTTP",
        takes="nothing",
    ),
    Setting(
        name="model_alias",
        default=(),
        read=_many(_alias),
        allowed="NAME=MODEL",
        help="another name for a model in requests, NAME=MODEL; may be given several times",
        default_text="those of models.yaml",
        takes="list",
    ),
    Setting(
        name="model_fallback",
        applies="now",
        default=False,
        read=_switch,
        allowed="true or false",
        help="answer requests for an unknown model with the one in hand",
        default_text="refused with a 404",
        takes="nothing",
    ),
    Setting(
        name="load_on_request",
        applies="now",
        default=True,
        read=_switch,
        allowed="true or false",
        help="refuse requests for a model that is not loaded",
        default_text="a request loads the model that it names, if it is on this machine",
        takes="nothing",
    ),
    Setting(
        name="max_models",
        applies="now",
        default=3,
        read=_whole(1),
        allowed="a whole number, 1 or more",
        help="models in memory at once, where they fit; the one that was used longest ago makes room",
    ),
    Setting(
        name="idle_timeout",
        applies="now",
        default=None,
        read=_number(0.0),
        allowed="a number of seconds above 0",
        help="seconds after which a model that nobody uses gives its memory back; the next request loads it again",
        default_text="it stays",
    ),
    Setting(
        name="drain_timeout",
        applies="now",
        default=30.0,
        read=_number(math.nextafter(0.0, -1.0)),
        allowed="a number of seconds, 0 or more",
        help="seconds that answers may go on when another model needs their model's place",
    ),
    Setting(
        name="step_timeout",
        applies="now",
        default=None,
        read=_number(0.0),
        allowed="a number of seconds above 0",
        help="seconds without the end of a step after which an engine counts as hung and is started anew",
        default_text="600 on a CPU, 120 on a GPU",
    ),
    Setting(
        name="load_timeout",
        applies="load",
        default=600.0,
        read=_number(0.0),
        allowed="a number of seconds above 0",
        help="seconds without a word of an engine that loads after which it counts as hung and is started anew",
    ),
    Setting(
        name="log_level",
        default="info",
        read=_choice(*_LOG_LEVELS),
        choices=_LOG_LEVELS,
        allowed="one of " + ", ".join(_LOG_LEVELS),
        help=f"how much is logged: {', '.join(_LOG_LEVELS)}",
    ),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}. `python launch.py --help` lists what there is.")


def parser() -> argparse.ArgumentParser:
    """The flags, as text: they are checked in one place with the other sources."""
    made = _Parser(
        prog="launch.py",
        description="4-bit language models on your own machine, as a browser chat and an OpenAI-style endpoint.",
        epilog="`python launch.py models --help` lists the commands for models. "
        "`python launch.py test [pytest arguments]` installs the development set and runs the tests. Each flag "
        "has an environment name (FIRESIDE_PORT for --port) and a key in settings.yaml in the home folder (port).",
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=f"Fireside {version()}")
    for row in TABLE:
        text = f"{row.help} (default: {row.shown_default})".replace("%", "%%")
        if row.takes == "nothing":
            made.add_argument(
                row.flag, dest=row.name, action="store_const", const=str(not row.default).lower(), help=text
            )
        else:
            action = "append" if row.takes == "list" else "store"
            metavar = row.name.split("_")[-1].upper()
            made.add_argument(row.flag, dest=row.name, action=action, metavar=metavar, help=text)
    return made


def read_flags(argv: Sequence[str]) -> dict[str, Any]:
    """The settings given as flags, checked. Ends the process at --help and --version; raises SettingsError."""
    given = vars(parser().parse_args(argv))
    rows = (row for row in TABLE if given[row.name] is not None)
    return {row.name: row.value(given[row.name], row.flag) for row in rows}


def load(flags: Mapping[str, Any], env: Mapping[str, str]) -> Settings:
    """Settings from checked flags (`read_flags`), the environment and settings.yaml. Raises SettingsError."""
    rows = {row.name: row for row in TABLE}
    home = _pick(rows["home"], flags, env, {}, default_home())
    file_path = home[0] / SETTINGS_FILE
    in_file = _read_file(file_path)
    picked = {name: _pick(row, flags, env, in_file, row.default, file_path) for name, row in rows.items()}
    picked["home"] = home
    return Settings(
        **{name: value for name, (value, _) in picked.items()},
        sources={name: source for name, (_, source) in picked.items()},
    )


def make_home(home: Path) -> None:
    """Let the home folder be there, and see that it takes a file. Raises SettingsError."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        raise SettingsError(
            f"The home folder {home} cannot be written: {error.strerror}. Choose another with --home FOLDER."
        ) from None


def _pick(
    row: Setting,
    flags: Mapping[str, Any],
    env: Mapping[str, str],
    in_file: Mapping[str, object],
    default: Any,
    file_path: Path | None = None,
) -> tuple[Any, str]:
    """(value, source) of one setting. An empty environment variable and a YAML null count as not given."""
    if row.name in flags:
        return flags[row.name], f"flag {row.flag}"
    if env.get(row.env):
        return row.value(env[row.env], f"the environment's {row.env}"), f"environment {row.env}"
    if in_file.get(row.name) is not None:
        return row.value(in_file[row.name], f"`{row.name}` in {file_path}"), SETTINGS_FILE
    return default, "default"


def _read_file(path: Path) -> dict[str, object]:
    """The keys of settings.yaml; none where there is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):  # the latter is for `make_home` to tell
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}.") from None
    import yaml  # here, since launch.py imports this module before PyYAML is installed

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is no valid YAML: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SettingsError(f"{path} must be lines of `key: value`; it holds a {type(found).__name__}.")
    for key in found:
        _check_key(str(key), path)
    return {str(key): value for key, value in found.items()}


def _check_key(key: str, path: Path) -> None:
    known = [row.name for row in TABLE if row.name != "home" and not row.is_secret]
    if key == "home":
        raise SettingsError(f"{path} sets `home`, but lies in it. Use --home or FIRESIDE_HOME.")
    if key in (row.name for row in TABLE if row.is_secret):
        raise SettingsError(
            f"{path} has `{key}`; a key is not kept in plain words. `python -m app.api.keys new NAME` makes one and "
            f"keeps its hash; or set FIRESIDE_{key.upper()}."
        )
    if key not in known:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"Did you mean `{close[0]}`?" if close else f"Known keys: {', '.join(known)}."
        raise SettingsError(f"{path} has an unknown key `{key}`. {hint}")
