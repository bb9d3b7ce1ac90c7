"""Reads one checkpoint into a Decoder, as its ModelSpec says, layer after layer."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.errors import BadCheckpoint
from engine.model.attention import Attention, HeadNorms
from engine.model.decoder import Decoder, Layer, LayerNorms
from engine.model.ffn import GatedFfn, Moe
from engine.model.spec import AttentionSpec, FfnSpec, LayerSpec, ModelSpec, MoeSpec
from engine.quant.base import Format
from engine.quant.check import ProductCheck
from engine.quant.kept import KeptWeights
from engine.quant.linear import DenseLinear, Linear, LinearLoader, W8Linear, place, take_order
from engine.weights.reader import CheckpointReader
from kernels.w8 import quantize_w8

# Where the decoder's tensors lie: by itself; saved without its head (embedding models); beside a part for images.
_ROOTS = ("model.", "", "language_model.model.", "model.language_model.")


def first_of_each_kind(layers: Sequence[LayerSpec]) -> list[int]:
    """Places of layers: the specs say what is alike."""
    return sorted({layer: place for place, layer in reversed(list(enumerate(layers)))}.values())


class DecoderBuilder:
    """Host memory holds one module at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        reader: CheckpointReader,
        fmt: Format | None,
        device: torch.device,
        dtype: torch.dtype,
        kept: KeptWeights | None = None,
        *,
        quantizes_head: bool,
    ) -> None:
        """quantizes_head: to 8 bits, unless the checkpoint has a quantised one."""
        self._spec, self._reader, self._quantizes_head = spec, reader, quantizes_head
        self._linears = LinearLoader(reader, fmt, device, dtype, spec.dtype, kept)
        self._device, self._dtype = device, dtype
        self._root = next((root for root in _ROOTS if reader.has(f"{root}embed_tokens.weight")), "model.")

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to the weights while they were read, in words, one line a kind."""
        left_out = (f"Only text: what this model has for {part} is not loaded." for part in self._left_out)
        return (*self._linears.notes, *left_out)

    @property
    def checks(self) -> tuple[ProductCheck, ...]:
        """Those still to be made: see `check_products`."""
        return self._linears.checks

    def check_products(self) -> None:
        """What was packed is what was read: before the first token, and before it is kept. Raises EngineError."""
        self._linears.check_products()

    @property
    def _left_out(self) -> list[str]:
        """Parts of the model that the checkpoint has and the spec leaves out."""
        there = {part for name in self._reader.names if (part := self._part_left_out(name))}
        return sorted(there)

    def unused(self) -> list[str]:
        """Tensors with no place in the model. Not those of parts left out, and no angles, which are made here."""
        unused = self._reader.unused()
        return [name for name in unused if not (name.endswith("rotary_emb.inv_freq") or self._part_left_out(name))]

    def _part_left_out(self, name: str) -> str | None:
        return self._spec.left_out.get(name.removeprefix("model.").partition(".")[0])

    def build(
        self, max_len: int, on_layer: Callable[[int], None], on_kinds: Callable[[Decoder], None] | None = None
    ) -> Decoder:
        """`max_len` is the longest sequence; `on_layer(n)` is called when n of the spec's layers are there, and
        `on_kinds` early, with a decoder of one layer of each kind and no angles to speak of.
        """
        specs = self._spec.layers
        embedding = place(self._embedding(), self._device, self._dtype)
        norm, head = self._norm(f"{self._root}norm"), self._head(embedding)
        layers: dict[int, Layer] = {}

        def decoder_of(places: Sequence[int], max_len: int) -> Decoder:
            for index in places:
                if index not in layers:
                    layers[index] = self._layer(index)
                    on_layer(len(layers))
            spec = replace(self._spec, layers=tuple(specs[index] for index in places))
            decoder = Decoder(spec, embedding, [layers[index] for index in places], norm, head, self._dtype)
            decoder.set_max_len(max_len)
            return decoder

        if on_kinds is not None:
            on_kinds(decoder_of(first_of_each_kind(specs), 1))
        return decoder_of(range(len(specs)), max_len)

    def _layer(self, index: int) -> Layer:
        prefix, spec = f"{self._root}layers.{index}.", self._spec.layers[index]
        names = self._spec.names
        attention = self._attention(prefix, spec.attention)
        ffn = self._moe(prefix, spec.ffn) if isinstance(spec.ffn, MoeSpec) else self._ffn(prefix, spec.ffn)
        norms = LayerNorms(
            attention=self._norm(prefix + names.attention_norm),
            after_attention=self._norm_if_any(prefix, names.after_attention_norm),
            ffn=self._norm(prefix + names.ffn_norm),
            after_ffn=self._norm_if_any(prefix, names.after_ffn_norm),
            eps=self._spec.norm.eps,
            attention_order=take_order(attention.qkv),
            ffn_order=take_order(ffn.gate_up) if isinstance(ffn, GatedFfn) else None,
        )
        if isinstance(ffn, GatedFfn):
            ffn.fuse()
        return Layer(norms, attention, ffn)

    def _attention(self, prefix: str, spec: AttentionSpec) -> Attention:
        names, hidden = self._spec.names, self._spec.hidden_size
        of_queries, of_keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = [prefix + name for name in names.qkv]
        return Attention(
            spec,
            qkv=self._linear(*qkv, shape=(of_queries + 2 * of_keys, hidden), has_bias=spec.qkv_bias),
            out=self._linear(prefix + names.out, shape=(hidden, of_queries), has_bias=spec.out_bias),
            norms=self._head_norms(f"{prefix}self_attn.") if spec.qk_norm else None,
        )

    def _head_norms(self, prefix: str) -> HeadNorms:
        return HeadNorms(self._norm(f"{prefix}q_norm"), self._norm(f"{prefix}k_norm"), self._spec.norm.eps)

    def _ffn(self, prefix: str, spec: FfnSpec) -> GatedFfn:
        names = self._spec.names
        return self._gated(spec, [prefix + name for name in names.gate_up], prefix + names.down)

    def _moe(self, prefix: str, spec: MoeSpec) -> Moe:
        names = self._spec.names
        experts = []
        for index in range(spec.num_experts):
            place = f"{prefix}{names.experts}.{index}."
            experts.append(
                self._gated(spec.expert, [place + name for name in names.expert_gate_up], place + names.expert_down)
            )
        router = self._linear(prefix + names.router, shape=(spec.num_experts, self._spec.hidden_size))
        return Moe(spec, router, tuple(experts), in_16_bits=self._dtype is not torch.float32)

    def _gated(self, spec: FfnSpec, gate_up: list[str], down: str) -> GatedFfn:
        hidden, width = self._spec.hidden_size, spec.intermediate_size
        return GatedFfn(
            spec.activation,
            gate_up=self._linear(*gate_up, shape=(2 * width, hidden), has_bias=spec.bias),
            down=self._linear(down, shape=(hidden, width), has_bias=spec.bias),
        )

    def _linear(self, *modules: str, shape: tuple[int, int], has_bias: bool = False) -> Linear:
        for module in modules:
            self._check_bias(f"{module}.bias", has_bias)
        return self._linears.load(modules, shape)

    def _check_bias(self, name: str, is_expected: bool) -> None:
        """Quantisers write biases of zeros where the model has none; any other surprise is an error."""
        is_there = self._reader.has(name)
        if is_expected and not is_there:
            raise BadCheckpoint(f"{self._reader.folder.name} has no tensor {name!r}, which its config asks for.")
        if is_there and not is_expected and self._reader.get(name).any():
            raise BadCheckpoint(f"{name!r} of {self._reader.folder.name} is not zero; its config says there is none.")

    def _norm(self, module: str) -> torch.Tensor:
        """The weight of a norm. One less 1 is kept in fp32: the sum in 16 bits would lose half of it."""
        weight = self._reader.get(f"{module}.weight").to(self._device)
        return 1.0 + weight.float() if self._spec.norm.unit_offset else weight.to(self._dtype)

    def _norm_if_any(self, prefix: str, name: str | None) -> torch.Tensor | None:
        return None if name is None else self._norm(prefix + name)

    def _embedding(self) -> torch.Tensor:
        name, wanted = f"{self._root}embed_tokens.weight", (self._spec.vocab_size, self._spec.hidden_size)
        embedding = self._reader.get(name)
        if tuple(embedding.shape) != wanted:
            raise BadCheckpoint(
                f"`{name}` is {tuple(embedding.shape)}; config.json asks for {wanted} (vocab_size, hidden_size). "
                "The two do not belong together: download the model again."
            )
        return embedding

    def _head(self, embedding: torch.Tensor) -> Linear:
        """Tied models may still carry a copy of the head; the config decides, except for a head that was quantised."""
        if self._spec.tie_word_embeddings and not self._linears.is_quantized("lm_head"):
            if self._reader.has("lm_head.weight"):
                self._reader.skip("lm_head.weight")
            return W8Linear(quantize_w8(embedding)) if self._quantizes_head else DenseLinear(embedding, None)
        head = self._linear("lm_head", shape=(self._spec.vocab_size, self._spec.hidden_size))
        if self._quantizes_head and isinstance(head, DenseLinear) and head.bias is None:
            return W8Linear(quantize_w8(head.weight))
        return head
