"""How fast an engine is. A table; the last line is JSON.

    python -m engine.bench --shape llama3.1-8b --quant gptq --kv-gb 14 --parts a,b,c,d,e   # random weights, no files
    python -m engine.bench --model smollm2-135m-instruct --parts a,c                       # the same work, a real model
    python -m engine.bench --model smollm2-135m-instruct --batch 1,8,32
    python -m engine.bench --model smollm2-135m-instruct --compare smollm2-135m-instruct-dense   # beside transformers
    python -m engine.bench --fake-runner                            # host time of the scheduler alone

Parts: a = batch 1, 128 tokens in, 256 out; b = batches 8, 32, 64, 128 of the same; c = prompts of 2,048 and 8,192, one
token out; d = 256 requests of mixed lengths, all at once (--load: another file of [prompt, answer] lengths); e = 64
requests of 1,024 shared and 64 own tokens, 64 out, prefix cache on and off. All greedy, past any end of sequence.

Machines are noisy: with --compare both sides take turns in the same run, and the ratio of each round is what counts.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from engine import environment
from engine.bench.load import NEW_TOKENS
from engine.bench.output import print_result
from engine.head_start import head_start


def main(arguments: list[str] | None = None) -> int:
    environment.prepare()
    options = _parse(arguments)
    print_result(_measure(options))
    return 0


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.fake_runner:
        from engine.bench.host import host_times, long_answers

        return host_times() | long_answers()
    if options.parts or options.shape:
        with head_start(options.device):
            from engine.bench.whole import measure as measure_parts

        return measure_parts(options)
    from engine.bench.figures import measure

    return measure(options)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, or a name of the catalogue")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--json", action="store_true", help="accepted for scripts; the last line always is JSON")
    parts = parser.add_argument_group("the work in parts")
    parts.add_argument("--parts", help="letters of the parts, divided by commas; all of them with --shape")
    parts.add_argument("--shape", help="an architecture with random weights in the place of a model")
    parts.add_argument("--quant", default="gptq", help="gptq, awq or none: the form of --shape's weights")
    parts.add_argument("--dummy-weights", action="store_true", help="accepted for scripts; --shape always has them")
    parts.add_argument("--kv-gb", type=float, help="KV cache in GB (1e9 bytes); left out, what fits")
    parts.add_argument("--gpu-memory-gb", type=float, help="act as a card of so many GB (2**30 bytes)")
    parts.add_argument("--max-num-seqs", type=int, default=256, help="requests that run at once")
    parts.add_argument("--load", type=Path, help="lengths of part d's requests")
    parts.add_argument("--profile", action="store_true", help="also a step's kernels by time (on a card)")
    figures = parser.add_argument_group("without parts")
    figures.add_argument("--batch", default="1,8,32", help="numbers of sequences that decode at once")
    figures.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="tokens that each sequence generates")
    figures.add_argument("--compare", metavar="MODEL", help="take turns with transformers in fp32 on this dense model")
    figures.add_argument("--rounds", type=int, default=5, help="rounds of --compare")
    parser.add_argument("--fake-runner", action="store_true", help="measure the scheduler's host time, no model")
    options = parser.parse_args(arguments)
    options.batch = [int(count) for count in options.batch.split(",")]
    return options


if __name__ == "__main__":
    sys.exit(main())
