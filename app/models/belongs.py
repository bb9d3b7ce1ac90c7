"""Whether a checkpoint's tensors are those that its config asks for: names and sizes, from the headers alone."""

from collections.abc import Iterator
from math import prod

from app.models.outline import Outline
from engine.model.spec import LayerSpec, MoeSpec
from engine.weights.modules import modules

_EMBEDDING = "embed_tokens.weight"
_CODES = ("qweight", "weight_packed")
_WIDTHS = (2, 3, 4, 8)  # bits of a packed weight; a checkpoint may mix them
_PADDING = 0.02  # share of a packed tensor that may fill up its last words
_MOST_TOLD = 3


def strangers(outline: Outline) -> str:
    """What does not belong together, in words; "" where all does."""
    found = list(_faults(outline))
    more = f", and {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
    return "; ".join(found[:_MOST_TOLD]) + more


def _faults(outline: Outline) -> Iterator[str]:
    spec = outline.spec
    embedding = next((name for name in outline.names if name.endswith(_EMBEDDING)), None)
    if embedding is None:
        yield f"it has no tensor {_EMBEDDING}"
        return
    yield from _shape_fault(outline, embedding, (spec.vocab_size, spec.hidden_size))
    for index, layer in enumerate(spec.layers):
        yield from _layer_faults(outline, f"{embedding.removesuffix(_EMBEDDING)}layers.{index}.", layer)


def _layer_faults(outline: Outline, prefix: str, layer: LayerSpec) -> Iterator[str]:
    spec, names = outline.spec, outline.spec.names
    norms = (names.attention_norm, names.ffn_norm, names.after_attention_norm, names.after_ffn_norm)
    for norm in filter(None, norms):
        yield from _shape_fault(outline, f"{prefix}{norm}.weight", (spec.hidden_size,))
    for name, num_outputs, num_inputs, _ in modules(spec, layer.attention, layer.ffn):
        is_router = isinstance(layer.ffn, MoeSpec) and name == names.router
        yield from _module_fault(outline, prefix + name, (num_outputs, num_inputs), may_be_packed=not is_router)


def _module_fault(outline: Outline, module: str, wanted: tuple[int, int], *, may_be_packed: bool) -> Iterator[str]:
    packed = next((f"{module}.{part}" for part in _CODES if f"{module}.{part}" in outline.tensors), None)
    if packed is None or not may_be_packed:
        yield from _shape_fault(outline, f"{module}.weight", wanted)
        return
    shape, stored = outline.header(packed)
    bits = prod(shape) * stored.itemsize * 8 / prod(wanted)
    if not any(width <= bits <= width * (1 + _PADDING) for width in _WIDTHS):
        yield f"{packed} is {_told(shape)}, {bits:.2f} bits a weight of the {_told(wanted)} that config.json asks"


def _shape_fault(outline: Outline, name: str, wanted: tuple[int, ...]) -> Iterator[str]:
    if name not in outline.tensors:
        yield f"it has no tensor {name}"
    elif (shape := outline.header(name)[0]) != wanted:
        yield f"{name} is {_told(shape)}; config.json asks for {_told(wanted)}"


def _told(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
