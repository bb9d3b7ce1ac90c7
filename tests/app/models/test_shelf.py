"""The shelf: each kind of entry comes to lie in its folder by its own way."""

import json
import threading
from pathlib import Path

import pytest

from app import settings
from app.errors import AppError
from app.models.catalog import Catalog, CatalogEntry
from app.models.hub.manifest import Manifest, write_manifest
from app.models.hub.repository import RemoteFile
from app.models.library import Library
from app.models.own_catalog import remove_block
from app.models.shelf import ModelShelf
from app.models.shelved import state_word
from tests.app.models.fake_hub import FakeHub, led_here, running
from tests.app.models.test_store import WEIGHTS
from tests.checkpoints import tiny_checkpoint


def silent(stage: str, fraction: float | None) -> None:
    pass


@pytest.fixture
def shelf(tmp_path: Path) -> ModelShelf:
    return ModelShelf(tmp_path / "models")


def put_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)


@pytest.mark.parametrize(
    ("name", "folder"), [("default", "smollm2-135m-instruct"), ("qwen3", "qwen3-8b-awq"), ("Me/Own", "Me--Own")]
)
def test_a_model_that_lies_there_whole_is_given_without_any_network(
    shelf: ModelShelf, tmp_path: Path, name: str, folder: str
) -> None:
    put_model(tmp_path / "models" / folder)
    entry = shelf.resolve(name)
    assert shelf.state(entry).is_whole
    assert shelf.ensure(entry, silent) == tmp_path / "models" / folder


def test_a_half_model_is_not_shown_as_one(shelf: ModelShelf, tmp_path: Path) -> None:
    put_model(tmp_path / "models" / "qwen3-8b-awq")
    (tmp_path / "models" / "qwen3-8b-awq" / "model.safetensors").write_bytes(WEIGHTS[:-1])
    assert not shelf.state(shelf.resolve("qwen3")).is_whole


def test_a_model_of_another_revision_is_not_the_one_that_the_catalogue_means(tmp_path: Path) -> None:
    own, files = tmp_path / "models.yaml", tuple[RemoteFile, ...]()
    own.write_text("mine:\n  repo: a/b\n  revision: v1\n")
    put_model(tmp_path / "models" / "mine")
    write_manifest(tmp_path / "models" / "mine", Manifest("a/b", "v1", "c" * 40, files))
    shelf = ModelShelf(tmp_path / "models")
    assert shelf.is_whole(shelf.resolve("mine"))
    own.write_text("mine:\n  repo: a/b\n  revision: v2.0\n")
    found = shelf.state(shelf.resolve("mine"))
    assert (found.is_whole, found.is_outdated, shelf.is_whole(shelf.resolve("mine"))) == (False, True, False)
    assert state_word(found, None) == "", "no damage, but nothing of what is meant"


def test_a_folder_of_the_user_is_used_where_it_is(shelf: ModelShelf, tmp_path: Path) -> None:
    put_model(tmp_path / "my model")
    assert shelf.ensure(shelf.resolve(str(tmp_path / "my model")), silent) == tmp_path / "my model"


def test_a_damaged_folder_of_the_user_is_told_and_left_alone(shelf: ModelShelf, tmp_path: Path) -> None:
    put_model(tmp_path / "own")
    (tmp_path / "own" / "model.safetensors").unlink()
    with pytest.raises(AppError, match=r"no \.safetensors file is there") as refused:
        shelf.ensure(CatalogEntry(id="own", folder=tmp_path / "own"), silent)
    assert refused.value.code == "bad_checkpoint"
    assert (tmp_path / "own" / "config.json").exists()


