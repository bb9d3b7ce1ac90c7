"""The shelf as people see it: words for what lies here, the model to begin with, a model's own defaults, the disk."""

from pathlib import Path

import pytest

from app.errors import AppError
from app.models.catalog import CatalogEntry
from app.models.hub.downloads import Download
from app.models.machine import Memory
from app.models.shelf import ModelShelf
from app.models.shelved import best, disk, shelved
from tests.app.models.test_shelf import put_model

_GIB = 2**30
CARD = Memory("cuda", "a card", 24 * _GIB, 24 * _GIB)


@pytest.fixture
def shelf(tmp_path: Path) -> ModelShelf:
    return ModelShelf(tmp_path / "models")


def test_each_model_is_told_with_what_of_it_lies_here(shelf: ModelShelf, tmp_path: Path) -> None:
    put_model(tmp_path / "models" / "qwen3-8b-awq")
    put_model(tmp_path / "models" / "qwen3-4b-awq")
    (tmp_path / "models" / "qwen3-4b-awq" / "config.json").unlink()
    downloads = [
        Download("qwen3-14b-awq", "Qwen/Qwen3-14B-AWQ", None, "paused"),
        Download("Own--Thing", "Own/Thing", None, "failed"),
    ]
    found = {each.id: each for each in shelved(shelf, downloads, CARD)}
    states = {name: found[name].state for name in ("qwen3-8b-awq", "qwen3-4b-awq", "qwen3-14b-awq", "qwen3-32b-awq")}
    assert states == {
        "qwen3-8b-awq": "ready",
        "qwen3-4b-awq": "damaged",
        "qwen3-14b-awq": "paused",
        "qwen3-32b-awq": "",
    }
    assert found["Own/Thing"].state == "failed" and list(found)[-1] == "Own/Thing"
    assert found["qwen3-8b-awq"].size_bytes < 10_000, "what lies here, not what the catalogue says"


def test_the_badge_goes_by_the_memory_that_would_be_free(shelf: ModelShelf) -> None:
    def word(machine: Memory) -> str:
        return next(each.fit for each in shelved(shelf, [], machine) if each.id == "qwen3-14b-awq")

    full = Memory("cuda", "a card", 24 * _GIB, 3 * _GIB)
    assert (word(CARD), word(full), word(full.with_free(20 * _GIB))) == ("fits", "too large", "fits")
    assert full.with_free(100 * _GIB).free == 24 * _GIB, "never more than there is"


@pytest.mark.parametrize(
    ("gb", "kind", "model"),
    [
        (24, "cuda", "qwen3-30b-a3b-gptq"),
        (16, "cuda", "qwen3-14b-awq"),
        (8, "cuda", "qwen3-4b-awq"),
        (64, "cpu", "qwen3-1.7b-w4a16"),
        (1, "cpu", "qwen3-0.6b-w4a16"),
    ],
)
def test_the_model_to_begin_with_goes_by_the_memory(shelf: ModelShelf, gb: int, kind: str, model: str) -> None:
    found = best(shelf.entries(), Memory(kind, "it", gb * _GIB, gb * _GIB))
    assert found is not None and found.id == model


def test_without_a_candidate_there_is_no_best_model() -> None:
    assert best([CatalogEntry(id="a", repo="a/a")], CARD) is None


def test_a_models_own_defaults_are_kept_changed_and_taken_out_again(shelf: ModelShelf, tmp_path: Path) -> None:
    before = shelf.resolve("qwen3-8b-awq")
    shelf.set_defaults(before, {"temperature": 0.1, "max_model_len": 4096})
    now = shelf.resolve("qwen3")
    assert dict(now.sampling) == {**before.sampling, "temperature": 0.1} and dict(now.load) == {"max_model_len": 4096}
    assert (now.repo, now.context_length) == (before.repo, before.context_length)
    shelf.set_defaults(now, {"kv_cache_dtype": "int8"})
    assert dict(shelf.resolve("qwen3").load) == {"max_model_len": 4096, "kv_cache_dtype": "int8"}
    assert shelf.own_ids() == {"qwen3-8b-awq"}
    shelf.set_defaults(shelf.resolve("qwen3"), {"max_model_len": None, "kv_cache_dtype": None})
    assert dict(shelf.resolve("qwen3").load) == {}


@pytest.mark.parametrize("values", [{"temperature": -1}, {"kv_cache_dtype": "int3"}, {"max_model_len": 0}])
def test_a_bad_default_is_refused_and_the_file_stays_as_it_was(
    shelf: ModelShelf, tmp_path: Path, values: dict[str, object]
) -> None:
    own = tmp_path / "models.yaml"
    own.write_text("# mine\nqwen3-8b-awq:\n  aliases: [q8]\n")
    with pytest.raises(AppError, match="must be") as refused:
        shelf.set_defaults(shelf.resolve("q8"), values)
    assert refused.value.status == 400
    assert own.read_text() == "# mine\nqwen3-8b-awq:\n  aliases: [q8]\n"


def test_a_model_that_no_catalogue_knows_has_no_defaults(shelf: ModelShelf) -> None:
    with pytest.raises(AppError, match="not in the catalogue"):
        shelf.set_defaults(shelf.resolve("Some/Repo"), {"temperature": 1})


def test_the_disk_is_told_by_model_and_by_what_else_lies_in_the_home(shelf: ModelShelf, tmp_path: Path) -> None:
    put_model(tmp_path / "models" / "qwen3-8b-awq")
    (tmp_path / "models" / "left-behind").mkdir()
    (tmp_path / "models" / "left-behind" / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine.log").write_bytes(b"x" * 7)
    (tmp_path / "models" / ".left-behind.download.json").write_bytes(b"x" * 5)
    for name, size in (("history.db", 20), ("history.db-wal", 10), ("server-15581.json", 3)):
        (tmp_path / name).write_bytes(b"x" * size)
    found = disk(tmp_path, shelf)
    assert [name for name, _ in found.models] == ["left-behind", "qwen3-8b-awq"]
    assert found.other == (("conversations", 30), ("logs", 7), ("working", 3)), "by words, not by files"
    assert 0 < found.free_bytes < found.total_bytes
