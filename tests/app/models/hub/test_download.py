"""Downloads against a small local hub: whole, broken off, refused, spoilt."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from app.errors import AppError
from app.models.hub.download import OnReport, fetch, repair
from app.models.hub.manifest import growing_folder, read_manifest, verdict
from app.models.hub.report import Report
from app.models.hub.token import forget_token, keep_token, read_token
from app.models.store import problems
from tests.app.models.fake_hub import FakeHub, led_here, running

REPO = "org/tiny-AWQ"


def silent(report: Report) -> None:
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
    with running(FakeHub(files={REPO: model_files()}, commits={REPO: "a" * 40})) as hub:
        led_here(hub, monkeypatch)
        yield hub


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_download_is_whole_and_holds_what_a_load_needs(hub: FakeHub, tmp_path: Path) -> None:
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    assert problems(folder) == []
    assert visible(folder) == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    for name in visible(folder):
        assert (folder / name).read_bytes() == hub.files[REPO][name]
    assert visible(tmp_path) == {"tiny"}


def test_reports_tell_bytes_speed_and_time_left_by_file_and_in_all(hub: FakeHub, tmp_path: Path) -> None:
    hub.pause_s = 0.01
    seen: list[Report] = []
    fetch(REPO, None, tmp_path / "tiny", seen.append)
    told = [report for report in seen if report.files]
    assert [report.done_bytes for report in told] == sorted(report.done_bytes for report in told)
    assert told[-1].fraction == 1.0
    assert {file.state for file in told[-1].files} == {"verified"}
    middle = next(report for report in told if 0.1 < (report.fraction or 0) < 1 and report.bytes_per_s)
    (large,) = (file for file in middle.files if file.name == "model.safetensors")
    assert 0 < large.done_bytes < large.num_bytes
    assert middle.seconds_left == pytest.approx((middle.num_bytes - middle.done_bytes) / (middle.bytes_per_s or 1))
    assert {report.stage for report in told[:-1]} <= {f"Downloading {REPO} (0.00 GB)", f"Checking {REPO} (0.00 GB)"}


def test_files_come_side_by_side(hub: FakeHub, tmp_path: Path) -> None:
    hub.pause_s = 0.01
    hub.files[REPO]["model-2.safetensors"] = hub.files[REPO]["model.safetensors"]
    seen: list[Report] = []
    fetch(REPO, None, tmp_path / "tiny", seen.append)
    assert any(sum(0 < file.done_bytes < file.num_bytes for file in report.files) == 2 for report in seen)


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
    first, second, third = hub.served_from("model.safetensors")
    assert 0 == first < second < third


def test_a_line_may_break_at_any_byte(hub: FakeHub, tmp_path: Path) -> None:
    """Of the large file 1 byte comes, 7, a piece and one more, none, ... at a time."""
    hub.cut_after = [1, 7, 65_536, 262_145, 0, 1_500_000, 1_169_000]
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    assert (folder / "model.safetensors").read_bytes() == hub.files[REPO]["model.safetensors"]
    begun = hub.served_from("model.safetensors")
    assert begun == [0, 1, 8, 65544, 327689, 327689, 1827689, 2996689]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_stumbles_is_asked_again(hub: FakeHub, tmp_path: Path, status: int) -> None:
    hub.failures = 1
    hub.failure = status
    assert problems(fetch(REPO, None, tmp_path / "tiny", silent)) == []


class _Cancelled(Exception):
    pass


def cancel_at(share: float) -> OnReport:
    def on_report(report: Report) -> None:
        if report.fraction is not None and report.fraction >= share:
            raise _Cancelled

    return on_report


def test_a_cancelled_download_is_no_model_and_goes_on_at_the_next_call(hub: FakeHub, tmp_path: Path) -> None:
    hub.pause_s = 0.02
    with pytest.raises(_Cancelled):
        fetch(REPO, None, tmp_path / "tiny", cancel_at(0.5))
    assert visible(tmp_path) == set()
    hub.served.clear()
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    assert problems(folder) == []
    (first,) = hub.served_from("model.safetensors")
    assert first >= 1_000_000
    assert hub.served_from("config.json") == [], "finished files are kept"


def test_a_broken_download_stays_with_its_commit_when_the_branch_moves_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.pause_s = 0.01
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
    hub.corrupt[name] = 9
    with pytest.raises(AppError, match=r"its hash is \w{40,64}, expected \w{40,64}") as refused:
        fetch(REPO, None, tmp_path / "tiny", silent)
    assert (refused.value.code, name in refused.value.message) == ("download_corrupt", True)
    assert visible(tmp_path) == set()
    hub.corrupt.clear()
    assert problems(fetch(REPO, None, tmp_path / "tiny", silent)) == []


def test_a_file_that_was_spoilt_once_is_fetched_again_alone(hub: FakeHub, tmp_path: Path) -> None:
    hub.corrupt["model.safetensors"] = 1
    assert problems(fetch(REPO, None, tmp_path / "tiny", silent)) == []
    assert hub.served_from("model.safetensors") == [0, 0]
    assert hub.served_from("tokenizer.json") == [0]


def test_a_server_that_ignores_ranges_is_begun_anew(hub: FakeHub, tmp_path: Path) -> None:
    hub.ignores_range = True
    hub.cut_after = [1_000_000]
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    assert (folder / "model.safetensors").read_bytes() == hub.files[REPO]["model.safetensors"]


def test_bytes_of_another_version_are_never_joined(hub: FakeHub, tmp_path: Path) -> None:
    """Without a hash only the ETag tells that the file changed between its two halves."""
    hub.tells_no_hash = hub.changes_etag = True
    hub.cut_after = [1_000_000]
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    assert hub.served_from("model.safetensors")[-1] == 0
    assert (folder / "model.safetensors").read_bytes() == hub.files[REPO]["model.safetensors"]


def test_an_empty_file_is_a_file(hub: FakeHub, tmp_path: Path) -> None:
    hub.files[REPO]["added_tokens.json"] = b""
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    assert (folder / "added_tokens.json").read_bytes() == b""


def test_a_file_of_which_no_hash_is_known_is_never_called_verified(hub: FakeHub, tmp_path: Path) -> None:
    hub.tells_no_hash = True
    seen: list[Report] = []
    folder = fetch(REPO, None, tmp_path / "tiny", seen.append)
    assert {file.state for file in seen[-1].files} == {"unverified"}
    manifest = read_manifest(folder)
    assert manifest is not None
    assert {verdict(folder / file.name, file) for file in manifest.files} == {"unverified"}


def test_what_a_mirror_tells_in_its_tree_alone_is_asked_there(hub: FakeHub, tmp_path: Path) -> None:
    hub.tells_in_tree = True
    seen: list[Report] = []
    fetch(REPO, None, tmp_path / "tiny", seen.append)
    assert {file.state for file in seen[-1].files} == {"verified"}
    assert seen[-1].num_bytes == sum(len(hub.files[REPO][file.name]) for file in seen[-1].files)


def test_half_a_file_without_a_hash_is_not_taken_up_by_another_process(hub: FakeHub, tmp_path: Path) -> None:
    hub.tells_no_hash, hub.pause_s = True, 0.02
    with pytest.raises(_Cancelled):
        fetch(REPO, None, tmp_path / "tiny", cancel_at(0.3))
    partial = growing_folder(tmp_path / "tiny") / "model.safetensors.partial"
    partial.write_bytes(b"\0" * partial.stat().st_size)  # what a power cut may leave
    hub.pause_s = 0
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    assert (folder / "model.safetensors").read_bytes() == hub.files[REPO]["model.safetensors"]


def test_holes_that_a_power_cut_left_are_found_and_the_file_is_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.pause_s = 0.02
    with pytest.raises(_Cancelled):
        fetch(REPO, None, tmp_path / "tiny", cancel_at(0.5))
    partial = growing_folder(tmp_path / "tiny") / "model.safetensors.partial"
    partial.write_bytes(b"\0" * partial.stat().st_size)
    hub.pause_s = 0
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    assert (folder / "model.safetensors").read_bytes() == hub.files[REPO]["model.safetensors"]


def test_repair_fetches_what_is_damaged_and_nothing_else(hub: FakeHub, tmp_path: Path) -> None:
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[2_000_000] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    manifest = read_manifest(folder)
    assert manifest is not None
    verdicts = {file.name: verdict(folder / file.name, file) for file in manifest.files}
    assert {name for name, found in verdicts.items() if found == "damaged"} == {"model.safetensors"}
    hub.served.clear()
    repair(folder, silent)
    assert hub.served == [("model.safetensors", 0)]
    assert (folder / "model.safetensors").read_bytes() == hub.files[REPO]["model.safetensors"]


def test_a_repair_that_ends_in_the_middle_leaves_no_damaged_file_that_counts_as_checked(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    (folder / "generation_config.json").write_text("[]")

    def killed(*_: object, **__: object) -> None:
        raise _Cancelled

    for moment in ("pathlib.Path.unlink", "os.replace", "app.models.hub.download._begin"):
        with monkeypatch.context() as patch:
            patch.setattr(moment, killed)
            with suppress(_Cancelled):
                repair(folder, silent)
        if not folder.exists():
            break
    assert not folder.exists(), "the last moment is after the renaming"
    fetch(REPO, None, folder, silent)
    assert (folder / "generation_config.json").read_bytes() == hub.files[REPO]["generation_config.json"]


@pytest.mark.parametrize("obstacle", ["hub", "disk"])
def test_a_repair_that_cannot_be_done_leaves_the_model_in_its_place(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    (folder / "generation_config.json").unlink()
    before = visible(folder)
    if obstacle == "hub":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr("app.models.making._SPARE_BYTES", 10**18)
    with pytest.raises(AppError) as refused:
        repair(folder, silent)
    assert refused.value.code == {"hub": "download_failed", "disk": "disk_full"}[obstacle]
    assert visible(folder) == before and problems(folder) == []


def test_a_repair_tells_how_far_its_reading_is(hub: FakeHub, tmp_path: Path) -> None:
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    (folder / "config.json").write_text("[]")
    seen: list[Report] = []
    repair(folder, seen.append)
    checked = [report for report in seen if report.state == "verifying"]
    assert {file.name: file.state for file in checked[0].files}["config.json"] == "damaged" or len(checked) > 1
    assert checked[0].num_bytes == seen[-1].num_bytes


def test_an_embedding_model_brings_its_pooling(hub: FakeHub, tmp_path: Path) -> None:
    hub.files[REPO] |= {"modules.json": b"[]", "1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}'}
    folder = fetch(REPO, None, tmp_path / "tiny", silent)
    assert (folder / "1_Pooling" / "config.json").read_bytes() == b'{"pooling_mode_lasttoken": true}'


def test_a_name_that_leads_out_of_the_folder_is_not_fetched(hub: FakeHub, tmp_path: Path) -> None:
    hub.files[REPO] |= {"../evil.json": b"{}", "..\\evil.json": b"{}", "a/../../evil.json": b"{}"}
    fetch(REPO, None, tmp_path / "home" / "tiny", silent)
    assert list(tmp_path.rglob("evil.json")) == []


def test_a_kept_token_opens_a_gated_repository_and_nobody_else_can_read_it(hub: FakeHub, tmp_path: Path) -> None:
    hub.gated.add(REPO)
    assert read_token(tmp_path) is None
    path = keep_token(tmp_path, hub.token)
    assert os.name == "nt" or path.stat().st_mode & 0o777 == 0o600
    assert problems(fetch(REPO, None, tmp_path / "tiny", silent, read_token(tmp_path))) == []
    assert forget_token(tmp_path) and read_token(tmp_path) is None


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
