"""The linear modules that a spec asks of a checkpoint, with their sizes. Free of torch."""

from collections.abc import Iterator

from engine.model.spec import AttentionSpec, FfnSpec, ModelSpec, MoeSpec


def modules(spec: ModelSpec, attention: AttentionSpec, ffn: FfnSpec | MoeSpec) -> Iterator[tuple[str, int, int, bool]]:
    """Name, outputs, inputs and whether there is a bias, of each linear module of a layer."""
    names, hidden = spec.names, spec.hidden_size
    of_queries, of_keys = (heads * attention.head_dim for heads in (attention.num_heads, attention.num_kv_heads))
    sizes = (of_queries, of_keys, of_keys) if len(names.qkv) == 3 else (of_queries + 2 * of_keys,)
    yield from ((name, size, hidden, attention.qkv_bias) for name, size in zip(names.qkv, sizes, strict=True))
    yield names.out, hidden, of_queries, attention.out_bias
    if isinstance(ffn, FfnSpec):
        yield from _gated(ffn, hidden, names.gate_up, names.down)
        return
    yield names.router, ffn.num_experts, hidden, False
    for index in range(ffn.num_experts):
        place = f"{names.experts}.{index}."
        gate_up = tuple(place + name for name in names.expert_gate_up)
        yield from _gated(ffn.expert, hidden, gate_up, place + names.expert_down)


def _gated(ffn: FfnSpec, hidden: int, gate_up: tuple[str, ...], down: str) -> Iterator[tuple[str, int, int, bool]]:
    for name in gate_up:
        yield name, 2 * ffn.intermediate_size // len(gate_up), hidden, ffn.bias
    yield down, hidden, ffn.intermediate_size, ffn.bias
