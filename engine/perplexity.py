"""How well models predict a text: perplexity, beside that of the first model named. The last line is JSON.

    python -m engine.perplexity --text tests/data/essay.txt --model smollm2-135m-instruct-dense smollm2-135m-instruct

The text is cut into windows; each is read alone, and every token of it but the first is predicted from those before.
Smaller is better. Figures of different vocabularies cannot be compared, so such models are refused together.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine import environment
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.model_folder import model_folder

if TYPE_CHECKING:
    import torch

WINDOW_TOKENS = 2048


class Predictor(Protocol):
    """`engine.runner.ModelRunner`, as far as it is needed here."""

    def logits_of_all(self, token_ids: tuple[int, ...]) -> "Iterable[torch.Tensor]": ...


def perplexity(runner: Predictor, token_ids: tuple[int, ...], window: int = WINDOW_TOKENS) -> float:
    """exp of the mean negative log-likelihood of the predicted tokens.

    window   tokens read in one piece, at least 2; a last piece of one token predicts nothing and is left out
    """
    pieces = [token_ids[start : start + window] for start in range(0, len(token_ids), window)]
    num_predicted = sum(len(piece) - 1 for piece in pieces)
    return math.exp(sum(_surprise(runner, piece) for piece in pieces) / num_predicted)


def _surprise(runner: Predictor, token_ids: tuple[int, ...]) -> float:
    """Negative log-likelihood of all tokens but the first, in nats."""
    import torch
    from torch.nn.functional import cross_entropy

    total, done = 0.0, 1
    for logits in runner.logits_of_all(token_ids[:-1]):
        expected = torch.tensor(token_ids[done : done + len(logits)], device=logits.device)
        total += cross_entropy(logits, expected, reduction="sum").item()
        done += len(logits)
    return total


def main(arguments: list[str] | None = None) -> int:
    environment.prepare()
    options = _parse(arguments)
    text = Path(options.text).read_text(encoding="utf-8")
    folders = {name: model_folder(name) for name in options.model}
    token_ids = _tokens_of_all(text, folders)
    figures = {}
    for name, folder in folders.items():
        figures[name] = _measure(folder, token_ids, options)
        print(f"{name:<40} {figures[name]:>10.3f} {figures[name] / figures[options.model[0]]:>9.4f}", flush=True)
    print(json.dumps({"text": options.text, "tokens": len(token_ids), "window": options.window, "perplexity": figures}))
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine.perplexity", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", nargs="+", required=True, help="folders, or names of the catalogue")
    parser.add_argument("--text", required=True, help="a text file in UTF-8")
    parser.add_argument("--window", type=int, default=WINDOW_TOKENS, help="tokens read in one piece (default 2048)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options = parser.parse_args(arguments)
    if options.window < 2:
        parser.error(f"--window is {options.window}; a token is predicted from those before it, so at least 2.")
    return options


def _tokens_of_all(text: str, folders: dict[str, str]) -> tuple[int, ...]:
    """The text's ids, which must be the same for every model."""
    (first, token_ids), *others = ((name, _tokens(text, folder)) for name, folder in folders.items())
    for name, ids in others:
        if ids != token_ids:
            raise SystemExit(f"{name} splits this text into other tokens than {first}. Measure them apart.")
    if len(token_ids) < 2:
        raise SystemExit(f"The text has {len(token_ids)} tokens; at least 2 are needed to predict one.")
    return token_ids


def _tokens(text: str, folder: str) -> tuple[int, ...]:
    import tokenizers

    return tuple(tokenizers.Tokenizer.from_file(str(Path(folder, "tokenizer.json"))).encode(text).ids)


def _measure(folder: str, token_ids: tuple[int, ...], options: argparse.Namespace) -> float:
    from engine.loading import load_runner

    longest = min(options.window, len(token_ids))
    try:
        config = EngineConfig(model=folder, device=options.device, max_model_len=longest, max_num_seqs=1)
        return perplexity(load_runner(config, lambda stage, fraction: None), token_ids, options.window)
    except EngineError as error:
        raise SystemExit(f"{folder}: {error.message}") from error


if __name__ == "__main__":
    sys.exit(main())
