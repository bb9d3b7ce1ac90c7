"""Steps that nobody asked for, run at a card's start: to compile kernels, and to see what the largest step takes."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from engine.config import EngineConfig
from engine.forecast import most_graph_rows
from engine.forward import forward_batch
from engine.memory import asked_context, batched_tokens
from engine.model.decoder import Decoder
from engine.model.kv_cache import KVCache
from engine.plan import BatchPlan, ScheduledSequence
from engine.quant.check import ProductCheck
from engine.sampling.sampler import Sampler
from engine.types import SamplingParams
from kernels import ops
from kernels.device import Device, usable_cores

Lengths = Sequence[int]  # tokens of each sequence of a step

# What kernels are compiled for, a number for each way in which so many are computed: tokens of one prompt; sequences
# that decode; decoding sequences beside which a prompt is computed, and one of a few tokens.
_PROMPTS, _DECODED, _BESIDE = (24, 300, 2048), (16, 32, 64, 128, 256), (15, 100, 200)
_SHORT, _LONG = 12, 24


def compile_kernels(
    config: EngineConfig,
    few: Decoder,
    device: Device,
    kv_dtype: torch.dtype,
    checks: Sequence[ProductCheck],
    processes: ops.CompileProcesses | None = None,
) -> Callable[[], int]:
    """Have the kernels compiled that a start needs, which the result waits for, and then those of other sizes of steps.

    few: a decoder with a layer of each kind, which must wait for nothing.
    """
    at_start, others = _at_start(config, few, device), _others(config, few, device)
    blocks = max(_num_blocks(lengths, config.block_size) for lengths in (*at_start, *others))
    cache = KVCache(few.spec, blocks, config.block_size, kv_dtype, device.torch, config.max_num_seqs)
    sampler = _sampler(few, config.max_num_seqs, max_len=1, device=device)
    no_ids = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=device.torch)

    @torch.inference_mode()
    def compute(steps: Sequence[Lengths]) -> None:
        for lengths in steps:
            plan = probe_plan(lengths, config.block_size, len(cache.windows))
            batch = forward_batch(plan, config.block_size, device.torch, no_ids)
            logits = torch.empty(len(lengths), few.spec.vocab_size, device=device.torch)
            sampler.choose(logits, torch.arange(len(lengths), device=device.torch), batch.seq_lens, no_ids)
            few.logits(few.hidden(batch, cache)[batch.sample_rows])

    def start() -> None:
        compute(at_start)
        for check in checks:
            check.launch()

    return ops.compile_ahead(start, lambda: compute(others), usable_cores(), processes)


def _at_start(config: EngineConfig, decoder: Decoder, device: Device) -> list[Lengths]:
    return [(1,), _largest(config, batched_tokens(config, device), asked_context(config, decoder.spec))]


def _others(config: EngineConfig, decoder: Decoder, device: Device) -> list[Lengths]:
    longest = min(batched_tokens(config, device), asked_context(config, decoder.spec) - 1)
    prompts: list[Lengths] = [(length,) for length in _PROMPTS if length <= longest]
    decoded = [(1,) * count for count in _DECODED if count <= most_graph_rows(config.max_num_seqs)]
    beside = [(*(1,) * count, _SHORT, _LONG) for count in _BESIDE if count + 2 <= config.max_num_seqs]
    return [*prompts, *beside, *decoded]


def _num_blocks(lengths: Lengths, block_size: int) -> int:
    return sum(-(-length // block_size) for length in lengths)


@torch.inference_mode()
def measure_workspace(config: EngineConfig, decoder: Decoder, device: Device, cache: KVCache, num_blocks: int) -> int:
    """Bytes that the largest step takes beside weights and cache, and the sampler: it is run once, on blocks of the
    cache that several sequences may share, since nobody wants the result.
    """
    max_len = asked_context(config, decoder.spec)
    lengths = _largest(config, batched_tokens(config, device), max_len)
    torch.cuda.empty_cache()  # what the load worked in
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan = _within(probe_plan(lengths, config.block_size, len(cache.windows)), num_blocks)
    batch = forward_batch(plan, config.block_size, device.torch, torch.zeros(0))
    sampler = _sampler(decoder, len(lengths), max_len, device)
    sampler.sample(decoder.logits(decoder.hidden(batch, cache)[batch.sample_rows]), plan.sequences)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what this step worked in; the next ones grow into it again
    return torch.cuda.max_memory_allocated() - before


def _within(plan: BatchPlan, num_blocks: int) -> BatchPlan:
    """The same in so many blocks."""

    def placed(sequence: ScheduledSequence) -> ScheduledSequence:
        tables = (tuple(block % num_blocks for block in table) for table in sequence.block_tables)
        return sequence._replace(block_tables=tuple(tables))

    return BatchPlan(tuple(map(placed, plan.sequences)))


def _sampler(decoder: Decoder, max_num_seqs: int, max_len: int, device: Device) -> Sampler:
    vocab_size = decoder.spec.vocab_size
    return Sampler(
        max_num_seqs=max_num_seqs, max_len=max_len, vocab_size=vocab_size, eos_token_ids=(), device=device.torch
    )


def _largest(config: EngineConfig, num_tokens: int, max_len: int) -> Lengths:
    """Of all steps; the token that a sequence samples still has a place in a context of `max_len`."""
    return (min(max(num_tokens // config.max_num_seqs, 1), max_len - 1),) * config.max_num_seqs


def probe_plan(lengths: Lengths, block_size: int, num_groups: int) -> BatchPlan:
    """Sequences of zeros that all sample with every sampling step on. Groups of layers have the same blocks: each layer
    reads what it wrote itself, since all of a sequence is computed in this step.
    """
    params = SamplingParams(
        temperature=0.9,
        top_p=0.9,
        min_p=0.001,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        min_tokens=1,
        logprobs=20,
    )
    ends = accumulate(_num_blocks([length], block_size) for length in lengths)
    return BatchPlan(
        tuple(
            ScheduledSequence(
                request_id="probe",
                slot=index,
                run_id=0,
                token_ids=(0,) * length,
                feeds_last=False,
                start=0,
                block_tables=(tuple(range(end - _num_blocks([length], block_size), end)),) * num_groups,
                samples=True,
                sample_position=length,
                params=params,
                seed=index,
                num_prompt_tokens=length,
                known_token_ids=(0,) * length,
            )
            for index, (length, end) in enumerate(zip(lengths, ends, strict=True))
        )
    )
