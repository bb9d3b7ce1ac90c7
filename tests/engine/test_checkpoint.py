"""What a folder says beyond its config's numbers: arithmetic that a family needs, biases, and embedding models."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from engine import runner as runner_module
from engine.config import EngineConfig
from engine.errors import BadCheckpoint, BadRequest, UnsupportedModel
from tests.checkpoints import FAMILIES, tiny_checkpoint
from tests.engine.running import edit_config, load, logits_in_chunks, plan_of, prompt

_DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
_OVERFLOWING = ("gemma2", "gemma3")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_a_card_computes_in_the_checkpoints_16_bits_unless_they_overflow(
    tmp_path: Path, family: str, stored: str
) -> None:
    tiny_checkpoint(tmp_path, family)
    edit_config(tmp_path, dtype=stored)
    spec = runner_module.open_checkpoint(tmp_path).spec
    card, cpu = SimpleNamespace(kind="cuda"), SimpleNamespace(kind="cpu")
    config = EngineConfig(model=str(tmp_path))
    expected = torch.bfloat16 if family in _OVERFLOWING else getattr(torch, stored)
    assert runner_module._compute_dtype(config, spec, card) is expected
    assert runner_module._compute_dtype(config, spec, cpu) is torch.float32


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
    """Two texts at once, one of them in two chunks."""
    model = _embedding_model(tmp_path).model
    runner = load(tmp_path, device)
    short, long = prompt(7), prompt(60, seed=1)
    runner.pooled(plan_of(runner, [(short, 0, 7), (long[:41], 0, 60)]))
    ours = runner.pooled(plan_of(runner, [(short, 0, 7), (long[41:], 41, 60)])).cpu()
    for vector, tokens in zip(ours, (short, long), strict=True):
        state = model(torch.tensor([tokens])).last_hidden_state[0, -1]
        torch.testing.assert_close(vector, state / state.norm(), rtol=1e-5, atol=1e-6)


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
