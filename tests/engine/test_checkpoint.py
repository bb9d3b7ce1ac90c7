"""What a folder says beyond its config's numbers: arithmetic that a family needs, biases, and embedding models."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from engine.checkpoint import open_checkpoint
from engine.checks import check_params
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadCheckpoint, BadRequest, UnsupportedModel
from engine.forecast import compute_dtype
from engine.types import FinishReason, SamplingParams
from tests.checkpoints import FAMILIES, tiny_checkpoint
from tests.engine.running import edit_config, engine_config, load, logits_in_chunks, prompt
from tests.fakes import model_info

_DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
_OVERFLOWING = ("gemma2", "gemma3")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_a_card_computes_in_the_checkpoints_16_bits_unless_they_overflow(
    tmp_path: Path, family: str, stored: str
) -> None:
    tiny_checkpoint(tmp_path, family)
    edit_config(tmp_path, dtype=stored)
    spec = open_checkpoint(tmp_path).spec
    config = EngineConfig(model=str(tmp_path))
    assert compute_dtype(config, spec, "cuda") == ("bfloat16" if family in _OVERFLOWING else stored)
    assert compute_dtype(config, spec, "cpu") == "float32"


@pytest.mark.parametrize("family", _OVERFLOWING)
def test_float16_is_refused_where_activations_leave_its_range(tmp_path: Path, family: str) -> None:
    tiny_checkpoint(tmp_path, family)
    with pytest.raises(BadRequest, match=r"dtype is float16.*Use bfloat16, float32 or auto"):
        load(tmp_path, dtype="float16")
    assert load(tmp_path, dtype="bfloat16").info.dtype == "bfloat16"


def _edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """By name with `__` for `.`; None takes a tensor out."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors")


def test_a_bias_that_the_config_asks_for_and_the_files_lack_is_named(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen2")
    _edit_tensors(tmp_path, model__layers__1__self_attn__k_proj__bias=None)
    with pytest.raises(BadCheckpoint, match=r"no tensor 'model\.layers\.1\.self_attn\.k_proj\.bias', which its config"):
        load(tmp_path)


def test_a_bias_that_the_config_does_not_know_may_only_be_zero(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    _edit_tensors(tmp_path, model__layers__0__mlp__down_proj__bias=torch.zeros(64))
    load(tmp_path)
    _edit_tensors(tmp_path, model__layers__0__mlp__down_proj__bias=torch.eye(64)[63])
    with pytest.raises(BadCheckpoint, match=r"'model\.layers\.0\.mlp\.down_proj\.bias' of .* is not zero"):
        load(tmp_path)


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "mixtral")
    _edit_tensors(tmp_path, model__layers__0__block_sparse_moe__experts__4__w1__weight=torch.zeros(192, 64))
    with pytest.raises(BadCheckpoint, match=r"have no place in MixtralForCausalLM: .*experts\.4\.w1\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(("root", "vision"), [("language_model.model.", ""), ("model.language_model.", "model.")])
def test_the_text_part_of_a_model_that_sees_is_loaded_alone_and_that_is_told(
    tmp_path: Path, root: str, vision: str
) -> None:
    tiny_checkpoint(tmp_path / "text", "gemma3")
    plain = load(tmp_path / "text")
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    seeing = tmp_path / "seeing"
    seeing.mkdir()
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"hidden_size": 16}}
    del config["architectures"]
    (seeing / "config.json").write_text(json.dumps({**outer, "text_config": config}))
    tensors = {root + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    tensors |= {f"{vision}{name}.weight": torch.ones(4) for name in ("vision_tower.head", "multi_modal_projector.norm")}
    save_file(tensors, seeing / "model.safetensors")
    runner = load(seeing)
    assert torch.equal(logits_in_chunks(runner, prompt(40), 40), logits_in_chunks(plain, prompt(40), 40))
    assert runner.memory.notes == ("Only text: what this model has for images is not loaded.",)


def _embedding_model(folder: Path) -> PreTrainedModel:
    """As Qwen3-Embedding lies on the Hub: a Qwen3 without its head, and so one level higher."""
    model = tiny_checkpoint(folder, "qwen3")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, folder / "model.safetensors")
    edit_config(folder, tie_word_embeddings=True)
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    (folder / "modules.json").write_text(
        json.dumps([{"name": n, "path": p, "type": f"sentence_transformers.models.{kind}"} for n, p, kind in modules])
    )
    _write_pooling(folder, pooling_mode_cls_token=False, pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True)
    return model


def _write_pooling(folder: Path, **modes: bool) -> None:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))


@pytest.mark.parametrize("device", _DEVICES)
@torch.inference_mode()
def test_an_embedding_is_the_last_tokens_state_at_length_1(tmp_path: Path, device: str) -> None:
    """One token, some, and many in chunks, beside an answer; and once more out of the prefix cache."""
    model = _embedding_model(tmp_path).model
    engine = Engine(load(tmp_path, device, max_num_batched_tokens=32), engine_config(tmp_path, device))
    asked = SamplingParams(max_tokens=1, ignore_eos=True, embeds=True)
    texts = {"one": prompt(1), "short": prompt(7), "long": prompt(60, seed=1), "again": prompt(60, seed=1)}
    engine.add("answer", tuple(prompt(9, seed=2)), SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    events = []
    for names in (("one", "short", "long"), ("again",)):
        for name in names:
            engine.add(name, tuple(texts[name]), asked)
        while engine.has_work:
            events += engine.step()
    assert [event.embedding is None for event in events if event.request_id == "answer"] == [True] * 9
    last = {event.request_id: event for event in events if event.request_id in texts}
    assert last["again"].num_cached_tokens > 0 and last["again"].embedding == last["long"].embedding
    for name, tokens in texts.items():
        event = last[name]
        assert event.finish_reason is FinishReason.LENGTH and event.embedding is not None
        state = model(torch.tensor([tokens])).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(event.embedding), state / state.norm(), rtol=1e-5, atol=1e-6)


def test_an_embedding_is_asked_without_an_answer() -> None:
    with pytest.raises(BadRequest, match="max_tokens is 2 and must be 1"):
        check_params(SamplingParams(max_tokens=2, embeds=True), model_info())


def test_an_embedding_of_another_pooling_is_refused_by_name(tmp_path: Path) -> None:
    _embedding_model(tmp_path)
    _write_pooling(tmp_path, pooling_mode_mean_tokens=True, pooling_mode_lasttoken=False)
    with pytest.raises(UnsupportedModel, match="pooling_mode_mean_tokens is not supported; pooling_mode_lasttoken is"):
        load(tmp_path)


def test_a_layer_behind_the_pooling_is_refused_by_name(tmp_path: Path) -> None:
    _embedding_model(tmp_path)
    (tmp_path / "modules.json").write_text('[{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]')
    with pytest.raises(UnsupportedModel, match="module 'Dense'"):
        load(tmp_path)


def test_an_embedding_of_another_size_than_config_json_says_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    edit_config(tmp_path, vocab_size=100)
    with pytest.raises(BadCheckpoint, match=r"embed_tokens\.weight` is \(259, 64\); config\.json asks for \(100, 64\)"):
        load(tmp_path)
