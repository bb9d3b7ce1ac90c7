"""config.json -> ModelSpec: configs as they lie on the Hub, both dialects, and what is refused by name."""

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import BadCheckpoint, UnsupportedModel
from engine.model.architectures import read_spec
from engine.model.spec import FfnSpec, ModelSpec, MoeSpec, RopeSpec
from tests.checkpoints import FAMILIES, STRETCHED

_TINY = FAMILIES | STRETCHED
_CLASSES = {"phi3": "Phi3", "gemma2": "Gemma2", "gemma3_text": "Gemma3", "qwen3_moe": "Qwen3Moe"}


def _tiny(family: str, **changes: Any) -> dict[str, Any]:
    config = json.loads(_TINY[family].to_json_string())
    name = _CLASSES.get(config["model_type"], config["model_type"].capitalize())
    return {**config, "architectures": [f"{name}ForCausalLM"], **changes}


def _older(config: dict[str, Any]) -> dict[str, Any]:
    """The same in the words of transformers 4."""
    config = dict(config)
    config["torch_dtype"] = config.pop("dtype", None)
    rope = config.pop("rope_parameters")
    if config["model_type"] == "gemma3_text":
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = 2
        del config["layer_types"]
        rope = rope["full_attention"]
    rope = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = None if rope["type"] == "default" else rope
    return config


@pytest.mark.parametrize("family", _TINY)
def test_both_dialects_of_the_config_give_the_same_spec(family: str) -> None:
    assert read_spec(_older(_tiny(family))) == read_spec(_tiny(family))


_COMMON = dict(attention_dropout=0.0, bos_token_id=1, eos_token_id=2, initializer_range=0.02, use_cache=True)
_LLAMA_31_8B = dict(
    **_COMMON,
    architectures=["LlamaForCausalLM"],
    attention_bias=False,
    hidden_act="silu",
    hidden_size=4096,
    intermediate_size=14336,
    max_position_embeddings=131072,
    mlp_bias=False,
    model_type="llama",
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    pretraining_tp=1,
    rms_norm_eps=1e-05,
    rope_scaling=dict(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
        rope_type="llama3",
    ),
    rope_theta=500000.0,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.43.0.dev0",
    unsloth_fixed=True,
    vocab_size=128256,
)
_QWEN25_7B = dict(
    **_COMMON,
    architectures=["Qwen2ForCausalLM"],
    hidden_act="silu",
    hidden_size=3584,
    intermediate_size=18944,
    max_position_embeddings=32768,
    max_window_layers=28,
    model_type="qwen2",
    num_attention_heads=28,
    num_hidden_layers=28,
    num_key_value_heads=4,
    quantization_config=dict(bits=4, group_size=128, quant_method="awq", version="gemm", zero_point=True),
    rms_norm_eps=1e-06,
    rope_scaling=dict(factor=4.0, original_max_position_embeddings=32768, type="yarn"),
    rope_theta=1000000.0,
    sliding_window=131072,
    tie_word_embeddings=False,
    torch_dtype="float16",
    use_sliding_window=False,
    vocab_size=152064,
)
_PHI4_MINI = dict(
    **_COMMON,
    architectures=["Phi3ForCausalLM"],
    attention_bias=False,
    auto_map=dict(AutoConfig="configuration_phi3.Phi3Config"),
    embd_pdrop=0.0,
    full_attn_mod=1,
    hidden_act="silu",
    hidden_size=3072,
    intermediate_size=8192,
    interpolate_factor=1,
    lm_head_bias=False,
    max_position_embeddings=131072,
    mlp_bias=False,
    model_type="phi3",
    num_attention_heads=24,
    num_hidden_layers=32,
    num_key_value_heads=8,
    original_max_position_embeddings=4096,
    partial_rotary_factor=0.75,
    resid_pdrop=0.0,
    rms_norm_eps=1e-05,
    rope_scaling=dict(long_factor=[2.0] * 48, short_factor=[1.0] * 48, type="longrope"),
    rope_theta=10000.0,
    sliding_window=262144,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
    vocab_size=200064,
)
_GEMMA2_2B = dict(
    **_COMMON,
    architectures=["Gemma2ForCausalLM"],
    attention_bias=False,
    attn_logit_softcapping=50.0,
    cache_implementation="hybrid",
    final_logit_softcapping=30.0,
    head_dim=256,
    hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh",
    hidden_size=2304,
    intermediate_size=9216,
    max_position_embeddings=8192,
    model_type="gemma2",
    num_attention_heads=8,
    num_hidden_layers=26,
    num_key_value_heads=4,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-06,
    rope_theta=10000.0,
    sliding_window=4096,
    torch_dtype="bfloat16",
    vocab_size=256000,
)
_GEMMA3_1B = dict(
    **_COMMON,
    architectures=["Gemma3ForCausalLM"],
    attention_bias=False,
    attn_logit_softcapping=None,
    cache_implementation="hybrid",
    final_logit_softcapping=None,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    hidden_size=1152,
    intermediate_size=6912,
    max_position_embeddings=32768,
    model_type="gemma3_text",
    num_attention_heads=4,
    num_hidden_layers=26,
    num_key_value_heads=1,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-06,
    rope_local_base_freq=10000,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=512,
    sliding_window_pattern=6,
    torch_dtype="bfloat16",
    vocab_size=262144,
)
_MIXTRAL_8X7B = dict(
    **_COMMON,
    architectures=["MixtralForCausalLM"],
    hidden_act="silu",
    hidden_size=4096,
    intermediate_size=14336,
    max_position_embeddings=32768,
    model_type="mixtral",
    num_attention_heads=32,
    num_experts_per_tok=2,
    num_hidden_layers=32,
    num_key_value_heads=8,
    num_local_experts=8,
    output_router_logits=False,
    rms_norm_eps=1e-05,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.02,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    vocab_size=32000,
)
_QWEN3_30B_A3B = dict(
    **_COMMON,
    architectures=["Qwen3MoeForCausalLM"],
    attention_bias=False,
    decoder_sparse_step=1,
    head_dim=128,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=6144,
    max_position_embeddings=40960,
    max_window_layers=48,
    mlp_only_layers=[],
    model_type="qwen3_moe",
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_attention_heads=32,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=48,
    num_key_value_heads=4,
    output_router_logits=False,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.001,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    use_sliding_window=False,
    vocab_size=151936,
)


