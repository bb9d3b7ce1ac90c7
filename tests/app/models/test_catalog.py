"""models.yaml: what it holds, how names lead to entries, and how mistakes are told."""

import re
from pathlib import Path

import pytest

from app.errors import AppError
from app.models.catalog import Catalog, guess
from app.models.catalog_file import EMBEDDED_IDS, read_catalog
from app.models.shelf import CATALOG_FILE

GOOD = """
small:
  repo: org/small-AWQ
  format: awq
  size_gb: 1.5
  licence: apache-2.0
  context: 4096
  sampling: {temperature: 0.7, top_k: 20}
  tool_format: hermes
  reasoning: ["<think>", "</think>"]
  aliases: [tiny, mini]
"""


def load(tmp_path: Path, text: str, user_text: str | None = None) -> Catalog:
    (tmp_path / "models.yaml").write_text(text, encoding="utf-8")
    user_path = tmp_path / "user.yaml"
    if user_text is not None:
        user_path.write_text(user_text, encoding="utf-8")
    return read_catalog(tmp_path / "models.yaml", user_path)


def mistakes(tmp_path: Path, text: str, user_text: str | None = None) -> list[str]:
    with pytest.raises(AppError) as refused:
        load(tmp_path, text, user_text)
    assert refused.value.code == "bad_catalog"
    return [line.strip() for line in refused.value.message.splitlines()[1:]]


def test_the_project_file_is_right_and_holds_the_embedded_forms_and_bigger_models() -> None:
    catalog = read_catalog(CATALOG_FILE)
    assert tuple(entry.id for entry in catalog.entries if entry.is_embedded) == EMBEDDED_IDS
    repos = {entry.repo for entry in catalog.entries}
    assert {
        "Qwen/Qwen3-8B-AWQ",
        "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4",
        "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",
    } <= repos


def test_the_project_file_tells_of_every_model_what_a_user_must_know() -> None:
    """Revisions are there where they are known for sure: the hub tells them before a download."""
    entries = [entry for entry in read_catalog(CATALOG_FILE).entries if not entry.is_embedded]
    assert 25 <= len(entries) <= 35
    for entry in entries:
        assert entry.repo and entry.licence and entry.context_length and entry.aliases, entry.id
    assert {entry.format for entry in entries} >= {"awq", "gptq", "compressed-tensors", "dense"}
    families = ("llama-3", "qwen2.5-coder", "qwen3-30b-a3b", "mistral-7b", "mistral-nemo", "mistral-small", "phi-4")
    for family in (*families, "gemma-2", "gemma-3", "mixtral", "qwen3-embedding", "qwen2.5-32b", "qwen3-0.6b"):
        assert any(entry.id.startswith(family) for entry in entries), family


def test_a_users_entry_needs_no_more_than_where_it_lies(tmp_path: Path) -> None:
    catalog = load(tmp_path, GOOD, f"mine:\n  folder: {tmp_path}\ntheirs:\n  repo: a/b\n")
    mine, theirs = catalog.resolve("mine"), catalog.resolve("theirs")
    assert (mine.folder, mine.format, mine.context_length) == (tmp_path, None, None)
    assert (theirs.repo, theirs.size_bytes) == ("a/b", 0)
    assert any(
        "`folder` is 'models/x'; it must be a folder's whole path" in mistake
        for mistake in mistakes(tmp_path, GOOD, "mine:\n  folder: models/x\n")
    )


def test_every_key_arrives_in_the_entry(tmp_path: Path) -> None:
    (entry,) = load(tmp_path, GOOD).entries
    assert (entry.id, entry.repo, entry.revision, entry.is_embedded) == ("small", "org/small-AWQ", None, False)
    assert (entry.format, entry.size_bytes, entry.licence, entry.context_length) == (
        "awq",
        1_500_000_000,
        "apache-2.0",
        4096,
    )
    assert dict(entry.sampling) == {"temperature": 0.7, "top_k": 20}
    assert (entry.tool_format, entry.reasoning, entry.aliases) == ("hermes", ("<think>", "</think>"), ("tiny", "mini"))


@pytest.mark.parametrize("name", ["small", "SMALL", "tiny", "Mini", "org/small-AWQ", "Org/Small-awq"])
def test_id_alias_and_repository_lead_to_the_entry_in_any_case(tmp_path: Path, name: str) -> None:
    assert load(tmp_path, GOOD).resolve(name).id == "small"


def test_an_unknown_repository_is_an_entry_of_its_own(tmp_path: Path) -> None:
    entry = load(tmp_path, GOOD).resolve("Other/Model-7B")
    assert (entry.id, entry.repo, entry.format, entry.context_length) == (
        "Other/Model-7B",
        "Other/Model-7B",
        None,
        None,
    )


def test_a_folder_with_a_config_is_an_entry_by_absolute_and_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my models" / "größe"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    catalog = load(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    for name in (str(folder), "my models/größe", "./my models/größe"):
        entry = catalog.resolve(name)
        assert (entry.id, entry.folder, entry.repo) == ("größe", folder, None)


