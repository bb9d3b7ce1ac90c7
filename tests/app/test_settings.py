"""Settings: where each value comes from, and what a mistake is told."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from app import settings
from app.settings import Settings, SettingsError, load, read_flags
from engine.config import EngineConfig
from engine.errors import BadRequest


def with_file(home: Path, text: str) -> dict[str, str]:
    (home / "settings.yaml").write_text(text, encoding="utf-8")
    return {"FIRESIDE_HOME": str(home)}


def test_each_source_beats_the_ones_behind_it_and_is_remembered(tmp_path: Path) -> None:
    env = with_file(tmp_path, "port: 1\nhost: file\nmodel: file\n") | {"FIRESIDE_PORT": "2", "FIRESIDE_HOST": "env"}
    found = load(read_flags(["--port", "3"]), env)
    assert (found.port, found.host, found.model, found.log_level) == (3, "env", "file", "info")
    assert found.sources["port"] == "flag --port"
    assert found.sources["host"] == "environment FIRESIDE_HOST"
    assert found.sources["model"] == "settings.yaml"
    assert found.sources["log_level"] == "default"
    assert found.home == tmp_path


def test_the_table_names_every_field_of_settings_once() -> None:
    fields = [field.name for field in dataclasses.fields(Settings) if field.name != "sources"]
    assert fields == [row.name for row in settings.TABLE]


def test_every_default_passes_its_own_check(tmp_path: Path) -> None:
    found = load({}, {"FIRESIDE_HOME": str(tmp_path)})
    for row in settings.TABLE:
        value = getattr(found, row.name)
        assert value is None or row.read(str(value) if isinstance(value, Path) else value) == value


def test_what_may_come_several_times_is_a_list_in_each_source(tmp_path: Path) -> None:
    flags = read_flags(["--allowed-host", "a", "--allowed-host", "b", "--model-alias", "gpt-4o = owner/x=y"])
    assert flags == {"allowed_host": ("a", "b"), "model_alias": (("gpt-4o", "owner/x=y"),)}
    assert load({}, {"FIRESIDE_HOME": str(tmp_path), "FIRESIDE_ALLOWED_HOST": "a, b,"}).allowed_host == ("a", "b")
    assert load({}, with_file(tmp_path, "allowed_host: [a, b]\nmodel_alias: x=y")).allowed_host == ("a", "b")


def test_a_switch_is_a_flag_alone(tmp_path: Path) -> None:
    flags = read_flags(["--allow-no-key", "--no-browser", "--home", str(tmp_path)])
    found = load(flags, {"FIRESIDE_SSL_SELF_SIGNED": "1"})
    assert (found.allow_no_key, found.browser, found.ssl_self_signed, found.model_fallback) == (
        True,
        False,
        True,
        False,
    )


def test_text_and_yaml_give_the_same_values(tmp_path: Path) -> None:
    text = "max_model_len: 100\nkv_gb: 2\ngpu_memory_utilization: 0.5\nbrowser: false\nkv_cache_dtype: fp16\n"
    from_file = load({}, with_file(tmp_path, text))
    flags = "--max-model-len 100 --kv-gb 2 --gpu-memory-utilization 0.5 --no-browser --kv-cache-dtype fp16 --home"
    from_flags = load(read_flags([*flags.split(), str(tmp_path / "empty")]), {})
    names = ("max_model_len", "kv_gb", "gpu_memory_utilization", "browser", "kv_cache_dtype")
    assert [getattr(from_file, name) for name in names] == [getattr(from_flags, name) for name in names]
    assert from_file.browser is False


def test_an_empty_environment_variable_and_a_null_count_as_not_given(tmp_path: Path) -> None:
    found = load({}, with_file(tmp_path, "host: null\n") | {"FIRESIDE_PORT": ""})
    assert (found.host, found.port) == ("127.0.0.1", 8000)


WRONG: list[tuple[str, str]] = [
    ("key_file", "~nobody-here/x"),
    ("port", "65536"),
    ("port", "-1"),
    ("port", "8000.5"),
    ("host", " "),
    ("browser", "maybe"),
    ("max_model_len", "0"),
    ("max_num_seqs", "many"),
    ("gpu_memory_utilization", "1.5"),
    ("gpu_memory_utilization", "nan"),
    ("kv_gb", "inf"),
    ("kv_gb", "0"),
    ("kv_cache_dtype", "fp4"),
    ("log_level", "loud"),
    ("allow_no_key", "perhaps"),
    ("requests_per_minute", "0"),
    ("model_alias", "gpt-4o"),
    ("model_alias", "=x"),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_with_its_source_and_what_is_allowed(name: str, value: str, tmp_path: Path) -> None:
    row = next(row for row in settings.TABLE if row.name == name)
    told = f"is {value!r}; it must be {row.allowed}"
    if value.strip():
        with pytest.raises(SettingsError, match=f"{row.env} is"):
            load({}, {"FIRESIDE_HOME": str(tmp_path), row.env: value})
    with pytest.raises(SettingsError) as refused:
        load({}, with_file(tmp_path, f"{name}: {value!r}"))
    assert told in str(refused.value)
    assert f"`{name}` in {tmp_path / 'settings.yaml'}" in str(refused.value)
    if row.takes == "value":
        with pytest.raises(SettingsError) as refused:
            read_flags([f"{row.flag}={value}"])
        assert f"{row.flag} {told}" in str(refused.value)


@pytest.mark.parametrize("value", ["true", "[1]", "1.5"])
def test_a_yaml_value_of_another_type_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="whole number"):
        load({}, with_file(tmp_path, f"max_num_seqs: {value}"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot: 1", "unknown key `prot`. Did you mean `port`?"),
        ("zzz: 1", "Known keys: model, host, port"),
        ("home: /x", "Use --home or FIRESIDE_HOME"),
        ("- a", "holds a list"),
        ("a: [", "is no valid YAML"),
        ("port: 2026-99-01", "is no valid YAML"),
        ("port: " + "[" * 3000, "is no valid YAML"),
        ("port: 1\nport: 2", "`port` twice"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_the_file(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        load({}, with_file(tmp_path, text))
    assert told in str(refused.value)
    assert str(tmp_path / "settings.yaml") in str(refused.value)


def test_what_settings_allow_the_engine_accepts() -> None:
    """The table cannot import the engine's list (launch.py reads it before there is an environment)."""
    for dtype in settings.KV_CACHE_DTYPES:
        EngineConfig(model="m", kv_cache_dtype=dtype)
    with pytest.raises(BadRequest):
        EngineConfig(model="m", kv_cache_dtype="fp4")
    changed: dict[str, Any] = {
        row.name: row.default for row in settings.TABLE if row.name in EngineConfig.__dataclass_fields__
    }
    defaults = EngineConfig(model=settings.TABLE[0].default)
    assert EngineConfig(**changed) == defaults