def test_what_was_added_is_known_at_once_also_while_another_thread_reads_it(
    tmp_path: Path, shelf: ModelShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, is_reading, may_go_on = shelf._read_catalog, threading.Event(), threading.Event()

    def slowly() -> Catalog:
        if threading.current_thread() is not threading.main_thread():
            is_reading.set()
            may_go_on.wait(10)
        return read()

    monkeypatch.setattr(shelf, "_read_catalog", slowly)
    (tmp_path / "models.yaml").write_text(f"mine: {{folder: {tmp_path}}}\n")
    other = threading.Thread(target=shelf.entries)
    other.start()
    assert is_reading.wait(10)
    try:
        assert shelf.find("mine") is not None
    finally:
        may_go_on.set()
        other.join()


def test_the_users_models_yaml_lies_in_the_home_folder(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("qwen3-8b-awq:\n  context: 16384\n")
    assert ModelShelf(tmp_path / "models").resolve("qwen3").context_length == 16384


def test_a_folder_is_added_under_a_name_and_taken_out_without_being_touched(shelf: ModelShelf, tmp_path: Path) -> None:
    own = tmp_path / "models.yaml"
    own.write_text("# mine\nother:\n  repo: a/b # why\n", encoding="utf-8")
    tiny_checkpoint(tmp_path / "Tiny Model", "qwen3", "awq_gemm")
    (tmp_path / "Tiny Model" / "tokenizer.json").write_text("{}")
    shelf = ModelShelf(tmp_path / "models")
    added = shelf.add(str(tmp_path / "Tiny Model"))
    assert (added.id, added.folder, added.format, added.context_length) == (
        "tiny-model",
        tmp_path / "Tiny Model",
        "awq",
        256,
    )
    assert ModelShelf(tmp_path / "models").resolve("tiny-model") == added
    with pytest.raises(AppError, match="is taken"):
        shelf.add(str(tmp_path / "Tiny Model"), "tiny-model")
    assert shelf.remove(added) == 0
    assert own.read_text(encoding="utf-8") == "# mine\nother:\n  repo: a/b # why\n"
    assert (tmp_path / "Tiny Model" / "config.json").exists()


@pytest.mark.parametrize("bad_id", ["with space", "other"])
def test_an_id_that_cannot_be_leaves_the_users_file_as_it_was(tmp_path: Path, bad_id: str) -> None:
    own = tmp_path / "models.yaml"
    own.write_text("other:\n  repo: a/b\n", encoding="utf-8")
    tiny_checkpoint(tmp_path / "tiny", "llama")
    (tmp_path / "tiny" / "tokenizer.json").write_text("{}")
    with pytest.raises(AppError):
        ModelShelf(tmp_path / "models").add(str(tmp_path / "tiny"), bad_id)
    assert own.read_text(encoding="utf-8") == "other:\n  repo: a/b\n"


def test_a_repository_is_added_with_what_the_hub_says_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path / "tiny", "llama", "gptq")
    files = {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()} | {"tokenizer.json": b"{}"}
    cards = {"Org/Tiny-GPTQ": {"tags": ["license:mit"]}}
    with running(FakeHub(files={"Org/Tiny-GPTQ": files}, commits={"Org/Tiny-GPTQ": "a" * 40}, cards=cards)) as hub:
        led_here(hub, monkeypatch)
        added = ModelShelf(tmp_path / "models").add("Org/Tiny-GPTQ")
        by_address = ModelShelf(tmp_path / "other" / "models").add("https://huggingface.co/Org/Tiny-GPTQ/tree/main")
        with pytest.raises(AppError) as refused:
            ModelShelf(tmp_path / "models").add("Qwen/Qwen3-8B-AVQ")
    assert refused.value.hint.startswith("Did you mean qwen3-8b-awq")
    assert (by_address.id, by_address.repo) == ("tiny-gptq", "Org/Tiny-GPTQ")
    assert (added.id, added.format, added.licence, added.context_length) == ("tiny-gptq", "gptq", "mit", 256)
    assert added.size_bytes == pytest.approx(sum(map(len, files.values())), abs=1e6)


@pytest.mark.parametrize("fmt", ["dense", "gptq"])
@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"])
def test_a_folder_whose_tensors_are_not_its_configs_is_neither_added_nor_judged(
    tmp_path: Path, fmt: str, key: str
) -> None:
    folder = tmp_path / "tiny"
    tiny_checkpoint(folder, "llama", fmt)
    (folder / "tokenizer.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text())
    config[key] = config[key] + (32 if key != "num_hidden_layers" else 1)
    (folder / "config.json").write_text(json.dumps(config))
    library = Library(settings.load({"home": tmp_path / "home"}, {}))
    for ask in (library.add, library.fit):
        with pytest.raises(AppError, match="do not belong together") as refused:
            ask(str(folder))
        assert refused.value.code == "bad_checkpoint"


def test_a_folder_that_is_cut_or_lacks_its_tokenizer_is_neither_added_nor_judged(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tiny_checkpoint(folder, "llama")
    library = Library(settings.load({"home": tmp_path / "home"}, {}))
    for words in ("tokenizer.json is missing", "its header says"):
        for ask in (library.add, library.fit):
            with pytest.raises(AppError, match=words):
                ask(str(folder))
        (folder / "tokenizer.json").write_text("{}")
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a: {repo: x/y}\nb:\n  repo: x/z\n", "b:\n  repo: x/z\n"),
        ("b: 1\n\n# of a\na:\n  k: 1\n\n# of c\nc: 2\n", "b: 1\n\n# of a\n\n# of c\nc: 2\n"),
        ("a: 1 # said\n# more\n", "# more\n"),
        ("a:\n  - 1\n  - 2\n", "\n"),
    ],
)
def test_a_key_is_taken_out_by_its_lines_whatever_its_style(tmp_path: Path, text: str, left: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    assert remove_block(path, "a")
    assert path.read_text() == left