def test_the_catalogue_comes_before_a_folder_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert load(tmp_path, GOOD).resolve("small").repo == "org/small-AWQ"


@pytest.mark.parametrize("name", ["smal", "", "a/b/c", "../no-such", "~nobody-here/x", "x\0y", "x" * 5000, "org/"])
def test_a_name_that_leads_nowhere_is_a_404_that_says_where_all_are_shown(tmp_path: Path, name: str) -> None:
    catalog = load(tmp_path, GOOD)
    assert catalog.find(name) is None
    with pytest.raises(AppError) as refused:
        catalog.resolve(name)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    assert refused.value.hint.endswith("The page's Models and `python launch.py models list` show all.")


@pytest.mark.parametrize("name", ["", "model.Q4_K_M.gguf"])
def test_gguf_is_refused_with_the_formats_to_get_instead(tmp_path: Path, name: str) -> None:
    catalog = load(tmp_path, GOOD)
    folder = tmp_path / "some-gguf"
    folder.mkdir()
    (folder / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(AppError, match="GGUF, which Fireside does not read") as refused:
        catalog.resolve(str(folder / name))
    assert (refused.value.status, refused.value.code) == (501, "unsupported_model")
    assert "GPTQ, AWQ or plain safetensors" in refused.value.hint


def test_a_path_that_exists_without_a_config_says_just_that(tmp_path: Path) -> None:
    catalog = load(tmp_path, GOOD)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(AppError, match=r"exists, but has no config\.json") as refused:
        catalog.resolve(str(tmp_path / "empty"))
    assert (refused.value.status, refused.value.code) == (400, "bad_checkpoint")
    with pytest.raises(AppError, match="is a file, not a model's folder"):
        catalog.resolve(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize(("name", "hinted"), [("smal", "Did you mean small? The page's"), ("zzzzzz", "The page's Mo")])
def test_only_what_comes_near_is_guessed(tmp_path: Path, name: str, hinted: str) -> None:
    with pytest.raises(AppError) as refused:
        load(tmp_path, GOOD).resolve(name)
    assert refused.value.hint.startswith(hinted)


@pytest.mark.parametrize("name", ["qwen3", "qwen-3-8b-awk", "Qwen/Qwen3-8B-AWQ/", "llama", "no such model"])
def test_of_our_whole_catalogue_three_at_most_are_guessed_each_once(name: str) -> None:
    entries = read_catalog(CATALOG_FILE).entries
    ids = re.findall(r"[\w.-]+", guess(name, entries).removeprefix("Did you mean"))
    assert len(ids) == len(set(ids)) <= 3 and set(ids) <= {entry.id for entry in entries}


def test_every_entry_of_our_catalogue_tells_what_its_download_costs() -> None:
    assert [entry.id for entry in read_catalog(CATALOG_FILE).entries if not entry.size_bytes] == []


def test_the_users_file_adds_entries_and_changes_single_keys(tmp_path: Path) -> None:
    own = GOOD.replace("small:", "own:").replace("org/small-AWQ", "me/own").replace("[tiny, mini]", "[mine]")
    catalog = load(tmp_path, GOOD, own + "small:\n  context: 8192\n")
    assert [entry.id for entry in catalog.entries] == ["small", "own"]
    small = catalog.resolve("tiny")
    assert (small.context_length, small.repo) == (8192, "org/small-AWQ")


def test_a_users_origin_takes_the_place_of_ours_with_all_that_goes_with_it(tmp_path: Path) -> None:
    small = load(tmp_path, GOOD, f"small:\n  folder: {tmp_path}\n").resolve("tiny")
    assert (small.folder, small.repo, small.format, small.size_bytes) == (tmp_path, None, None, 0)
    assert (small.context_length, small.tool_format) == (4096, "hermes"), "what is said of the model stays"


@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_an_empty_users_file_changes_nothing(tmp_path: Path, text: str) -> None:
    assert [entry.id for entry in load(tmp_path, GOOD, text).entries] == ["small"]


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("context: 4096", "context: many", 7, "`context` is 'many'; it must be a whole number of tokens"),
        ("context: 4096", "context: true", 7, "`context` is True"),
        ("context: 4096", "context: 0", 7, "`context` is 0"),
        ("size_gb: 1.5", "size_gb: -1", 5, "`size_gb` is -1; it must be a number of GB"),
        ("size_gb: 1.5", "size_gb: .nan", 5, "`size_gb` is nan"),
        ("format: awq", "format: gguf", 4, "it must be one of gptq, awq, compressed-tensors, dense"),
        ("format: awq", "fromat: awq", 4, "unknown key `fromat`. Did you mean `format`?"),
        ("format: awq", "format: [awq]", 4, "`format` is ['awq']"),
        ("org/small-AWQ", "small", 3, "`repo` is 'small'; it must be a Hugging Face repository, owner/name"),
        ("org/small-AWQ", "../etc", 3, "`repo` is '../etc'"),
        ("top_k: 20", "temperature: 0.9", 8, "small: sampling: `temperature` is there twice"),
        ('["<think>", "</think>"]', "ab", 10, "`reasoning` is 'ab'; it must be a list"),
        ("repo: org/small-AWQ", "folder: ~nobody-here/x", 3, "`folder` is '~nobody-here/x'"),
        ("top_k: 20", "topk: 20", 8, "`sampling` is"),
        ("temperature: 0.7", "temperature: hot", 8, "temperature (0 to 100)"),
        ('["<think>", "</think>"]', '["<think>"]', 10, "`reasoning` is ['<think>']"),
        (
            "tool_format: hermes",
            "tool_format: herms",
            9,
            "`tool_format` is 'herms'; it must be one of qwen3_xml, hermes",
        ),
        ("[tiny, mini]", "tiny", 11, "`aliases` is 'tiny'; it must be a list"),
        ("[tiny, mini]", "[a/b]", 11, "`aliases` is ['a/b']"),
        ("licence: apache-2.0", "licence:", 6, "`licence` is None"),
        ("licence: apache-2.0", "licence: !mine x", 6, "`licence` cannot be read"),
        ("small:", "sm all:", 2, "an id is made of"),
        ("  licence: apache-2.0\n", "", 2, "`licence` is missing"),
        ("  repo: org/small-AWQ\n", "", 2, "exactly one of `repo` and `embedded: true` and `folder`"),
        ("format: awq", "format: awq\n  embedded: true", 2, "exactly one of `repo` and `embedded: true` and `folder`"),
        ("repo: org/small-AWQ", "embedded: true", 2, "`embedded` is only for smollm2"),
        ("context: 4096", "context: 4096\n  context: 1", 8, "`context` is there twice"),
    ],
)
def test_each_mistake_is_named_with_line_entry_and_key(
    tmp_path: Path, old: str, new: str, line: int, words: str
) -> None:
    assert old in GOOD
    found = mistakes(tmp_path, GOOD.replace(old, new))
    matching = [mistake for mistake in found if mistake.startswith(f"{tmp_path / 'models.yaml'}:{line}: ")]
    assert any(words in mistake for mistake in matching), found


