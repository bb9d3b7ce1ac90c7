"""ModelRunner: a plan in, one token id for each sequence that samples out. Owns the weights, the KV cache, and what is
kept of a running sequence between its steps: the id that it sampled last, in its slot's row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch.nn.functional import normalize

from engine.errors import BadRequest, OutOfMemory
from engine.forward import forward_batch, on_device
from engine.graphs import DecodeGraphs
from engine.landing import Embeddings, Landings, PromptPart, output_of
from engine.model.decoder import Decoder
from engine.model.kv_cache import KVCache
from engine.plan import BatchPlan, FinishedStep, Grammar, PendingStep, ScheduledSequence
from engine.replay import Replay
from engine.sampling.grammar import GrammarCompiler
from engine.sampling.logprobs import prompt_logprobs_of
from engine.sampling.sampler import Sampled, Sampler
from engine.types import DeviceMemory, GrammarSpec, MemoryReport, ModelInfo, SamplingParams
from kernels.device import Device

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
        return self._decoder.logits(self._hidden(plan)[0])

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
        hidden, prompts = self._hidden(plan)
        sampling = [sequence for sequence in plan.sequences if sequence.samples]
        slots = on_device([sequence.slot for sequence in sampling], torch.int64, self._device.torch)
        sampled = Sampled(slots)
        if sampling:
            sampled = self._sampler.sample(self._decoder.logits(hidden), sampling)
        self._last_token_ids[slots] = sampled.token_ids
        places = [place for place, sequence in enumerate(sampling) if sequence.params.embeds]
        return sampled, prompts, self._embeddings(hidden, places) if places else None

    def _embeddings(self, hidden: torch.Tensor, places: list[int]) -> Embeddings:
        """Last tokens' states after the last norm, at length 1, as embedding models on this decoder are trained.

        Source: Zhang et al. 2025, Qwen3 Embedding
        """
        rows = on_device(places, torch.int64, self._device.torch)
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
        if self._graphs is not None:
            self._graphs.forget_tables()
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

    def _hidden(self, plan: BatchPlan) -> tuple[torch.Tensor, list[PromptPart]]:
        """[samples, hidden] after the last norm, of those that sample; what prompts are told of their own tokens."""
        batch = forward_batch(plan, self.memory.block_size, self._device.torch, self._last_token_ids)
        if self._replay is not None and not any(s.params.prompt_logprobs is not None for s in plan.sequences):
            # Only a CPU's: on a card the number of rows chooses the kernel, and a row's last bits with it.
            return self._replay.hidden(batch, batch.sample_rows), []
        hidden = self._decoder.hidden(batch, self._cache)
        return hidden[batch.sample_rows], self._prompt_logprobs(plan, hidden)

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
        size, tables = self.memory.block_size, self.memory.layout.tables_alone(len(token_ids))
        for start in range(0, len(token_ids), self.info.max_num_batched_tokens):
            plan = _chunk_plan(token_ids[start : start + self.info.max_num_batched_tokens], start, tables)
            batch = forward_batch(plan, size, self._device.torch, self._last_token_ids)
            hidden = self._decoder.hidden(batch, self._cache)
            yield from map(self._decoder.logits, hidden.split(_LOGIT_ROWS))


def _following(sequence: ScheduledSequence) -> list[int]:
    """Prompt tokens that come after those fed, one each; none once there is an answer."""
    if sequence.sample_position > sequence.num_prompt_tokens:
        return []
    first = sequence.start + 1
    return list(sequence.known_token_ids[first : first + sequence.num_tokens])


def _chunk_plan(token_ids: tuple[int, ...], start: int, tables: tuple[tuple[int, ...], ...]) -> BatchPlan:
    """A part of one sequence that samples nothing."""
    return BatchPlan((ScheduledSequence("", 0, 0, token_ids, False, start, tables, False, 0, SamplingParams(), 0),))
