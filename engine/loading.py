"""From a configuration to a runner that is ready: which device and arithmetic, what fits, the weights, the first steps.

Refuses what cannot be before a weight is read. `runner.py` has what runs afterwards.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.config import EngineConfig
from engine.errors import BadCheckpoint, BadRequest
from engine.forecast import can_be_captured, compute_dtype, forecast, quantizes_head
from engine.graphs import Capture, DecodeGraphs
from engine.memory import MemoryPlan, Parts, asked_context, batched_tokens, check_weights_fit, plan_cache, with_pool_of
from engine.model.builder import DecoderBuilder
from engine.model.decoder import Decoder
from engine.model.kv_cache import KVCache
from engine.model.spec import ModelSpec
from engine.probing import compile_kernels, measure_workspace, probe_plan
from engine.quant.kept import KeptWeights
from engine.quant.linear import packed_weights
from engine.runner import ModelRunner
from engine.sampling.grammar import GrammarCompiler
from engine.sampling.sampler import Sampler
from engine.types import ModelInfo
from engine.weights.reader import CheckpointReader
from kernels import ops
from kernels.device import Device, open_device, usable_cores, use_threads

Progress = Callable[[str, float], None]


def load_runner(config: EngineConfig, on_progress: Progress) -> ModelRunner:
    """The model in the folder `config.model`, ready to run. `on_progress(stage, fraction)`.

    Raises EngineError: BadCheckpoint, UnsupportedModel, OutOfMemory, BadRequest.
    """
    on_progress("looking at the folder", 0.0)
    checkpoint = open_checkpoint(Path(config.model))
    with open_compilers(config) as processes:
        return make_runner(config, checkpoint, on_progress, processes)


def open_compilers(config: EngineConfig) -> AbstractContextManager[ops.CompileProcesses | None]:
    """Processes that compile kernels for `make_runner`: to be opened before anything asks for the device."""
    return ops.compile_processes(config.device, usable_cores())


def make_runner(
    config: EngineConfig,
    checkpoint: Checkpoint,
    on_progress: Progress,
    processes: ops.CompileProcesses | None = None,
) -> ModelRunner:
    """Read the weights, size the KV pool, run one step to warm up. Without `processes` (of `open_compilers`) kernels
    are compiled in threads. Raises as `load_runner`.
    """
    on_progress("looking at the device", 0.0)
    device = _open_device(config)
    _prepare_kernels(device, on_progress)
    _check_format(config, checkpoint)
    spec = checkpoint.spec
    dtype_name = compute_dtype(config, spec, device.kind)
    dtype = _torch_dtype(dtype_name)
    reader = checkpoint.open_reader(device.torch)
    expected = _expected_parts(config, checkpoint, reader, device, dtype_name)
    _, kv_dtype_name = plan_cache(config, spec, device, expected, dtype_name)  # refuses before anything is read
    grammars = GrammarCompiler(checkpoint.folder, spec.vocab_size, checkpoint.eos_token_ids)
    kv_dtype = _torch_dtype(kv_dtype_name)
    with _kept_weights(config, checkpoint, device, dtype, reader.total_bytes()) as kept:
        builder = _builder(config, checkpoint, reader, device, dtype, kept)
        load = partial(_load_decoder, config, spec, reader, builder, device, kv_dtype)
        allocated = _allocated(device)
        decoder, kernels_are_ready = load(on_progress, processes)
        weights_bytes = decoder.num_bytes if device.kind == "cpu" else expected.weights
        parts = replace(expected, weights=weights_bytes, graphs=expected.graphs if decoder.waits_for_nothing else 0)
        plan, kv_dtype_name = plan_cache(config, spec, device, parts, dtype_name)
        with_weights = _allocated(device)
        cache = _cache(config, spec, device, plan, kv_dtype_name)  # a card's needs a second: kernels are being compiled
        allocated += _allocated(device) - with_weights
        if device.kind == "cuda":
            on_progress("compiling kernels (once for a card and a model; later starts are quick)", 0.85)
        kernels_are_ready()
        notes = _check_products(builder, kept)
    if device.kind == "cuda":
        weights_bytes = _allocated(device) - allocated  # what was kept for the checks is free again

    if config.cache_dir is not None:
        ops.tune(packed_weights(decoder.linears), dtype, Path(config.cache_dir), partial(_show_tuning, on_progress))
    if device.kind == "cuda":
        on_progress("measuring the largest step", 0.92)
        workspace_bytes = measure_workspace(config, decoder, device, cache, plan.report.num_blocks)
        parts = replace(parts, weights=weights_bytes, workspace=workspace_bytes)
        measured, measured_kv = plan_cache(config, spec, device, parts, dtype_name)
        if measured_kv != kv_dtype_name:
            del cache
            cache = _cache(config, spec, device, measured, measured_kv)
        elif measured.report.num_blocks < plan.report.num_blocks:
            cache.resize(measured.report.num_blocks)
        else:  # the pool stays as it is, a little smaller than it might be
            measured = with_pool_of(plan, measured)
        plan = measured
    angle_notes = decoder.set_max_len(plan.max_model_len)
    info = _model_info(config, checkpoint, device, dtype, plan.max_model_len)
    report = replace(plan.report, kv_bytes=cache.num_bytes, notes=(*notes, *plan.report.notes, *angle_notes))
    last_token_ids = torch.zeros(info.max_num_seqs + 1, dtype=torch.int64, device=device.torch)
    sampler = _sampler(info, device)
    graphs = None
    if parts.graphs:
        size = {"max_len": info.max_model_len, "block_size": config.block_size}
        graphs = DecodeGraphs(decoder, cache, sampler, last_token_ids, Capture(parts.graphs), **size)
    runner = ModelRunner(decoder, cache, sampler, grammars, device, info, report, last_token_ids, graphs)

    on_progress("warming up", 0.95)
    probe = probe_plan((1,), config.block_size, len(cache.windows))
    runner.submit(probe).wait()
    _check_first_logits(runner.logits(probe), dtype)
    if graphs is not None:
        graphs.prepare()
    grammars.wait()
    return runner


def expected_parts(config: EngineConfig, checkpoint: Checkpoint) -> Parts:
    """What a load will take, told before it. Raises as `load_runner`."""
    device = _open_device(config)
    dtype = compute_dtype(config, checkpoint.spec, device.kind)
    reader = checkpoint.open_reader(device.torch)
    try:
        return _expected_parts(config, checkpoint, reader, device, dtype)
    finally:
        reader.close()


def _expected_parts(
    config: EngineConfig, checkpoint: Checkpoint, reader: CheckpointReader, device: Device, dtype: str
) -> Parts:
    spec = checkpoint.spec
    uses_graphs = _uses_graphs(checkpoint, device)
    return forecast(config, spec, reader, checkpoint.stated, device, dtype, uses_graphs=uses_graphs)


def _uses_graphs(checkpoint: Checkpoint, device: Device) -> bool:
    """EAGER=1 in the environment leaves them out, to see whether they are at fault."""
    is_wanted = device.kind == "cuda" and os.environ.get("EAGER") != "1"
    return is_wanted and ops.waits_for_nothing() and can_be_captured(checkpoint.spec, checkpoint.stated)


def _check_first_logits(logits: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises BadCheckpoint if they are no numbers: what is not quantised has been checked by nobody else."""
    if num_broken := int((~logits.isfinite()).sum()):
        raise BadCheckpoint(
            f"{num_broken} of the first token's {logits.numel()} logits are infinite or no numbers ({dtype}). "
            "A tensor of the checkpoint is damaged (download it again), or the model needs dtype=bfloat16 or float32."
        )


