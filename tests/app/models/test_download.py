"""Downloads against a small local hub: whole, broken off, refused, spoilt."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from app.errors import AppError
from app.models.download import fetch
from app.models.making import Progress
from app.models.store import problems
from tests.app.models.fake_hub import FakeHub, running

REPO = "org/tiny-AWQ"


def silent(stage: str, fraction: float | None) -> None:
    pass


def model_files() -> dict[str, bytes]:
    weights = {"w": np.random.default_rng(0).integers(0, 255, 3_000_000, np.uint8)}
    return {
        "config.json": b'{"model_type": "llama"}',
        "generation_config.json": b"{}",
        "tokenizer.json": b'{"a": "' + b"x" * 400 + b'"}',
        "model.safetensors": save(weights),
        "README.md": b"not wanted",
        "onnx/config.json": b"not wanted",
        "consolidated.safetensors": save(weights),
        "pytorch_model.bin": b"not wanted",
    }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    with running(FakeHub(files={REPO: model_files()}, commits={REPO: "a" * 40})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def served_from(hub: FakeHub, name: str) -> list[int]:
    """First bytes asked for, one for each request of this file."""
    return [first for served, first in hub.served if served == name]


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_download_is_whole_and_holds_what_a_load_needs(hub: FakeHub, tmp_path: Path) -> None:
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    assert problems(folder) == []
    assert visible(folder) == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    for name in visible(folder):
        assert (folder / name).read_bytes() == hub.files[REPO][name]
    assert visible(tmp_path) == {"tiny"}


def test_progress_grows_to_one_in_one_stage_that_tells_the_size(hub: FakeHub, tmp_path: Path) -> None:
    seen: list[tuple[str, float | None]] = []
    fetch(REPO, None, tmp_path / "tiny", lambda stage, fraction: seen.append((stage, fraction)))
    fractions = [fraction for _, fraction in seen if fraction is not None]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert len(fractions) > 8, "the large file alone comes in a dozen pieces"
    assert {stage for stage, fraction in seen if fraction is not None} == {f"Downloading {REPO} (0.00 GB)"}


def test_what_is_there_asks_the_network_nothing(hub: FakeHub, tmp_path: Path) -> None:
    fetch(REPO, None, tmp_path / "tiny", silent)
    hub.requests.clear()
    fetch(REPO, None, tmp_path / "tiny", silent)
    assert hub.requests == []


def test_a_tokenizer_that_was_cut_short_is_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    tokenizer = fetch(REPO, None, tmp_path / "tiny", silent) / "tokenizer.json"
    tokenizer.write_text('{"a')
    fetch(REPO, None, tmp_path / "tiny", silent)
    assert tokenizer.read_bytes() == model_files()["tokenizer.json"]


def test_a_line_that_breaks_is_taken_up_at_the_last_byte(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut_after = [1_000_000, 1_000_000]
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    assert problems(folder) == []
    first, second, third = served_from(hub, "model.safetensors")
    assert 0 == first < second < third


def test_a_server_that_stumbles_is_asked_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.failures = 1
    assert problems(fetch(REPO, None, tmp_path / "tiny", silent)) == []


class _Cancelled(Exception):
    pass


def cancel_at(share: float) -> Progress:
    def on_progress(stage: str, fraction: float | None) -> None:
        if fraction is not None and fraction >= share:
            raise _Cancelled

    return on_progress


def test_a_cancelled_download_is_no_model_and_goes_on_at_the_next_call(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(_Cancelled):
        fetch(REPO, None, tmp_path / "tiny", cancel_at(0.5))
    assert visible(tmp_path) == set()
    hub.served.clear()
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    assert problems(folder) == []
    (first,) = served_from(hub, "model.safetensors")
    assert first > 1_000_000
    assert served_from(hub, "config.json") == [], "finished files are kept"


def test_a_broken_download_stays_with_its_commit_when_the_branch_moves_on(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(_Cancelled):
        fetch(REPO, None, tmp_path / "tiny", cancel_at(0.5))
    hub.requests.clear()
    fetch(REPO, None, tmp_path / "tiny", silent)
    assert f"/revision/{'a' * 40}" in hub.requests[0]
    # and where that commit is gone, everything is fetched from the new one
    with pytest.raises(_Cancelled):
        fetch(REPO, "main", tmp_path / "tiny", cancel_at(0.5))
    hub.commits[REPO] = "b" * 40
    hub.files[REPO]["config.json"] = b'{"model_type": "qwen2"}'
    folder = fetch(REPO, "main", tmp_path / "tiny", silent)
    assert (folder / "config.json").read_bytes() == hub.files[REPO]["config.json"]


def test_another_revision_replaces_what_is_there(hub: FakeHub, tmp_path: Path) -> None:
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    hub.commits[REPO] = "b" * 40
    hub.files[REPO]["config.json"] = b'{"model_type": "qwen2"}'
    assert fetch(REPO, "b" * 40, folder, silent) == folder
    assert (folder / "config.json").read_bytes() == hub.files[REPO]["config.json"]


def test_a_folder_placed_by_hand_is_taken_as_it_is(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "tiny" / name).write_bytes(hub.files[REPO][name])
    fetch(REPO, "main", tmp_path / "tiny", silent)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_spoilt_file_is_refused_with_both_hashes_and_fetched_anew(hub: FakeHub, tmp_path: Path, name: str) -> None:
    hub.corrupt.add(name)
    with pytest.raises(AppError, match=r"its hash is \w{40,64}, expected \w{40,64}") as refused:
        fetch(REPO, None, tmp_path / "tiny", silent)
    assert (refused.value.code, name in refused.value.message) == ("download_corrupt", True)
    assert visible(tmp_path) == set()
    hub.corrupt.clear()
    assert problems(fetch(REPO, None, tmp_path / "tiny", silent)) == []


def test_a_repository_that_does_not_exist_is_named(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(AppError, match="org/nothing does not exist, or is private") as refused:
        fetch("org/nothing", None, tmp_path / "nothing", silent)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    assert visible(tmp_path) == set()


def test_a_revision_that_does_not_exist_is_named(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(AppError, match="no such revision") as refused:
        fetch(REPO, "v9", tmp_path / "tiny", silent)
    assert "models.yaml" in refused.value.hint


def test_a_gated_repository_says_where_to_accept_and_how_to_give_the_token(hub: FakeHub, tmp_path: Path) -> None:
    hub.gated.add(REPO)
    with pytest.raises(AppError) as refused:
        fetch(REPO, None, tmp_path / "tiny", silent)
    assert (refused.value.status, refused.value.code) == (401, "gated_model")
    assert f"{hub.url}/{REPO}" in refused.value.hint
    assert "HF_TOKEN" in refused.value.hint


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model-Q4_K_M.gguf"], "GGUF files"),
        (
            ["config.json", "tokenizer.json", "pytorch_model.bin"],
            "no .safetensors weights; it holds PyTorch .bin files",
        ),
        (["config.json", "tokenizer.model", "model.safetensors"], "no tokenizer.json"),
        (["README.md"], "no config.json, no tokenizer.json, no .safetensors weights"),
    ],
)
def test_a_repository_that_cannot_be_loaded_says_what_to_get_instead(
    hub: FakeHub, tmp_path: Path, names: list[str], words: str
) -> None:
    hub.files[REPO] = {name: b"x" for name in names}
    with pytest.raises(AppError, match=words) as refused:
        fetch(REPO, None, tmp_path / "tiny", silent)
    assert refused.value.code == "unsupported_model"
    assert "-AWQ" in refused.value.hint
    assert hub.served == []


def test_a_repository_that_lacks_a_shard_of_its_own_index_is_named_and_shows_no_model(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.files[REPO]["model.safetensors.index.json"] = b'{"weight_map": {"w": "other.safetensors"}}'
    with pytest.raises(AppError, match=r"other\.safetensors is missing") as refused:
        fetch(REPO, None, tmp_path / "tiny", silent)
    assert refused.value.code == "bad_checkpoint"
    assert visible(tmp_path) == set()


def test_a_full_disk_is_told_before_anything_is_fetched(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr("app.models.making.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(AppError, match="of free disk") as refused:
        fetch(REPO, None, tmp_path / "tiny", silent)
    assert refused.value.code == "disk_full"
    assert hub.served == []


def test_no_network_is_told_with_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # "discard": nobody listens there
    with pytest.raises(AppError, match="could not be reached") as refused:
        fetch(REPO, None, tmp_path / "tiny", silent)
    assert (refused.value.status, refused.value.code) == (503, "download_failed")
    assert "HF_ENDPOINT" in refused.value.hint


def test_offline_mode_is_told_as_what_it_is(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(AppError, match="HF_HUB_OFFLINE is set"):
        fetch(REPO, None, tmp_path / "tiny", silent)
    assert hub.requests == []


def test_the_users_endpoint_is_honoured(hub: FakeHub, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from app.models.download import fetch;"
        f"print(fetch({REPO!r}, None, Path(sys.argv[1]), lambda stage, fraction: None))"
    )
    root = Path(__file__).parents[3]
    environment = os.environ | {"HF_ENDPOINT": hub.url, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", code, str(tmp_path / "tiny")]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert problems(tmp_path / "tiny") == []
