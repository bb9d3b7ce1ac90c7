"""The shelf: each kind of entry comes to lie in its folder by its own way."""

from pathlib import Path

import pytest

from app.errors import AppError
from app.models.catalog import CatalogEntry
from app.models.shelf import ModelShelf
from tests.app.models.test_store import WEIGHTS


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


def test_the_users_models_yaml_lies_in_the_home_folder(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("qwen3-8b-awq:\n  context: 16384\n")
    assert ModelShelf(tmp_path / "models").resolve("qwen3").context_length == 16384