def _sampler(info: ModelInfo, device: Device) -> Sampler:
    return Sampler(
        max_num_seqs=info.max_num_seqs,
        max_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        device=device.torch,
    )


def _check_format(config: EngineConfig, checkpoint: Checkpoint) -> None:
    found = checkpoint.format.name if checkpoint.format else None
    if config.quantization not in (None, found):
        raise BadRequest(
            f"quantization is {config.quantization!r}, but {checkpoint.folder.name} is {found or 'not quantised'}. "
            "Leave it out, or choose another checkpoint."
        )


def _model_info(
    config: EngineConfig, checkpoint: Checkpoint, device: Device, dtype: torch.dtype, max_model_len: int
) -> ModelInfo:
    spec = checkpoint.spec
    return ModelInfo(
        architecture=spec.architecture,
        quantization=checkpoint.format.name if checkpoint.format else None,
        dtype=str(dtype).removeprefix("torch."),
        device=device.name,
        device_kind=device.kind,
        vocab_size=spec.vocab_size,
        num_layers=len(spec.layers),
        max_model_len=max_model_len,
        context_length=spec.context_length,
        eos_token_ids=checkpoint.eos_token_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=batched_tokens(config, device),
    )


def _open_device(config: EngineConfig) -> Device:
    try:
        device = open_device(config.device, memory_gb=config.gpu_memory_gb)
    except RuntimeError as error:
        raise BadRequest(str(error)) from error
    use_threads(device, config.num_threads or usable_cores())
    return device


