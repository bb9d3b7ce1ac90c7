"""ModelRunner: a plan in, one token id for each sequence that samples out. Owns the weights, the KV cache, and what is
kept of a running sequence between its steps: the id that it sampled last, in its slot's row.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import normalize

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.config import EngineConfig
from engine.errors import BadCheckpoint, BadRequest, OutOfMemory
from engine.forecast import batched_tokens, can_be_captured, compute_dtype, forecast, quantizes_head
from engine.forward import forward_batch, on_device
from engine.graphs import Capture, DecodeGraphs
from engine.landing import Embeddings, Landings, PromptPart, output_of
from engine.memory import Parts, asked_context, check_weights_fit, plan_cache
from engine.model.builder import DecoderBuilder
from engine.model.decoder import Decoder
from engine.model.kv_cache import KVCache
from engine.model.spec import ModelSpec
from engine.plan import BatchPlan, FinishedStep, Grammar, PendingStep, ScheduledSequence
from engine.quant.kept import KeptWeights
from engine.quant.linear import packed_weights
from engine.replay import Replay
from engine.sampling.grammar import GrammarCompiler
from engine.sampling.logprobs import prompt_logprobs_of
from engine.sampling.sampler import Sampled, Sampler
from engine.types import DeviceMemory, GrammarSpec, MemoryReport, ModelInfo, SamplingParams
from engine.weights.reader import CheckpointReader
from kernels import ops
from kernels.device import Device, open_device, usable_cores, use_threads

Progress = Callable[[str, float], None]

_LOGIT_ROWS = 128  # rows of logits that exist at once: 25 MB at a vocabulary of 49,152, 78 MB at 152,000


class ModelRunner:
    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        sampler: Sampler,
        grammars: GrammarCompiler,
        device: Device,
        info: ModelInfo,
        memory: MemoryReport,
        last_token_ids: torch.Tensor,
        graphs: DecodeGraphs | None,
    ) -> None:
        """last_token_ids [slots + 1] int64: the last one is nobody's."""
        self._decoder, self._cache, self._device = decoder, cache, device
        self._sampler, self._grammars = sampler, grammars
        self._replay = Replay(decoder, cache, memory.block_size) if device.kind == "cpu" else None
        self.info, self.memory = info, memory
        # On a CPU the host computes the step: while it plans the next one there is nothing that could run.
        self.steps_ahead = 0 if device.kind == "cpu" else 1
        self._last_token_ids, self._graphs = last_token_ids, graphs
        self._landings = None if device.kind == "cpu" else Landings(info.max_num_seqs, 1 + self.steps_ahead)

    @torch.inference_mode()
    def logits(self, plan: BatchPlan) -> torch.Tensor:
        """[samples, vocab] fp32: of each sequence that samples, in plan order. Writes the plan's KV."""
        hidden, sample_rows = self._hidden(plan)
        return self._decoder.logits(hidden[sample_rows])

    @torch.inference_mode()
    def submit(self, plan: BatchPlan) -> PendingStep:
        """Start the step. On a card this returns before it is done; nothing in here may wait for the device."""
        if self._graphs is not None and self._graphs.takes(plan):
            return self._land(self._decode(self._graphs, plan), [])
        return self._land(*self._compute(plan))

    def _land(self, sampled: Sampled, prompts: list[PromptPart], embeddings: Embeddings | None = None) -> PendingStep:
        if self._landings is None:
            return FinishedStep(output_of(sampled, prompts, embeddings))
        return self._landings.send(sampled, prompts, embeddings)

    def _decode(self, graphs: DecodeGraphs, plan: BatchPlan) -> Sampled:
        only_chooses = self._sampler.only_chooses(plan.sequences)  # before the step, which reads their parameters
        logits, token_ids, slots = graphs.run(plan)
        if only_chooses:
            return Sampled(token_ids)
        sampled = self._sampler.sample(logits, plan.sequences)
        self._last_token_ids[slots] = sampled.token_ids
        return sampled

    def _compute(self, plan: BatchPlan) -> tuple[Sampled, list[PromptPart], Embeddings | None]:
        """A step of any kind."""
        hidden, sample_rows = self._hidden(plan)
        prompts = self._prompt_logprobs(plan, hidden)
        sampling = [sequence for sequence in plan.sequences if sequence.samples]
        slots = on_device([sequence.slot for sequence in sampling], torch.int64, self._device.torch)
        sampled = Sampled(slots)
        if sampling:
            sampled = self._sampler.sample(self._decoder.logits(hidden[sample_rows]), sampling)
        self._last_token_ids[slots] = sampled.token_ids
        places = [place for place, sequence in enumerate(sampling) if sequence.params.embeds]
        return sampled, prompts, self._embeddings(hidden, sample_rows, places) if places else None

    def _embeddings(self, hidden: torch.Tensor, sample_rows: torch.Tensor, places: list[int]) -> Embeddings:
        """Last tokens' states after the last norm, at length 1, as embedding models on this decoder are trained.

        Source: Zhang et al. 2025, Qwen3 Embedding
        """
        rows = sample_rows[on_device(places, torch.int64, self._device.torch)]
        return Embeddings(tuple(places), normalize(hidden[rows].float(), dim=-1))

    def device_memory(self) -> DeviceMemory | None:
        """Of the card now; None on a CPU."""
        if self._device.kind == "cpu":
            return None
        free = self._device.free_bytes()
        return DeviceMemory(used_bytes=self._device.total_bytes() - free, free_bytes=free)

    def blocks_within(self, kv_bytes: int) -> int:
        """See `engine.engine.Runner`."""
        if not self._cache.can_be_resized:
            raise BadRequest("The KV cache lies in the computer's main memory; only a card's is given back.")
        return self._cache.blocks_within(kv_bytes)

    @torch.inference_mode()
    def resize_kv(self, num_blocks: int, moves: Mapping[int, int]) -> None:
        """See `engine.engine.Runner`."""
        self._cache.copy_blocks(tuple(moves.items()))
        try:
            self._cache.resize(num_blocks)
        except MemoryError as error:
            raise OutOfMemory(
                f"The KV cache cannot have {num_blocks * self.memory.block_size} tokens again: "
                f"{self._device.free_bytes() / 1e9:.2f} GB are free on {self._device.name}. Close other programs."
            ) from error
        self.memory = replace(self.memory, num_blocks=num_blocks, kv_bytes=self._cache.num_bytes)

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        """Safe in any thread. Raises BadRequest."""
        return self._grammars.compile(spec)

    def _hidden(self, plan: BatchPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, hidden] of the whole plan after the last norm, and the rows of those that sample."""
        batch = forward_batch(plan, self.memory.block_size, self._device.torch, self._last_token_ids)
        if self._replay is not None:
            return self._replay.hidden(batch), batch.sample_rows
        return self._decoder.hidden(batch, self._cache), batch.sample_rows

    def _prompt_logprobs(self, plan: BatchPlan, hidden: torch.Tensor) -> list[PromptPart]:
        """Of the prompts whose requests ask, until their first token has come."""
        parts, bound = [], 0
        for place, sequence in enumerate(plan.sequences):
            first, bound = bound, bound + sequence.num_tokens
            count, following = sequence.params.prompt_logprobs, _following(sequence)
            if count is not None and following:
                rows = hidden[first : first + len(following)]
                token_ids = on_device(following, torch.int64, self._device.torch)
                logprobs = prompt_logprobs_of(rows, self._decoder.logits, token_ids, count)
                parts.append(PromptPart(place, count, logprobs))
        return parts

    @torch.inference_mode()
    def logits_of_all(self, token_ids: tuple[int, ...]) -> Iterator[torch.Tensor]:
        """[rows, vocab] fp32 after every token of one sequence, in order, at most `_LOGIT_ROWS` rows at a time.

        Writes the cache from block 0 on, whatever lies there: for tools that run no engine on this runner.
        """
        size = self.memory.block_size
        for start in range(0, len(token_ids), self.info.max_num_batched_tokens):
            chunk = token_ids[start : start + self.info.max_num_batched_tokens]
            plan = _chunk_plan(chunk, start, blocks=-(-(start + len(chunk)) // size))
            batch = forward_batch(plan, size, self._device.torch, self._last_token_ids)
            hidden = self._decoder.hidden(batch, self._cache)
            yield from map(self._decoder.logits, hidden.split(_LOGIT_ROWS))


def _following(sequence: ScheduledSequence) -> list[int]:
    """Prompt tokens that come after those fed, one each; none once there is an answer."""
    if sequence.sample_position > sequence.num_prompt_tokens:
        return []
    first = sequence.start + 1
    return list(sequence.known_token_ids[first : first + sequence.num_tokens])


def load_runner(config: EngineConfig, on_progress: Progress) -> ModelRunner:
    """The model in the folder `config.model`, ready to run. `on_progress(stage, fraction)`.

    Raises EngineError: BadCheckpoint, UnsupportedModel, OutOfMemory, BadRequest.
    """
    on_progress("looking at the folder", 0.0)
    return make_runner(config, open_checkpoint(Path(config.model)), on_progress)


def make_runner(config: EngineConfig, checkpoint: Checkpoint, on_progress: Progress) -> ModelRunner:
    """Read the weights, size the KV pool, run one step to warm up. Raises as `load_runner`."""
    on_progress("looking at the device", 0.0)
    device = _open_device(config)
    if device.kind == "cpu":
        on_progress("preparing the CPU kernels (compiled once: up to a minute; later starts are quick)", 0.0)
    _prepare_kernels(device)
    _check_format(config, checkpoint)
    spec = checkpoint.spec
    dtype_name = compute_dtype(config, spec, device.kind)
    dtype = _torch_dtype(dtype_name)
    reader = checkpoint.open_reader(device.torch)
    expected = _expected_parts(config, checkpoint, reader, device, dtype_name)
    plan_cache(config, spec, device, expected, dtype_name)  # refuses before anything is read
    grammars = GrammarCompiler(checkpoint.folder, spec.vocab_size, checkpoint.eos_token_ids)
    decoder, weights_bytes, notes = _load_decoder(config, checkpoint, reader, device, dtype, on_progress)

    if config.cache_dir is not None:
        ops.tune(packed_weights(decoder.linears), dtype, Path(config.cache_dir), partial(_show_tuning, on_progress))
    on_progress("sizing the KV cache", 0.9)
    workspace = expected.workspace if device.kind == "cpu" else _measure_workspace(config, decoder, device, dtype)
    parts = replace(expected, weights=weights_bytes, workspace=workspace)
    plan, kv_dtype_name = plan_cache(config, spec, device, parts, dtype_name)
    kv_dtype = _torch_dtype(kv_dtype_name)
    angle_notes = decoder.set_max_len(plan.max_model_len)
    cache = KVCache(spec, plan.report.num_blocks, config.block_size, kv_dtype, device.torch, config.max_num_seqs)
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
    probe = _probe_plan(num_sequences=1, num_tokens=1, block_size=config.block_size)
    runner.submit(probe).wait()
    _check_first_logits(runner.logits(probe), dtype)
    if graphs is not None:
        graphs.prepare()
    grammars.wait()
    return runner


def _expected_parts(
    config: EngineConfig, checkpoint: Checkpoint, reader: CheckpointReader, device: Device, dtype: str
) -> Parts:
    spec = checkpoint.spec
    uses_graphs = _uses_graphs(spec, device)
    return forecast(config, spec, reader, checkpoint.stated, device, dtype, uses_graphs=uses_graphs)


def _uses_graphs(spec: ModelSpec, device: Device) -> bool:
    """EAGER=1 in the environment leaves them out, to see whether they are at fault."""
    is_wanted = device.kind == "cuda" and os.environ.get("EAGER") != "1"
    return is_wanted and ops.waits_for_nothing() and can_be_captured(spec)


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
        vocab_size=spec.vocab_size,
        num_layers=len(spec.layers),
        max_model_len=max_model_len,
        context_length=spec.context_length,
        eos_token_ids=checkpoint.eos_token_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=batched_tokens(config, device.kind),
    )


def _open_device(config: EngineConfig) -> Device:
    try:
        device = open_device(config.device, memory_gb=config.gpu_memory_gb)
    except RuntimeError as error:
        raise BadRequest(str(error)) from error
    use_threads(device, config.num_threads or usable_cores())
    return device


def _show_tuning(on_progress: Progress, done: float) -> None:
    on_progress("measuring the card's kernels (once; later loads know)", 0.85 + 0.05 * done)


def _prepare_kernels(device: Device) -> None:
    try:
        ops.prepare(device)
    except RuntimeError as error:
        raise BadRequest(str(error)) from error


def _load_decoder(
    config: EngineConfig,
    checkpoint: Checkpoint,
    reader: CheckpointReader,
    device: Device,
    dtype: torch.dtype,
    on_progress: Progress,
) -> tuple[Decoder, int, tuple[str, ...]]:
    """The decoder, the bytes that its weights and angles take, and notes on how they were read."""
    spec = checkpoint.spec
    if device.kind == "cpu":
        check_weights_fit(device, reader.total_bytes())
    allocated_before = torch.cuda.memory_allocated() if device.kind == "cuda" else 0

    def on_layer(done: int) -> None:
        on_progress(f"reading weights, layer {done} of {len(spec.layers)}", 0.05 + 0.8 * done / len(spec.layers))

    is_quantized, dtype_name = checkpoint.format is not None, str(dtype).removeprefix("torch.")
    head_in_8_bits = quantizes_head(config, device.kind, dtype_name, is_quantized=is_quantized)
    with _kept_weights(config, checkpoint, device, reader.total_bytes()) as kept:
        builder = DecoderBuilder(
            spec, reader, checkpoint.format, device.torch, dtype, kept, quantizes_head=head_in_8_bits
        )
        decoder = builder.build(asked_context(config, spec), on_layer)
        unused = builder.unused()
        reader.close()
        if unused:
            shown = ", ".join(unused[:5])
            raise BadCheckpoint(
                f"{len(unused)} tensors of the checkpoint have no place in {spec.architecture}: {shown}."
            )
        notes = builder.notes
        if kept is not None:
            kept.finish(notes)
            notes += (kept.note,) if kept.note else ()
    if device.kind == "cuda":
        return decoder, torch.cuda.memory_allocated() - allocated_before, notes
    return decoder, decoder.num_bytes, notes


def _kept_weights(
    config: EngineConfig, checkpoint: Checkpoint, device: Device, needed_bytes: int
) -> AbstractContextManager[KeptWeights | None]:
    """Only a card's form is worth it, and only a folder on disk has a place."""
    is_wanted = config.keep_packed and device.kind == "cuda" and checkpoint.format is not None
    if not (is_wanted and checkpoint.folder.is_dir()):
        return nullcontext()
    return closing(KeptWeights(checkpoint.folder, device.torch, needed_bytes))


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@torch.inference_mode()
def _measure_workspace(config: EngineConfig, decoder: Decoder, device: Device, kv_dtype: torch.dtype) -> int:
    """Bytes of the largest step on a card, and of what the sampler keeps: it is run once."""
    num_tokens, num_sequences = batched_tokens(config, device.kind), config.max_num_seqs
    max_len = asked_context(config, decoder.spec)
    per_sequence = _probe_tokens(num_tokens, num_sequences, max_len)
    blocks = num_sequences * -(-per_sequence // config.block_size)
    torch.cuda.empty_cache()  # what the load worked in
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cache = KVCache(decoder.spec, blocks, config.block_size, kv_dtype, device.torch, num_sequences)
    plan = _probe_plan(num_sequences, per_sequence, config.block_size)
    batch = forward_batch(plan, config.block_size, device.torch, torch.zeros(0))
    sampler = Sampler(
        max_num_seqs=num_sequences,
        max_len=max_len,
        vocab_size=decoder.spec.vocab_size,
        eos_token_ids=(),
        device=device.torch,
    )
    sampler.sample(decoder.logits(decoder.hidden(batch, cache)[batch.sample_rows]), plan.sequences)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _probe_tokens(num_tokens: int, num_sequences: int, max_len: int) -> int:
    """Tokens of each sequence of a probe; the one that it samples still has a place in a context of `max_len`."""
    return min(max(num_tokens // num_sequences, 1), max_len - 1)


def _probe_plan(num_sequences: int, num_tokens: int, block_size: int) -> BatchPlan:
    """Sequences of zeros that all sample with every sampling step on."""
    blocks_each = -(-num_tokens // block_size)
    params = SamplingParams(
        temperature=0.9,
        top_p=0.9,
        min_p=0.001,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        min_tokens=1,
        logprobs=20,
    )
    return BatchPlan(
        tuple(
            ScheduledSequence(
                request_id="probe",
                slot=index,
                run_id=0,
                token_ids=(0,) * num_tokens,
                feeds_last=False,
                start=0,
                block_table=tuple(range(index * blocks_each, (index + 1) * blocks_each)),
                samples=True,
                sample_position=num_tokens,
                params=params,
                seed=index,
                num_prompt_tokens=num_tokens,
                known_token_ids=(0,) * num_tokens,
            )
            for index in range(num_sequences)
        )
    )


def _chunk_plan(token_ids: tuple[int, ...], start: int, blocks: int) -> BatchPlan:
    """A part of one sequence that lies in the first blocks of the cache and samples nothing."""
    table = tuple(range(blocks))
    return BatchPlan((ScheduledSequence("", 0, 0, token_ids, False, start, table, False, 0, SamplingParams(), 0),))
