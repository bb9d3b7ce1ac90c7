"""What a person may set: the table of settings drives --help, the environment names, settings.yaml and every check.

Order: flag > environment > settings.yaml in the home folder > default; each value remembers where it came from.
Standard library alone at import, since launch.py reads the flags before there is an environment to import from.
"""

import argparse
import difflib
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from app.setting import Setting, SettingsError
from app.settings_table import CONTEXT_TOKENS, KV_CACHE_DTYPES, TABLE, default_home

__all__ = [  # the house's face for settings
    "CONTEXT_TOKENS",
    "KV_CACHE_DTYPES",
    "SETTINGS_FILE",
    "TABLE",
    "Setting",
    "Settings",
    "SettingsError",
    "default_home",
    "load",
    "make_home",
    "parser",
    "read_flags",
    "version",
    "with_source",
]

SETTINGS_FILE = "settings.yaml"


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


def version() -> str:
    """The version of Fireside, from pyproject.toml, which is its only place."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


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
        try:
            return row.value(in_file[row.name], f"`{row.name}` in {file_path}"), SETTINGS_FILE
        except SettingsError as error:
            raise SettingsError(f"{error} {_without(row)}") from None
    return default, "default"


def with_source(error: SettingsError, settings: Settings) -> str:
    """Its words, and where the value comes from that is at fault, if not from a flag."""
    row = next((row for row in TABLE if row.name == error.setting), None)
    source = settings.sources[row.name] if row else ""
    if row is None or not source.startswith((SETTINGS_FILE, "environment")):
        return str(error)
    if source.startswith("environment"):
        return f"{error} The value comes from the environment's {row.env}; the flag {row.flag} goes before it."
    return f"{error} The value comes from `{row.name}` in {settings.home / SETTINGS_FILE}. {_without(row)}"


def _without(row: Setting) -> str:
    """How to start while the file has a value that cannot be used."""
    if row.takes == "nothing":
        return "Correct that line or delete it."
    value = row.name.split("_")[-1].upper() if row.default in (None, ()) else row.shown_default
    return f"Correct that line or delete it, or start with `{row.flag} {value}`, which goes before it."


def _read_file(path: Path) -> dict[str, object]:
    """The keys of settings.yaml; none where there is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):  # the latter is for `make_home` to tell
        return {}
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise SettingsError(f"{path} cannot be read: {why}.") from None
    import yaml  # here, since launch.py imports this module before PyYAML is installed

    try:
        root, found = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date of no calendar
        raise SettingsError(f"{path} is no valid YAML: {error}") from None
    if found is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise SettingsError(f"{path} must be lines of `key: value`; it holds a {type(found).__name__}.")
    for key in found:
        _check_key(str(key), path)
    keys = [key.value for key, _ in root.value]
    if twice := [key for key in found if keys.count(str(key)) > 1]:
        raise SettingsError(f"{path} has `{twice[0]}` twice; only one of them can hold.")
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