SENSELESS = [
    ("host", "bad host"),
    ("host", "http://127.0.0.1"),
    ("max_model_len", "1"),
    ("max_model_len", "99999999"),
    ("max_num_seqs", "100000"),
    ("max_num_batched_tokens", "1"),
    ("kv_gb", "1e9"),
    ("gpu_memory_gb", "1e9"),
    ("step_timeout", "0.001"),
    ("load_timeout", "1e12"),
    ("idle_timeout", "1e12"),
    ("max_models", "100000"),
    ("allowed_origin", "foo"),
    ("allowed_origin", "https://chat.example.org/path"),
    ("allowed_host", "https://nas.local"),
]


@pytest.mark.parametrize(("name", "value"), SENSELESS)
def test_what_nobody_could_mean_is_refused_from_each_source(name: str, value: str, tmp_path: Path) -> None:
    row = next(row for row in settings.TABLE if row.name == name)
    told = f"{value!r}; it must be {row.allowed}"
    with pytest.raises(SettingsError) as from_env:
        load({}, {"FIRESIDE_HOME": str(tmp_path), row.env: value})
    with pytest.raises(SettingsError) as from_flag:
        read_flags([f"{row.flag}={value}"])
    with pytest.raises(SettingsError) as from_file:
        load({}, with_file(tmp_path, f"{name}: {value!r}"))
    assert told in str(from_env.value) and told in str(from_flag.value) and told in str(from_file.value)
    assert f"start with `{row.flag} " in str(from_file.value), "the way to start without it"


def test_an_origin_is_taken_as_a_browser_sends_it(tmp_path: Path) -> None:
    found = load({}, with_file(tmp_path, "allowed_origin: [https://Chat.example.org/, app://obsidian.md, '*']"))
    assert found.allowed_origin == ("https://chat.example.org", "app://obsidian.md", "*")


def test_a_list_that_is_wrong_is_shown_as_it_was_written() -> None:
    row = next(row for row in settings.TABLE if row.name == "model_alias")
    with pytest.raises(SettingsError, match="is 'x'; it must be NAME=MODEL"):
        row.value(["x"], "`model_alias`")


def test_a_number_is_told_the_same_way_as_its_default() -> None:
    assert {row.shown_default for row in settings.TABLE if row.name in ("drain_timeout", "load_timeout")} == {
        "30",
        "600",
    }