def _show_tuning(on_progress: Progress, done: float) -> None:
    on_progress("measuring the card's kernels (once; later loads know)", 0.86 + 0.05 * done)


def _prepare_kernels(device: Device, on_progress: Progress) -> None:
    def show(done: float) -> None:
        stage = "preparing the CPU kernels (compiled once, a minute or two; later starts are quick)"
        on_progress(stage, 0.04 * done)

    try:
        ops.prepare(device, show)
    except RuntimeError as error:
        raise BadRequest(str(error)) from error


def _builder(
    config: EngineConfig,
    checkpoint: Checkpoint,
    reader: CheckpointReader,
    device: Device,
    dtype: torch.dtype,
    kept: KeptWeights | None,
) -> DecoderBuilder:
    is_quantized, dtype_name = checkpoint.format is not None, str(dtype).removeprefix("torch.")
    head_in_8_bits = quantizes_head(config, device.kind, dtype_name, is_quantized=is_quantized)
    spec, fmt = checkpoint.spec, checkpoint.format
    return DecoderBuilder(spec, reader, fmt, device.torch, dtype, kept, quantizes_head=head_in_8_bits)


def _load_decoder(
    config: EngineConfig,
    spec: ModelSpec,
    reader: CheckpointReader,
    builder: DecoderBuilder,
    device: Device,
    kv_dtype: torch.dtype,
    on_progress: Progress,
    processes: ops.CompileProcesses | None,
) -> tuple[Decoder, Callable[[], object]]:
    """The decoder, not checked yet, and what waits for a card's kernels."""
    if device.kind == "cpu":
        check_weights_fit(device, reader.total_bytes())
    kernels_are_ready: Callable[[], object] = tuple

    def on_layer(done: int) -> None:
        on_progress(f"reading weights, layer {done} of {len(spec.layers)}", 0.05 + 0.8 * done / len(spec.layers))

    def compile_early(few: Decoder) -> None:
        nonlocal kernels_are_ready
        if device.kind == "cuda" and few.waits_for_nothing:
            kernels_are_ready = compile_kernels(config, few, device, kv_dtype, builder.checks, processes)

    decoder = builder.build(asked_context(config, spec), on_layer, compile_early)
    unused = builder.unused()
    reader.close()
    if unused:
        shown = ", ".join(unused[:5])
        raise BadCheckpoint(f"{len(unused)} tensors of the checkpoint have no place in {spec.architecture}: {shown}.")
    return decoder, kernels_are_ready


def _allocated(device: Device) -> int:
    """Bytes of a card that tensors hold; KV caches are no tensors of torch's but for their scales."""
    return torch.cuda.memory_allocated() if device.kind == "cuda" else 0


def _check_products(builder: DecoderBuilder, kept: KeptWeights | None) -> tuple[str, ...]:
    """Before the first token, and before packed weights are kept. Returns notes on how they were read."""
    builder.check_products()
    notes = builder.notes
    if kept is None:
        return notes
    kept.finish(notes)
    return (*notes, kept.note) if kept.note else notes


def _cache(config: EngineConfig, spec: ModelSpec, device: Device, plan: MemoryPlan, kv_dtype: str) -> KVCache:
    dtype, num_blocks = _torch_dtype(kv_dtype), plan.report.num_blocks
    return KVCache(spec, num_blocks, config.block_size, dtype, device.torch, config.max_num_seqs)


def _kept_weights(
    config: EngineConfig, checkpoint: Checkpoint, device: Device, dtype: torch.dtype, needed_bytes: int
) -> AbstractContextManager[KeptWeights | None]:
    """Only a card's form is worth it, and only a folder on disk has a place."""
    is_wanted = config.keep_packed and device.kind == "cuda" and checkpoint.format is not None
    if not (is_wanted and checkpoint.folder.is_dir()):
        return nullcontext()
    return closing(KeptWeights(checkpoint.folder, device.torch, dtype, needed_bytes))


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