def test_every_mistake_is_told_at_once_with_its_own_file(tmp_path: Path) -> None:
    found = mistakes(tmp_path, GOOD.replace("awq", "gguf", 1), "small:\n  context: x\n  aliases: 3\n")
    places = {mistake.split(": ")[0].rpartition("/")[2] for mistake in found}
    assert len(found) == 3
    assert places == {"models.yaml:4", "user.yaml:2", "user.yaml:3"}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("small2:\n  aliases: [Tiny]\n", "the name `Tiny` belongs to small already"),
        ("mini:\n  aliases: []\n", "the name `mini` belongs to small already"),
        ("small2:\n  repo: Org/small-awq\n", "the name `Org/small-awq` belongs to small already"),
    ],
)
def test_one_name_may_not_lead_to_two_models(tmp_path: Path, other: str, words: str) -> None:
    rest = "  format: awq\n  size_gb: 1\n  licence: mit\n  context: 1\n"
    repo = "" if "repo" in other else "  repo: me/other\n"
    assert any(words in mistake for mistake in mistakes(tmp_path, GOOD, other + rest + repo))


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n", "small: 3\n", "small:\n  - repo\n"])
def test_a_file_of_another_shape_is_told_with_its_line(tmp_path: Path, text: str) -> None:
    assert any("must be a block of `key: value` lines" in mistake for mistake in mistakes(tmp_path, text))


@pytest.mark.parametrize("text", ["a: [\n", "a: b: c\n", "\t- x", "a: " + "[" * 3000])
def test_broken_yaml_is_told_with_its_file(tmp_path: Path, text: str) -> None:
    (mistake, *_) = mistakes(tmp_path, text)
    assert mistake.startswith(f"{tmp_path / 'models.yaml'} cannot be read: ")


def test_an_alias_of_a_flag_is_one_more_name_for_a_model_of_the_catalogue_or_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    plain = load(tmp_path, GOOD)
    catalog = plain.with_aliases([("gpt-4o", "tiny"), ("openai/gpt-4o", "org/other"), ("own", str(folder))])
    named = catalog.find("GPT-4o")
    assert named is not None and named.id == "small" and named.aliases == ("tiny", "mini", "gpt-4o")
    assert named in catalog.entries and catalog.find("small") is named
    assert catalog.resolve("openai/gpt-4o").repo == "org/other"
    assert catalog.resolve("own").folder == folder
    assert plain.find("gpt-4o") is None


@pytest.mark.parametrize(
    ("aliases", "words"),
    [
        ([("Tiny", "org/other")], "'Tiny' belongs to small already"),
        ([("a", "org/one"), ("A", "org/two")], "'A' belongs to org/one already"),
        ([("gpt-4o", "nothing")], "stands for 'nothing', which is no model here"),
    ],
)
def test_an_alias_that_leads_nowhere_or_takes_a_name_away_is_refused(
    tmp_path: Path, aliases: list[tuple[str, str]], words: str
) -> None:
    with pytest.raises(AppError) as refused:
        load(tmp_path, GOOD).with_aliases(aliases)
    assert refused.value.code == "bad_alias" and words in refused.value.message
