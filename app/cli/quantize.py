"""`quantize MODEL`: a dense model into 4 bits, then loaded, to see that it answers."""

import argparse
import re
from pathlib import Path

from app.cli.command import Command
from app.cli.models import shelf_of
from app.cli.progress import Shown
from app.errors import AppError
from app.models.machine import card
from app.models.quantize import make_python, quantize
from app.settings import Settings

_PROBE = "The capital of France is"


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a dense model: a catalogue id, a repository (owner/name) or a folder")
    parser.add_argument("--method", choices=("gptq", "awq"), default="gptq", help="default: gptq")
    parser.add_argument("--id", help="the name that the result is to have")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="a text to calibrate on, best of the kind you will ask"
    )
    parser.add_argument("--python", type=Path, metavar="FILE", help="a Python that has GPTQModel, in place of our own")


def _run(arguments: argparse.Namespace, settings: Settings) -> int:
    shelf = shelf_of(settings)
    entry = shelf.resolve(arguments.model)
    own_id = arguments.id or f"{re.sub('[^a-z0-9._-]+', '-', entry.id.lower())}-own-{arguments.method}"
    target = settings.models_folder / own_id
    if arguments.method == "awq" and card() is None:
        what = "GPTQModel makes AWQ on an NVIDIA card alone, and none is usable here."
        raise AppError(501, "no_card", what, hint="--method gptq runs on a CPU too.")
    if target.exists():
        raise AppError(409, "already_there", f"{target} is there already.", hint="Give another name: --id.")
    with Shown() as shown:
        source = shelf.ensure(entry, shown.stage)
    python = arguments.python.absolute() if arguments.python else make_python(settings.home)
    quantize(source, target, arguments.method, python, arguments.text)
    added = shelf.add(str(target), own_id)
    print(f"{added.id}: {added.format}, in {target}. Loading it:", flush=True)
    print(f"{_PROBE}{_answer(target)}")
    print(f"`python launch.py --model {added.id}` starts with it.")
    return 0


def _answer(folder: Path) -> str:
    from app.llm import LLM, SamplingParams

    with LLM(model=str(folder), max_model_len=256) as llm:
        (output,) = llm.generate([_PROBE], SamplingParams(temperature=0.0, max_tokens=12))
    return output.outputs[0].text


COMMANDS = (Command("quantize", "a dense model into 4 bits with GPTQModel, then loaded", _run, _arguments),)