def test_llama_3_as_it_lies_on_the_hub() -> None:
    spec = read_spec(_LLAMA_31_8B)
    (attention,) = {layer.attention for layer in spec.layers}
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.window) == (32, 8, 128, None)
    assert attention.rope == RopeSpec(
        kind="llama3", theta=500000.0, rotary_dim=128, factor=8.0, original_length=8192, high_freq_factor=4.0
    )
    assert (spec.context_length, spec.dtype, spec.tie_word_embeddings) == (131072, "bfloat16", False)


def test_qwen_25_with_yarn_as_its_model_card_says_has_the_longer_context() -> None:
    spec = read_spec(_QWEN25_7B)
    assert spec.context_length == 131072
    assert {layer.attention.window for layer in spec.layers} == {None}
    assert spec.layers[0].attention.qkv_bias and not spec.layers[0].attention.out_bias


def test_phi_4_mini_as_it_lies_on_the_hub() -> None:
    spec = read_spec(_PHI4_MINI)
    rope = spec.layers[0].attention.rope
    assert (rope.kind, rope.rotary_dim, rope.original_length) == ("longrope", 96, 4096)
    assert rope.attention_factor == pytest.approx(1.1902380714238083)  # sqrt(1 + ln 32 / ln 4096)
    assert spec.context_length == 131072


def test_gemma_2_as_it_lies_on_the_hub() -> None:
    spec = read_spec(_GEMMA2_2B)
    assert [layer.attention.window for layer in spec.layers[:4]] == [4096, None, 4096, None]
    assert spec.layers[0].attention.softcap == 50.0 and spec.logit_softcap == 30.0
    assert spec.layers[0].ffn == FfnSpec(intermediate_size=9216, activation="gelu_tanh")
    assert spec.tie_word_embeddings and spec.overflows_float16 and spec.embedding_scale == 48.0


def test_gemma_3_as_it_lies_on_the_hub() -> None:
    spec = read_spec(_GEMMA3_1B)
    assert [layer.attention.window for layer in spec.layers[:7]] == [512] * 5 + [None, 512]
    assert [layer.attention.rope.theta for layer in spec.layers[4:6]] == [10_000, 1_000_000]
    assert spec.logit_softcap is None and spec.layers[0].attention.softcap is None


