"""Steps that nobody asked for, run at a card's start: to compile kernels, and to see what the largest step takes."""

import torch

from engine.config import EngineConfig
from engine.forecast import most_graph_rows
from engine.forward import forward_batch
from engine.memory import asked_context
from engine.model.decoder import Decoder
from engine.model.kv_cache import KVCache
from engine.plan import BatchPlan, ScheduledSequence
from engine.sampling.sampler import Sampler
from engine.types import SamplingParams
from kernels import ops
from kernels.device import Device, usable_cores

# Sequences that decode, and tokens of one prompt: a number for each way in which the kernels compute so many rows.
_DECODED, _PROMPTS = (1, 16, 32, 64, 128, 256), (24, 300, 2048)


def compile_kernels(
    config: EngineConfig, decoder: Decoder, device: Device, kv_dtype: torch.dtype, num_tokens: int
) -> int:
    """Have what steps of `num_tokens` tokens and fewer launch compiled, side by side; returns how many kernels.

    Layers are alike, so that one of each kind is enough. The decoder must wait for nothing.
    """
    sizes = _sizes(config, num_tokens, asked_context(config, decoder.spec))
    few = decoder.with_layers(_first_of_each_kind(decoder))
    blocks = max(count * -(-length // config.block_size) for count, length in sizes)
    cache = KVCache(few.spec, blocks, config.block_size, kv_dtype, device.torch, config.max_num_seqs)
    sampler = _sampler(few, config.max_num_seqs, max_len=1, device=device)
    last_token_ids = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=device.torch)

    @torch.inference_mode()
    def compute() -> None:
        for size in sizes:
            batch = forward_batch(probe_plan(*size, config.block_size), config.block_size, device.torch, last_token_ids)
            logits = few.logits(few.hidden(batch, cache)[batch.sample_rows])
            sampler.choose(logits, torch.arange(len(logits), device=device.torch), batch.seq_lens, last_token_ids)

    return ops.compile_ahead(compute, usable_cores())


def _sizes(config: EngineConfig, num_tokens: int, max_len: int) -> list[tuple[int, int]]:
    """Numbers of sequences and of tokens of each: those of `measure_peak` among them."""
    most = most_graph_rows(config.max_num_seqs)
    sizes = [(count, 1) for count in _DECODED if count <= most]
    sizes += [(1, length) for length in _PROMPTS if length <= num_tokens and length < max_len]
    return [*sizes, (config.max_num_seqs, probe_tokens(num_tokens, config.max_num_seqs, max_len))]


def _first_of_each_kind(decoder: Decoder) -> list[int]:
    """Places of layers: the specs say what is alike."""
    first = {layer: place for place, layer in reversed(list(enumerate(decoder.spec.layers)))}
    return sorted(first.values())


@torch.inference_mode()
def measure_peak(config: EngineConfig, decoder: Decoder, device: Device, kv_dtype: torch.dtype, num_tokens: int) -> int:
    """Most bytes that torch holds at once in the largest step, what was there before included: it is run once."""
    num_sequences = config.max_num_seqs
    max_len = asked_context(config, decoder.spec)
    per_sequence = probe_tokens(num_tokens, num_sequences, max_len)
    blocks = num_sequences * -(-per_sequence // config.block_size)
    torch.cuda.empty_cache()  # what the load worked in
    torch.cuda.reset_peak_memory_stats()
    cache = KVCache(decoder.spec, blocks, config.block_size, kv_dtype, device.torch, num_sequences)
    plan = probe_plan(num_sequences, per_sequence, config.block_size)
    batch = forward_batch(plan, config.block_size, device.torch, torch.zeros(0))
    sampler = _sampler(decoder, num_sequences, max_len, device)
    sampler.sample(decoder.logits(decoder.hidden(batch, cache)[batch.sample_rows]), plan.sequences)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _sampler(decoder: Decoder, max_num_seqs: int, max_len: int, device: Device) -> Sampler:
    vocab_size = decoder.spec.vocab_size
    return Sampler(
        max_num_seqs=max_num_seqs, max_len=max_len, vocab_size=vocab_size, eos_token_ids=(), device=device.torch
    )


def probe_tokens(num_tokens: int, num_sequences: int, max_len: int) -> int:
    """Tokens of each sequence of a probe; the one that it samples still has a place in a context of `max_len`."""
    return min(max(num_tokens // num_sequences, 1), max_len - 1)


def probe_plan(num_sequences: int, num_tokens: int, block_size: int) -> BatchPlan:
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
