"""Decode steps at a fixed size: what is sent for a step, how it is filled up, and that neither changes a bit.

Without a card nothing is captured: the same steps run as they are. With one they are, and must give the same bits.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decode_inputs import DecodeInputs
from engine.forecast import GRAPH_ROWS, most_graph_rows
from engine.forward import forward_batch
from engine.graphs import DecodeGraphs
from engine.plan import BatchPlan, ScheduledSequence
from engine.runner import ModelRunner
from engine.types import SamplingParams
from tests.checkpoints import tiny_checkpoint
from tests.engine.running import load, plan_of, prompt

GREEDY = SamplingParams(temperature=0.0)
SIZE, SLOTS, WIDTH = 4, 12, 10
CPU = torch.device("cpu")


def decoding(
    run_id: int, slot: int, start: int, table: tuple[int, ...], token_id: int | None = None, num_groups: int = 1
) -> ScheduledSequence:
    """One token, of the host (token_id) or the one that the slot sampled last. Group g has block 1000 g + b for b."""
    tables = tuple(tuple(block + 1000 * group for block in table) for group in range(num_groups))
    token_ids = (0,) if token_id is None else (token_id,)
    return ScheduledSequence(
        f"run {run_id}", slot, run_id, token_ids, token_id is None, start, tables, True, start + 1, GREEDY, 0
    )


def test_a_step_takes_the_next_larger_size() -> None:
    assert GRAPH_ROWS[:16] == tuple(range(1, 17)) and GRAPH_ROWS[-1] == 256
    assert [most_graph_rows(count) for count in (1, 16, 17, 33, 128, 300)] == [1, 16, 20, 40, 128, 256]


Steps = list[list[ScheduledSequence]]


@st.composite
def runs_over_steps(draw: Callable[..., int]) -> Steps:
    """Sequences that grow by a token a step; some leave, others take their rows, slots and blocks."""
    num_groups = draw(st.integers(1, 3))
    blocks = iter(draw(st.permutations(range(400))))
    running: dict[int, tuple[int, int, tuple[int, ...]]] = {}  # run -> slot, start, table
    steps: Steps = []
    last_run = 0
    for _ in range(draw(st.integers(1, 8))):
        for run in draw(st.lists(st.sampled_from(sorted(running) or [0]), unique=True)):
            running.pop(run, None)
        free = sorted(set(range(SLOTS)) - {slot for slot, _, _ in running.values()})
        for _ in range(draw(st.integers(0, min(3, len(free))))):
            last_run += 1
            running[last_run] = (free.pop(), draw(st.integers(0, SIZE * WIDTH - 10)), ())
        for run, (slot, start, table) in running.items():
            missing = start // SIZE + 1 - len(table)
            running[run] = (slot, start, table + tuple(next(blocks) for _ in range(missing)))
        now = running.items()
        steps.append([decoding(run, *place, num_groups=num_groups) for run, place in now])
        running = {run: (slot, start + 1, table) for run, (slot, start, table) in running.items()}
    return [step for step in steps if step]


@settings(max_examples=30, deadline=None)
@given(runs_over_steps(), st.integers(0, 5))
def test_what_is_sent_is_the_plan_and_rows_that_fill_up_belong_to_nobody(steps: Steps, more: int) -> None:
    num_groups = len(steps[0][0].block_tables) if steps else 1
    sizes = {"max_rows": 32, "max_blocks": WIDTH, "block_size": SIZE, "num_groups": num_groups}
    inputs = DecodeInputs(**sizes, spare_slot=SLOTS, device=CPU)
    for step in steps:
        count, rows = len(step), len(step) + more
        width = max(len(sequence.block_tables[0]) for sequence in step)
        inputs.send(step, rows, width)
        batch, slots = inputs.views(rows, width)
        expected = forward_batch(BatchPlan(tuple(step)), SIZE, CPU, torch.zeros(SLOTS, dtype=torch.int64))
        for name in ("positions", "seq_lens"):
            assert torch.equal(getattr(batch, name)[:count], getattr(expected, name)), name
        for group in range(num_groups):
            slot_mapping, table = batch.slot_mappings[group], batch.block_tables[group]
            assert torch.equal(slot_mapping[:count], expected.slot_mappings[group])
            assert (slot_mapping[count:] == -1).all()
            assert slot_mapping.data_ptr() % 16 == table.data_ptr() % 16 == 0, "kernels are compiled for such places"
            for row, sequence in enumerate(step):
                own = sequence.block_tables[group]
                assert tuple(table[row, : len(own)].tolist()) == own
        assert slots.tolist() == [sequence.slot for sequence in step] + [SLOTS] * more
        assert batch.cu_seqlens_q.tolist() == list(range(rows + 1))
        assert not batch.seq_lens[count:].any()
        assert batch.max_query_len == 1 and batch.max_seq_len >= int(batch.seq_lens.max())


def as_it_is(step: Callable[[], object]) -> Callable[[], object]:
    return step


def test_blocks_that_moved_are_looked_up_where_they_are_now() -> None:
    inputs = DecodeInputs(max_rows=4, max_blocks=WIDTH, block_size=SIZE, spare_slot=SLOTS, device=CPU)
    batch, _ = inputs.views(1, 3)
    inputs.send([decoding(7, 0, 9, (4, 5, 6))], 1, 3)
    inputs.forget_tables()
    inputs.send([decoding(7, 0, 10, (1, 5, 0))], 1, 3)
    assert batch.block_tables[0].tolist() == [[1, 5, 0]]


def graphs_of(runner: ModelRunner, record: Callable = as_it_is) -> DecodeGraphs:  # type: ignore[type-arg]
    return DecodeGraphs(
        runner._decoder,
        runner._cache,
        runner._sampler,
        runner._last_token_ids,
        record,
        max_len=runner.info.max_model_len,
        block_size=runner.memory.block_size,
    )


def decode_plan(runner: ModelRunner, count: int) -> BatchPlan:
    """`count` sequences of several lengths, their prompts in the cache, each to go on by one token."""
    lengths = [3 + 5 * i % 23 for i in range(count)]
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    before = plan_of(runner, [(tokens[:-1], 0, len(tokens)) for tokens in prompts])
    runner.logits(before)
    after = plan_of(runner, [(tokens[-1:], len(tokens) - 1, len(tokens)) for tokens in prompts])
    return BatchPlan(tuple(s._replace(run_id=i + 1) for i, s in enumerate(after.sequences)))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = tmp_path_factory.mktemp("graphs")
    tiny_checkpoint(folder, "qwen3", "gptq")
    return load(folder, max_num_seqs=40)


@pytest.mark.parametrize("count", [1, 2, 16, 17, 33])
def test_a_step_that_is_filled_up_has_the_bits_of_one_that_is_not(runner: ModelRunner, count: int) -> None:
    plan = decode_plan(runner, count)
    decoded = graphs_of(runner).run(plan)
    assert decoded.logits.shape[0] == count
    assert torch.equal(decoded.logits, runner.logits(plan))
    assert torch.equal(decoded.token_ids, decoded.logits.argmax(dim=-1))
    assert decoded.slots.tolist() == [sequence.slot for sequence in plan.sequences]


def test_a_step_feeds_what_the_one_before_it_sampled(runner: ModelRunner) -> None:
    plan, graphs = decode_plan(runner, 3), graphs_of(runner)
    sampled = graphs.run(plan).token_ids.tolist()
    fed = BatchPlan(tuple(s._replace(token_ids=(0,), feeds_last=True, start=s.start + 1) for s in plan.sequences))
    known = BatchPlan(
        tuple(s._replace(token_ids=(i,), feeds_last=False) for s, i in zip(fed.sequences, sampled, strict=True))
    )
    assert torch.equal(graphs.run(fed).logits, runner.logits(known))


def test_only_steps_of_one_token_each_that_all_sample_are_taken(runner: ModelRunner) -> None:
    graphs = graphs_of(runner)
    decode = decoding(1, 0, 8, (0, 1, 2))
    assert graphs.takes(BatchPlan((decode,)))
    assert not graphs.takes(BatchPlan((decode, decode._replace(token_ids=(5, 6)))))
    assert not graphs.takes(BatchPlan((decode._replace(samples=False),)))
    assert not graphs.takes(BatchPlan((decode,) * 41))
    told = decode._replace(params=SamplingParams(prompt_logprobs=1), num_prompt_tokens=9)
    assert not graphs.takes(BatchPlan((told,)))
    assert graphs.takes(BatchPlan((told._replace(sample_position=10),)))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_deep", "mixtral", "qwen3_moe"])
def test_a_captured_step_has_the_bits_of_one_that_is_not(tmp_path: Path, family: str) -> None:
    tiny_checkpoint(tmp_path, family, "gptq")
    dtype = "bfloat16" if family.startswith("gemma") else "float16"
    runner = load(tmp_path, "cuda", dtype=dtype, max_num_seqs=40)
    captured, plain = runner._graphs, graphs_of(runner)
    assert captured is not None
    for count in (1, 2, 3, 16, 17, 33):
        plan = decode_plan(runner, count)
        for _ in range(3):  # run and captured, then replayed twice
            with torch.inference_mode():
                logits = captured.run(plan).logits.clone()
                assert torch.equal(logits, plain.run(plan).logits), count


@pytest.mark.gpu
def test_captured_steps_stay_in_the_memory_that_was_set_aside(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama", "gptq")
    runner = load(tmp_path, "cuda", dtype="float16", max_num_seqs=40)
    assert runner._graphs is not None
    with torch.inference_mode():
        for count in range(1, 41):
            runner._graphs.run(decode_plan(runner, count))
    capture = runner._graphs._record
    assert 0 < capture.num_bytes <= runner.memory.graphs_bytes  # type: ignore[attr-defined]