_GEMMA3_4B = dict(
    architectures=["Gemma3ForConditionalGeneration"],
    boi_token_index=255999,
    eoi_token_index=256000,
    eos_token_id=[1, 106],
    image_token_index=262144,
    initializer_range=0.02,
    mm_tokens_per_image=256,
    model_type="gemma3",
    text_config=dict(
        hidden_size=2560,
        intermediate_size=10240,
        model_type="gemma3_text",
        num_hidden_layers=34,
        rope_scaling=dict(factor=8.0, rope_type="linear"),
        sliding_window=1024,
    ),
    torch_dtype="bfloat16",
    vision_config=dict(hidden_size=1152, model_type="siglip_vision_model"),
)


def test_the_text_part_of_gemma_3_as_it_lies_on_the_hub() -> None:
    spec = read_spec(_GEMMA3_4B)
    attention = spec.layers[5].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.scale) == (8, 4, 256, 1 / 16)
    assert attention.rope == RopeSpec(kind="linear", theta=1_000_000.0, rotary_dim=256, factor=8.0)
    assert spec.layers[4].attention.rope == RopeSpec(theta=10_000.0, rotary_dim=256)
    assert (spec.dtype, spec.vocab_size, spec.context_length) == ("bfloat16", 262208, 131072)
    with pytest.raises(UnsupportedModel, match=r"settings that we do not know for the text part of Gemma 3.*sinks=4"):
        read_spec({**_GEMMA3_4B, "text_config": {**_GEMMA3_4B["text_config"], "sinks": 4}})


def test_mixtral_as_it_lies_on_the_hub() -> None:
    (ffn,) = {layer.ffn for layer in read_spec(_MIXTRAL_8X7B).layers}
    assert ffn == MoeSpec(expert=FfnSpec(intermediate_size=14336), num_experts=8, num_chosen=2, renormalise=True)


def test_qwen3_moe_as_it_lies_on_the_hub() -> None:
    spec = read_spec(_QWEN3_30B_A3B)
    (ffn,) = {layer.ffn for layer in spec.layers}
    assert ffn == MoeSpec(expert=FfnSpec(intermediate_size=768), num_experts=128, num_chosen=8, renormalise=True)
    assert spec.layers[0].attention.qk_norm


def test_experts_lie_in_every_sparse_step_but_not_in_layers_named_dense() -> None:
    spec = read_spec({**_QWEN3_30B_A3B, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    dense, sparse = FfnSpec, MoeSpec
    assert [type(layer.ffn) for layer in spec.layers] == [dense, sparse, dense, dense, dense, sparse]


@pytest.mark.parametrize("family", _TINY)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_sinks", True),
        ("kv_lora_rank", 512),
        ("attention_multiplier", 0.0078125),
        ("residual_multiplier", 0.22),
        ("clip_qkv", 8.0),
        ("use_bidirectional_attention", True),
        ("no_rope_layers", [1, 0]),
        ("attention_type", "mla"),
    ],
)
def test_a_setting_that_nobody_computes_is_refused_by_name(family: str, key: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=f"{key}="):
        read_spec(_tiny(family, **{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("is_llama_config", True),
        ("clip_qkv", None),
        ("use_bidirectional_attention", False),
        ("residual_multiplier", 1.0),
        ("_note", "x"),
    ],
)
def test_a_setting_that_is_switched_off_changes_nothing(key: str, value: object) -> None:
    assert read_spec(_tiny("gemma2", **{key: value})) == read_spec(_tiny("gemma2"))


def test_a_softcap_that_gemma_3_would_ignore_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="attn_logit_softcapping=50"):
        read_spec(_tiny("gemma3", attn_logit_softcapping=50.0))


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "GptOssForCausalLM"])
def test_an_unknown_architecture_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{name} is not supported.*Gemma2ForCausalLM.*Qwen3MoeForCausalLM"):
        read_spec(_tiny("llama", architectures=[name]))


@pytest.mark.parametrize("dialect", ["rope_parameters", "rope_scaling"])
def test_an_unknown_kind_of_rope_is_refused_by_name(dialect: str) -> None:
    config = _tiny("llama")
    del config["rope_parameters"]
    with pytest.raises(UnsupportedModel, match="'mrope' is not supported; default, linear, dynamic, llama3, yarn"):
        read_spec({**config, dialect: {"rope_type": "mrope", "mrope_section": [16, 24, 24]}})


