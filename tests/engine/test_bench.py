"""The bench of the engine runs anywhere, and reports what its readers look for."""

import json
from pathlib import Path

import pytest

from engine.bench import whole
from engine.bench.__main__ import _parse, main
from engine.bench.parts import Sizes
from engine.bench.shapes import SHAPES, dummy_checkpoint
from engine.errors import BadRequest
from engine.model.architectures import read_spec

SMALL = Sizes(prompt=20, new=4, batches=(2, 3), prefills=(40,), shared=48, own=5, short=3, requests=6, repeats=1)


@pytest.mark.parametrize("quant", ["gptq", "awq", "none"])
def test_every_part_is_measured_on_random_weights(quant: str, tmp_path: Path) -> None:
    load = tmp_path / "load.json"
    load.write_text(json.dumps({"lengths": [[10, 3], [30, 5]]}))
    arguments = f"--shape tiny --quant {quant} --device cpu --dummy-weights --kv-gb 0.01 --max-num-seqs 4 --json"
    result = whole.measure(_parse([*arguments.split(), "--load", str(load)]), SMALL)
    parts = result["parts"]
    assert parts["a"]["tpot_ms_p50"] > 0
    assert set(parts["b"]) == {"batch2", "batch3"} and parts["b"]["batch2"]["decode_tok_s"] > 0
    assert parts["c"]["prompt40"]["prefill_tok_s"] > 0
    assert parts["d"]["total_tok_s"] * parts["d"]["seconds"] == pytest.approx(48)
    assert parts["e"]["cache_off"] == {"req_s": parts["e"]["cache_off"]["req_s"], "hit_tokens": 0}
    assert parts["e"]["cache_on"]["hit_tokens"] > 0
    assert result["engine"]["start_s"] > 0
    memory = result["memory"]
    assert (
        memory["forecast"]["weights_bytes"] == pytest.approx(memory["weights_bytes"], rel=0.05) and memory["kv_bytes"]
    )
    assert result["quantization"] == (None if quant == "none" else quant)


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--fake-runner"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["host_us"]["1"] > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_an_architecture_that_we_compute(shape: str) -> None:
    assert read_spec(SHAPES[shape]).context_length >= 2048


def test_a_shape_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(BadRequest, match=r"'llama9' is none of llama2-7b, llama3\.1-8b"):
        dummy_checkpoint("llama9", "gptq")
