"""config.json, read key by key, so that a key which nobody asked for cannot change a model's numbers unseen."""

from collections.abc import Mapping
from typing import Any

from engine.errors import BadCheckpoint, UnsupportedModel

# Bookkeeping, training, other programs' notes, and what other parts of Fireside read: none of it changes the logits.
_HARMLESS_KEYS = """
    architectures auto_map model_type model_name name_or_path torch_dtype dtype transformers_version tokenizer_class
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id
    quantization_config compression_config use_cache cache_implementation use_bfloat16 torchscript tf_legacy_loss
    initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop classifier_dropout pretraining_tp
    router_aux_loss_coef router_jitter_noise output_router_logits output_attentions output_hidden_states return_dict
    gradient_checkpointing id2label label2id num_labels problem_type task_specific_params finetuning_task
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    max_sequence_length model_max_length tokenizer_model_max_length seq_length attn_implementation use_flash_attn
    unsloth_fixed unsloth_version is_llama_config transformers.js_config
"""
_HARMLESS = frozenset(_HARMLESS_KEYS.split())
# What a key that we do not compute says where it changes nothing.
_OFF: dict[str, Any] = {
    "partial_rotary_factor": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "full_attn_mod": 1,  # Phi-4-mini: every layer attends to all
    "interpolate_factor": 1,
}


class ConfigReader:
    """Values by key; `refuse_unread` at the end tells what was there and not asked for."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values, self._where = values, where
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The default stands for an absent key only: null is a value, which switches things off."""
        self._asked.add(key)
        return self._values.get(key, default)

    def need(self, key: str) -> Any:
        """Raises BadCheckpoint for a key that is absent or null."""
        value = self.get(key)
        if value is None:
            raise BadCheckpoint(f"{self._where} has no {key!r}.")
        return value

    def need_any(self, *keys: str) -> Any:
        """The value of a key that has had several names."""
        self.ignore(*keys)
        return self.need(next((key for key in keys if key in self._values), keys[0]))

    def part(self, key: str) -> "ConfigReader":
        """A reader of the object under `key`; of an empty one where there is none."""
        return ConfigReader(self.get(key) or {}, f"{key} of {self._where}")

    def ignore(self, *keys: str) -> None:
        """Mark keys as known and without meaning in this place."""
        self._asked.update(keys)

    def refuse_unread(self, subject: str) -> None:
        """Raises UnsupportedModel for keys that were not asked for, unless they are switched off or bookkeeping."""
        unread = {
            key: value for key, value in self._values.items() if key not in self._asked and not _is_idle(key, value)
        }
        if unread:
            shown = ", ".join(f"{key}={value!r}" for key, value in sorted(unread.items()))
            raise UnsupportedModel(
                f"{self._where} has settings that we do not know for {subject}, and they may change what it computes: "
                f"{shown:.300}. If one surely changes nothing, delete it from the file."
            )


def _is_idle(key: str, value: Any) -> bool:
    """Whether a key that nobody asked for changes nothing: bookkeeping, or switched off."""
    return key.startswith("_") or key in _HARMLESS or not value or (key in _OFF and value == _OFF[key])