def test_an_unknown_number_of_a_known_rope_is_refused_by_name() -> None:
    rope = {**_tiny("llama3")["rope_parameters"], "mrope_section": [16, 24, 24]}
    with pytest.raises(UnsupportedModel, match=r"rope_parameters of config\.json.*mrope_section"):
        read_spec(_tiny("llama3", rope_parameters=rope))


def test_ropes_of_gemma_3_for_layer_types_that_it_does_not_have_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="rope_theta=5"):
        read_spec(_tiny("gemma3", rope_parameters={"rope_type": "default", "rope_theta": 5.0}))


def test_two_dialects_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(BadCheckpoint, match="`rope_scaling` and `rope_parameters`, which differ"):
        read_spec(_tiny("llama3", rope_scaling={"type": "linear", "factor": 2.0}))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
def test_heads_rotated_in_part_are_refused_in_families_that_rotate_them_whole(family: str) -> None:
    config = _older(_tiny(family))
    assert read_spec({**config, "partial_rotary_factor": 1.0}) == read_spec(config)
    with pytest.raises(UnsupportedModel, match=r"partial_rotary_factor=0\.5"):
        read_spec({**config, "partial_rotary_factor": 0.5})


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_a_stretch_that_nobody_tells_is_refused_by_name(kind: str) -> None:
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 10000.0, **lists}
    untold = _tiny("phi3_longrope", rope_parameters=rope, original_max_position_embeddings=None)
    with pytest.raises(BadCheckpoint, match="has no 'factor'"):
        read_spec(untold)
    told = {**untold, "max_position_embeddings": 4096, "original_max_position_embeddings": 1024}
    assert read_spec(told).layers[0].attention.rope.factor == 4.0


def test_longrope_with_factors_for_another_head_is_refused_with_both_counts() -> None:
    rope = {**_tiny("phi3_longrope")["rope_parameters"], "short_factor": [1.0] * 5}
    with pytest.raises(BadCheckpoint, match="5 short and 6 long factors; 12 rotated numbers need 6 of each"):
        read_spec(_tiny("phi3_longrope", rope_parameters=rope))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"]}, "Layer type 'chunked_attention' is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 of 2 layers"),
        ({"layer_types": ["sliding_attention"] * 2}, "no sliding_window says how much"),
        ({"hidden_act": "relu2"}, "Activation 'relu2' is not supported; silu, "),
        ({"rms_norm_eps": None}, "config.json has no 'rms_norm_eps'"),
        ({"vocab_size": None}, "config.json has no 'vocab_size'"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_the_value(changes: dict[str, object], words: str) -> None:
    with pytest.raises((UnsupportedModel, BadCheckpoint), match=words):
        read_spec(_tiny("qwen2", **changes))


@pytest.mark.parametrize("family", ["llama", "mistral", "phi3", "mixtral", "qwen3_moe"])
def test_layer_types_may_repeat_what_all_layers_are_and_not_contradict_it(family: str) -> None:
    spec = read_spec(_tiny(family))
    kinds = ["full_attention" if window is None else "sliding_attention" for window in _windows(spec)]
    assert read_spec(_tiny(family, layer_types=kinds)) == spec
    with pytest.raises(UnsupportedModel, match=f"by the rest of config.json every layer is {kinds[0]}"):
        read_spec(_tiny(family, layer_types=["full_attention", "sliding_attention"]))


def test_window_layers_of_qwen_begin_where_the_config_says() -> None:
    config = _tiny("qwen2_window", num_hidden_layers=5, max_window_layers=3)
    del config["layer_types"]
    assert _windows(read_spec(config)) == [None, None, None, 24, 24]
    assert _windows(read_spec({**config, "use_sliding_window": False})) == [None] * 5


def _windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.layers]


def test_a_layers_cache_is_what_its_attention_writes() -> None:
    spec = read_spec(_tiny("gemma2"))
    window, full = (layer.cache for layer in spec.layers)
    assert (window.window, full.window) == (24, None)
    assert replace(window, window=None) == full
    assert (full.num_kv_heads, full.head_dim) == (2, 32)
