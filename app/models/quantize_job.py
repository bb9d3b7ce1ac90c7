"""The work of `quantize`, run by a Python of its own that has GPTQModel and nothing of ours; its task comes as JSON.

GPTQModel cannot live beside our packages: it asks for an older numpy, and sets the process up at its import.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

_CHUNK_CHARACTERS, _MOST_CHUNKS = 1500, 128


def main(task: dict[str, Any]) -> None:
    """source, target: folders. method: gptq | awq. group_size: inputs a scale. text: a file to calibrate on."""
    # GPTQModel 7.6 takes half of the cores and asks for two of these: with one or two cores it ends with an error.
    cores = os.cpu_count() or 1
    os.cpu_count = lambda: max(cores, 3)
    from gptqmodel import GPTQModel, QuantizeConfig

    layout = {"gptq": "gptq", "awq": "gemm"}[task["method"]]
    config = QuantizeConfig(bits=4, group_size=task["group_size"], method=task["method"], format=layout)
    model = GPTQModel.load(task["source"], config)
    model.quantize(chunks(Path(task["text"]).read_text(encoding="utf-8")), batch_size=1)
    model.save(task["target"])


def chunks(text: str) -> list[str]:
    """Pieces of a few hundred tokens, spread over the whole text."""
    pieces = [text[first : first + _CHUNK_CHARACTERS] for first in range(0, len(text), _CHUNK_CHARACTERS)]
    long_enough = [piece for piece in pieces if len(piece) > _CHUNK_CHARACTERS // 4] or pieces
    step = max(len(long_enough) / _MOST_CHUNKS, 1)
    return [long_enough[int(index * step)] for index in range(min(len(long_enough), _MOST_CHUNKS))]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
