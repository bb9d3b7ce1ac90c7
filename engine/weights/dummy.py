"""Random weights of any spec, made where they are asked for: the face of a checkpoint without a file. For benches.

Numbers are of the size that trained ones have, so that activations stay finite through every layer; the packed forms
are those of the files, so that a load does what it does with a real checkpoint.
"""

from collections.abc import Callable
from math import prod
from pathlib import Path

import torch

from engine.errors import BadCheckpoint
from engine.model.spec import ModelSpec, MoeSpec
from engine.weights.modules import modules

GROUP_SIZE = 128
_CODES_STD = {"gptq": 4.2, "awq": 4.6}  # of 4-bit codes: see `_about_8`; uniform

_Make = Callable[[], torch.Tensor]


class DummyReader:
    """An `engine.weights.reader.CheckpointReader`. `quant` is gptq (symmetric), awq, or None for dense."""

    def __init__(self, name: str, spec: ModelSpec, quant: str | None, device: torch.device) -> None:
        self.folder = Path(name)
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self._dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float16
        self._make: dict[str, _Make] = {}
        self._headers: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._asked: set[str] = set()
        self._plan(spec, quant)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._make)

    def has(self, name: str) -> bool:
        return name in self._make

    def get(self, name: str) -> torch.Tensor:
        if name not in self._make:
            raise BadCheckpoint(f"{self.folder.name} has no tensor {name!r}: dummy weights lack it.")
        self._asked.add(name)
        return self._make[name]()

    def header(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self._headers[name]

    def skip(self, name: str) -> None:
        self._asked.add(name)

    def unused(self) -> list[str]:
        return sorted(self.names - self._asked)

    def total_bytes(self) -> int:
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self._headers.values())

    def close(self) -> None:
        self._make.clear()

    def _plan(self, spec: ModelSpec, quant: str | None) -> None:
        hidden = spec.hidden_size
        self._dense("model.embed_tokens.weight", (spec.vocab_size, hidden), 0.02)
        self._norm("model.norm", hidden, spec)
        if not spec.tie_word_embeddings:
            self._dense("lm_head.weight", (spec.vocab_size, hidden), hidden**-0.5)
        module = {None: self._dense_module, "gptq": self._gptq, "awq": self._awq}[quant]
        names = spec.names
        norms = (names.attention_norm, names.ffn_norm, names.after_attention_norm, names.after_ffn_norm)
        for index, layer in enumerate(spec.layers):
            prefix = f"model.layers.{index}."
            for norm in filter(None, norms):
                self._norm(prefix + norm, hidden, spec)
            if layer.attention.qk_norm:
                for norm in ("q_norm", "k_norm"):
                    self._norm(f"{prefix}self_attn.{norm}", layer.attention.head_dim, spec)
            for name, num_outputs, num_inputs, has_bias in modules(spec, layer.attention, layer.ffn):
                is_router = name == names.router and isinstance(layer.ffn, MoeSpec)
                (self._dense_module if is_router else module)(prefix + name, num_outputs, num_inputs)
                if has_bias:
                    self._dense(f"{prefix}{name}.bias", (num_outputs,), 0.02)

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, make: _Make) -> None:
        self._make[name] = make
        self._headers[name] = shape, dtype

    def _dense(self, name: str, shape: tuple[int, ...], std: float) -> None:
        def make() -> torch.Tensor:
            numbers = torch.randn(shape, generator=self._generator, dtype=self._dtype, device=self._device)
            return numbers.mul_(std)

        self._add(name, shape, self._dtype, make)

    def _constant(self, name: str, shape: tuple[int, ...], value: float, dtype: torch.dtype) -> None:
        self._add(name, shape, dtype, lambda: torch.full(shape, value, dtype=dtype, device=self._device))

    def _words(self, name: str, shape: tuple[int, int], arrange: Callable[[torch.Tensor], torch.Tensor]) -> None:
        def make() -> torch.Tensor:
            low, high = -(2**31), 2**31
            words = torch.randint(low, high, shape, generator=self._generator, dtype=torch.int32, device=self._device)
            return arrange(words)

        self._add(name, shape, torch.int32, make)

    def _norm(self, module: str, size: int, spec: ModelSpec) -> None:
        self._constant(f"{module}.weight", (size,), 0.0 if spec.norm.unit_offset else 1.0, self._dtype)

    def _dense_module(self, module: str, num_outputs: int, num_inputs: int) -> None:
        self._dense(f"{module}.weight", (num_outputs, num_inputs), num_inputs**-0.5)

    def _gptq(self, module: str, num_outputs: int, num_inputs: int) -> None:
        self._words(f"{module}.qweight", (num_inputs // 8, num_outputs), _about_8)
        zeros = 0x77777777  # stored less one: the middle, 8
        self._groups(module, num_outputs, num_inputs, zeros, _CODES_STD["gptq"])

    def _awq(self, module: str, num_outputs: int, num_inputs: int) -> None:
        self._words(f"{module}.qweight", (num_inputs, num_outputs // 8), lambda words: words)
        zeros = 0x78787878  # 7 and 8 in turns, so that what outputs have in common cancels
        self._groups(module, num_outputs, num_inputs, zeros, _CODES_STD["awq"])

    def _groups(self, module: str, num_outputs: int, num_inputs: int, zeros: int, codes_std: float) -> None:
        num_groups = -(-num_inputs // GROUP_SIZE)
        self._constant(f"{module}.qzeros", (num_groups, num_outputs // 8), zeros, torch.int32)
        scale = num_inputs**-0.5 / codes_std
        self._constant(f"{module}.scales", (num_groups, num_outputs), scale, torch.float16)


def _about_8(words: torch.Tensor) -> torch.Tensor:
    """int32 words of eight codes: each 0 becomes 8, so that the mean is 8, which stands for nought.

    Weights whose mean is not nought add the same to every output, and each layer multiplies that: with uniform codes
    (mean 7.5) 64 layers of Qwen3-32B's sizes went beyond what fp16 holds.
    """
    some_bit = words | words >> 1
    some_bit |= some_bit >> 2
    return words | (~some_bit & 0x11111111) << 3
