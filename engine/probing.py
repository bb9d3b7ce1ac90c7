"""Steps that nobody asked for, run at a card's start: to compile kernels, and to see what the largest step takes."""

from collections.abc import Sequence

import torch

from engine.config import EngineConfig
from engine.forecast import batched_tokens, most_graph_rows
from engine.forward import forward_batch
from engine.memory import asked_context
from engine.model.decoder import Decoder
from engine.model.kv_cache import KVCache
from engine.plan import BatchPlan, ScheduledSequence
from engine.quant.check import ProductCheck
from engine.sampling.sampler import Sampler
from engine.types import SamplingParams
from kernels import ops
from kernels.device import Device, usable_cores

Size = tuple[int, int]  # sequences, tokens of each

# A number for each way in which the kernels compute so many rows: one prompt, sequences that decode.
_PROMPTS, _DECODED = (24, 300, 2048), (16, 32, 64, 128, 256)


def compile_kernels(
    config: EngineConfig, decoder: Decoder, device: Device, kv_dtype: torch.dtype, checks: Sequence[ProductCheck]
) -> None:
    """Have the kernels compiled that a start needs, and in threads those of other sizes of steps, side by side.

    Layers are alike, so that one of each kind is enough. The decoder must wait for nothing.
    """
    max_len, num_tokens = asked_context(config, decoder.spec), batched_tokens(config, device)
    at_start = [(1, 1), _largest(config, num_tokens, max_len)]
    others = [(1, length) for length in _PROMPTS if length <= num_tokens and length < max_len]
    others += [(count, 1) for count in _DECODED if count <= most_graph_rows(config.max_num_seqs)]
    few = decoder.with_layers(_first_of_each_kind(decoder))
    blocks = max(count * -(-length // config.block_size) for count, length in (*at_start, *others))
    cache = KVCache(few.spec, blocks, config.block_size, kv_dtype, device.torch, config.max_num_seqs)
    sampler = _sampler(few, config.max_num_seqs, max_len=1, device=device)
    last_token_ids = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=device.torch)

    @torch.inference_mode()
    def compute(sizes: Sequence[Size]) -> None:
        for count, length in sizes:
            plan = probe_plan(count, length, config.block_size)
            batch = forward_batch(plan, config.block_size, device.torch, last_token_ids)
            logits = torch.empty(count, decoder.spec.vocab_size, device=device.torch)
            sampler.choose(logits, torch.arange(count, device=device.torch), batch.seq_lens, last_token_ids)
            few.logits(few.hidden(batch, cache)[batch.sample_rows])

    def start() -> None:
        compute(at_start)
        for check in checks:
            check.launch()

    ops.compile_ahead(start, lambda: compute(others), usable_cores())


def _first_of_each_kind(decoder: Decoder) -> list[int]:
    """Places of layers: the specs say what is alike."""
    first = {layer: place for place, layer in reversed(list(enumerate(decoder.spec.layers)))}
    return sorted(first.values())


@torch.inference_mode()
def measure_workspace(config: EngineConfig, decoder: Decoder, device: Device, kv_dtype: torch.dtype) -> int:
    """Bytes that the largest step takes beside the weights, and the sampler: it is run once."""
    max_len = asked_context(config, decoder.spec)
    num_sequences, per_sequence = _largest(config, batched_tokens(config, device), max_len)
    blocks = num_sequences * -(-per_sequence // config.block_size)
    torch.cuda.empty_cache()  # what the load worked in
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cache = KVCache(decoder.spec, blocks, config.block_size, kv_dtype, device.torch, num_sequences)
    plan = probe_plan(num_sequences, per_sequence, config.block_size)
    batch = forward_batch(plan, config.block_size, device.torch, torch.zeros(0))
    sampler = _sampler(decoder, num_sequences, max_len, device)
    sampler.sample(decoder.logits(decoder.hidden(batch, cache)[batch.sample_rows]), plan.sequences)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what this step worked in; the next ones grow into it again
    return torch.cuda.max_memory_allocated() - before


def _sampler(decoder: Decoder, max_num_seqs: int, max_len: int, device: Device) -> Sampler:
    vocab_size = decoder.spec.vocab_size
    return Sampler(
        max_num_seqs=max_num_seqs, max_len=max_len, vocab_size=vocab_size, eos_token_ids=(), device=device.torch
    )


def _largest(config: EngineConfig, num_tokens: int, max_len: int) -> Size:
    """Of all steps; the token that a sequence samples still has a place in a context of `max_len`."""
    return config.max_num_seqs, min(max(num_tokens // config.max_num_seqs, 1), max_len - 1)


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
