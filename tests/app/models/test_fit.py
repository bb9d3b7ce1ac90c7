"""The fit forecast: from headers alone, by the engine's own arithmetic, on a folder and over HTTP."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.errors import AppError
from app.models.catalog import CatalogEntry
from app.models.fit import Fit, fit
from app.models.machine import Memory, empty_card
from app.models.outline import Outline, StoredType, outline_of_folder, outline_of_repo
from engine.bench.shapes import SHAPES, dummy_checkpoint
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.forecast import forecast
from engine.loading import load_runner
from engine.memory import CUDA_RESERVE_BYTES
from tests.app.models.fake_hub import FakeHub, led_here, running
from tests.checkpoints import FAMILIES, FORMATS, WINDOWED, tiny_checkpoint

REPO = "org/tiny"
CARD = Memory("cuda", "a card", 24 * 2**30, 24 * 2**30)
GB = 10**9


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running(FakeHub(commits={REPO: "a" * 40})) as hub:
        led_here(hub, monkeypatch)
        yield hub


def put(hub: FakeHub, folder: Path) -> None:
    hub.files[REPO] = {path.name: path.read_bytes() for path in folder.iterdir()}


def big(shape: str, quant: str) -> Outline:
    """A model of a known shape, of which there is nothing but headers."""
    checkpoint = dummy_checkpoint(shape, quant)
    reader = checkpoint.open_reader(torch.device("cpu"))
    headers = {name: reader.header(name) for name in reader.names}
    tensors = {name: (size, StoredType(dtype.itemsize)) for name, (size, dtype) in headers.items()}
    return Outline(shape, checkpoint.spec, checkpoint.stated, tensors)


def on(outline: Outline, machine: Memory, **options: object) -> Fit:
    (found,) = fit(outline, EngineConfig(model="m", **options), [machine], CATALOGUE).fits  # type: ignore[arg-type]
    return found


CATALOGUE = [CatalogEntry(id=f"of-{gb}-gb", repo=f"org/of-{gb}", size_bytes=gb * GB) for gb in (1, 5, 30)]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_headers_give_the_forecast_that_the_engine_makes_of_the_opened_files(
    tmp_path: Path, fmt: str, kind: str
) -> None:
    tiny_checkpoint(tmp_path, "llama", fmt, shards=2)
    checkpoint, machine = open_checkpoint(tmp_path), Memory(kind, "it", 24 * GB, 24 * GB)
    reader, config = checkpoint.open_reader(torch.device("cpu")), EngineConfig(model="m")
    dtype = "float32" if kind == "cpu" else "float16"
    graphs = kind == "cuda"
    expected = forecast(config, checkpoint.spec, reader, checkpoint.stated, machine, dtype, uses_graphs=graphs)
    found = on(outline_of_folder(tmp_path), machine)
    told = (found.weights_bytes, found.workspace_bytes, found.graphs_bytes)
    assert told == (expected.weights, expected.workspace, expected.graphs)


@pytest.mark.parametrize(
    ("family", "fmt"),
    [
        *(("llama", fmt) for fmt in FORMATS),
        *((family, "dense") for family in (*FAMILIES, *WINDOWED) if family != "llama"),
    ],
)
def test_what_is_forecast_is_within_5_percent_of_the_report_after_loading(
    tmp_path: Path, family: str, fmt: str
) -> None:
    tiny_checkpoint(tmp_path, family, fmt)
    options = {"kv_gb": 0.002, "max_num_seqs": 2}
    memory = load_runner(EngineConfig(model=str(tmp_path), device="cpu", **options), lambda *_: None).memory  # type: ignore[arg-type]
    found = on(outline_of_folder(tmp_path), Memory("cpu", "it", 24 * GB, 24 * GB), **options)
    for part in ("weights", "workspace", "kv"):
        assert getattr(found, f"{part}_bytes") == pytest.approx(getattr(memory, f"{part}_bytes"), rel=0.05), part


@pytest.mark.parametrize("ignores_range", [False, True])
def test_over_http_the_headers_are_the_same_and_no_weights_come(
    hub: FakeHub, tmp_path: Path, ignores_range: bool
) -> None:
    tiny_checkpoint(tmp_path, "qwen3", "awq_gemm", shards=2)
    put(hub, tmp_path)
    hub.ignores_range = ignores_range
    assert outline_of_repo(REPO).tensors == outline_of_folder(tmp_path).tensors


def test_a_header_that_is_longer_than_the_first_look_is_read_on(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.models.outline._FIRST_BYTES", 100)
    tiny_checkpoint(tmp_path, "llama", "gptq")
    put(hub, tmp_path)
    assert outline_of_repo(REPO).tensors == outline_of_folder(tmp_path).tensors
    assert hub.served_from("model.safetensors") == [0, 100]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "no header that can be read"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"[]"), "header of model.safetensors"),
        (lambda f: (f / "model.safetensors").unlink(), "no .safetensors files"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is no JSON"),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}'), "b is missing"),
        (lambda f: (f / "config.json").write_text('{"architectures": ["Other"]}'), "Architecture Other is not"),
    ],
)
def test_what_is_no_model_is_told_with_its_file(tmp_path: Path, spoil: object, words: str) -> None:
    tiny_checkpoint(tmp_path, "llama", "gptq")
    spoil(tmp_path)  # type: ignore[operator]
    with pytest.raises(AppError, match=words):
        outline_of_folder(tmp_path)


@pytest.mark.parametrize(("family", "fmt"), [*((f, "dense") for f in FAMILIES), *(("qwen3", f) for f in FORMATS)])
def test_what_a_family_and_a_format_have_belongs_together(tmp_path: Path, family: str, fmt: str) -> None:
    tiny_checkpoint(tmp_path, family, fmt)
    assert outline_of_folder(tmp_path).names


def test_an_8b_model_in_4_bits_fits_a_card_of_24_gb_with_its_whole_context() -> None:
    found = on(big("llama3.1-8b", "awq"), empty_card(24))
    assert found.verdict == "fits"
    assert 5.0 < found.weights_bytes / GB < 6.0
    assert found.max_context > 65536 and found.chats == found.kv_bytes // (131_072 * 8192)


def test_a_card_that_is_full_says_so_and_what_would_fit() -> None:
    found = on(big("llama3.1-8b", "awq"), Memory("cuda", "a card", 24 * 2**30, 5 * GB))
    assert found.verdict == "too large" and found.notes[0].startswith("The model does not fit: weights 5.")
    assert found.advice == ("A smaller model: of-1-gb.",)
    assert found.reserve_bytes == CUDA_RESERVE_BYTES


def test_a_tight_card_takes_the_cache_in_int8_and_a_context_that_fits_is_named() -> None:
    tight = Memory("cuda", "a card", 24 * 2**30, int(7.1 * GB))
    found = on(big("llama3.1-8b", "awq"), tight)
    assert (found.verdict, found.kv_dtype) == ("tight", "int8")
    asked = on(big("llama3.1-8b", "awq"), tight, max_model_len=32768)
    assert asked.verdict == "too large"
    assert any(words.startswith("A smaller context (--max-model-len)") for words in asked.advice)


def test_a_context_that_was_asked_for_and_fits_needs_no_advice() -> None:
    asked = on(big("llama3.1-8b", "awq"), CARD, max_model_len=8192)
    assert (asked.verdict, asked.max_context, asked.advice) == ("fits", 8192, ())


def test_kv_cache_and_window_layers_are_told_by_thousand_tokens() -> None:
    report = fit(big("llama3.1-8b", "awq"), EngineConfig(model="m"), [CARD])
    assert report.kv_bytes_per_1k == {"fp16": 131_072_000, "fp32": 262_144_000, "int8": 66_560_000}
    assert json.loads(json.dumps(report.as_json()))["fits"][0]["verdict"] == "fits"


def test_layers_with_a_window_are_counted_as_what_they_take(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "gemma3", "gptq")
    report = fit(outline_of_folder(tmp_path), EngineConfig(model="m"), [CARD])
    assert (report.num_layers, report.window_layers, report.window) == (2, 1, 24)
    block_bytes = 16 * 2 * 2 * 32 * 2  # tokens, keys and values, KV heads, head_dim, bf16; of one layer
    # The context, 256 tokens, is 16 blocks; the window, with the tokens of a step under way and one planned, at most 3.
    assert report.kv_bytes_per_1k["bf16"] == round(1000 * (16 + 3) * block_bytes / 256)
    assert report.kv_bytes_per_1k_more["bf16"] == 1000 * block_bytes // 16


GEMMA3_12B = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262208,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "torch_dtype": "bfloat16",
}
GEMMA2_9B = GEMMA3_12B | {
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 256000,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
}
TOKEN_BYTES = 2 * 8 * 256 * 2  # keys and values, KV heads, head_dim, bf16; of one layer


@pytest.mark.parametrize(
    ("config", "full", "windowed", "window"), [(GEMMA3_12B, 8, 40, 1024), (GEMMA2_9B, 21, 21, 4096)]
)
def test_a_chat_of_8k_takes_its_full_layers_and_what_the_others_see(
    config: dict[str, object], full: int, windowed: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "gemma", config)
    outline = big("gemma", "gptq")
    report = fit(outline, EngineConfig(model="m"), [CARD])
    chat_bytes = TOKEN_BYTES * (full * 8192 + windowed * window)
    assert report.kv_bytes_per_1k["bf16"] * 8.192 == pytest.approx(chat_bytes, rel=0.05)
    assert report.kv_bytes_per_1k_more["bf16"] == 1000 * TOKEN_BYTES * full
    (found,) = report.fits
    # While one chat's prompt is computed, what its steps write is kept in all layers; 2,048 tokens each, two at once.
    prefill_bytes = TOKEN_BYTES * windowed * min(2 * 2048, 8192 - window)
    assert found.kv_dtype == "bf16"
    assert found.chats == pytest.approx((found.kv_bytes - prefill_bytes) / chat_bytes, rel=0.05, abs=1)
    kept_whole = TOKEN_BYTES * (full + windowed) * 8192
    assert found.chats > 1.25 * (found.kv_bytes // kept_whole)


def test_a_card_acts_as_a_smaller_one_as_the_engine_has_it() -> None:
    card = Memory("cuda", "a card", 80 * 2**30, 70 * 2**30)
    assert (card.acting_as(24).total, card.acting_as(24).free) == (24 * 2**30, 14 * 2**30)
    assert card.acting_as(24).emptied().free == 24 * 2**30
