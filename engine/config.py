"""What was asked of an engine. Small, frozen, checked at the door; what came out is `ModelInfo` and `MemoryReport`."""

from dataclasses import dataclass
from typing import get_args, get_type_hints

from engine.errors import BadRequest

_KV_DTYPES = ("auto", "fp32", "fp16", "bf16", "int8")
_DTYPES = ("auto", "float32", "float16", "bfloat16")
_POLICIES = ("fcfs", "priority")
_DEVICES = ("auto", "cpu", "cuda")
_HEADS = ("auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """
    model                   folder of a checkpoint (config.json, *.safetensors)
    quantization            the format that the checkpoint must have (gptq, awq, ...); None takes what it has
    device                  auto takes the first CUDA card, else the CPU
    dtype                   arithmetic; auto is float32 on a CPU and the checkpoint's 16-bit type on a card
    max_model_len           tokens a sequence may hold; None takes the model's context, or what fits
    max_num_seqs            sequences that run at once; more wait
    max_num_batched_tokens  tokens computed in one step at most; None picks 512 on a CPU, 2048 on a card, 8192 on
                            one of 40 GB and more
    max_queued_requests     requests that may wait; one more is refused
    scheduler_policy        fcfs: by arrival; priority: by class and priority, which without either is by arrival too
    target_itl_ms           time between two tokens of a running answer that new prompts should not exceed; twice what a
                            step takes in which all answer who run or wait, if that is longer
    gpu_memory_utilization  share of the card's total memory that this engine may use, 0 < x <= 1 (CUDA)
    gpu_memory_gb           memory of the card to act as, in GB as cards are sold (2**30 bytes); None is the card's own
    kv_gb                   KV cache in GB (1e9 bytes), on a card at most; None takes what is left there, and on a CPU a
                            quarter of free memory, at most 4
    kv_cache_dtype          auto follows dtype; int8 has a scale per token and head
    keep_packed             4-bit weights as a card holds them stay beside the checkpoint (as large again), so that the
                            next load need not unpack (CUDA)
    quantize_lm_head        on: the head is held in 8 bits; auto: that of a 4-bit model in 16-bit arithmetic on a card
    seed                    base of the seeds drawn for requests that bring none; None is fresh each start
    num_threads             CPU threads; None takes every core this process may use
    cache_dir               folder for the fastest configurations of the card's kernels, measured at the first load;
                            None measures nothing: the table's choices stay (CUDA)
    """

    model: str
    quantization: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    max_queued_requests: int = 1024
    scheduler_policy: str = "priority"
    target_itl_ms: float = 50.0
    gpu_memory_utilization: float = 0.90
    gpu_memory_gb: float | None = None
    kv_gb: float | None = None
    kv_cache_dtype: str = "auto"
    quantize_lm_head: str = "auto"
    block_size: int = 16
    enable_prefix_caching: bool = True
    keep_packed: bool = True
    seed: int | None = None
    num_threads: int | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            _of_kind(name, getattr(self, name), kinds)
        _one_of("device", self.device, _DEVICES)
        _one_of("dtype", self.dtype, _DTYPES)
        _one_of("scheduler_policy", self.scheduler_policy, _POLICIES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, _KV_DTYPES)
        _one_of("quantize_lm_head", self.quantize_lm_head, _HEADS)
        for name in ("max_model_len", "max_num_batched_tokens", "num_threads"):
            value = getattr(self, name)
            if value is not None:
                _at_least_one(name, value)
        for name in ("max_num_seqs", "max_queued_requests", "block_size"):
            _at_least_one(name, getattr(self, name))
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise BadRequest(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1."
            )
        if not self.target_itl_ms > 0:
            raise BadRequest(f"target_itl_ms is {self.target_itl_ms}; it must be above 0.")
        if self.kv_gb is not None and not self.kv_gb > 0:
            raise BadRequest(f"kv_gb is {self.kv_gb}; it must be above 0.")


# What each field may be: "int | None" is int and NoneType. A whole number will do for a float; a bool is no number.
_KINDS = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(EngineConfig).items()}


def _of_kind(name: str, value: object, kinds: tuple[type, ...]) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if type(value) not in kinds and not (is_number and float in kinds):
        words = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise BadRequest(f"{name} is {value!r}; it must be of type {words}.")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadRequest(f"{name} is {value!r}; it must be one of {', '.join(allowed)}.")


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise BadRequest(f"{name} is {value}; it must be at least 1.")
