"""lm-eval's `local-completions`, with the tokenizer of the server."""

from typing import Any

from checks import STAGE, check, play, same
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI


def model(**options: Any) -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        base_url=f"{STAGE['url']}/v1/completions", model=STAGE["model"], max_retries=1, max_length=1000, **options
    )


def instances(kind: str, *arguments: Any) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


@check
def tokens() -> None:
    tokenizer = model(tokenizer_backend="remote").tokenizer
    ids = tokenizer.encode("ab")
    same((tokenizer.decode(ids), isinstance(tokenizer.eos_token, str)), ("ab", True))


@check
def logprobs() -> None:
    """The scripted engine's log-probability of a byte is minus its number in thousandths."""
    for options in ({"batch_size": 1}, {"batch_size": 3}, {"batch_size": 1, "num_concurrent": 2}):
        asked = instances("loglikelihood", ("ab", "cd"), ("a", "b"), ("longer context", "x"))
        found = model(tokenizer_backend="remote", **options).loglikelihood(asked, disable_tqdm=True)
        same([round(value, 6) for value, _ in found], [-0.199, -0.098, -0.12])


@check
def completions() -> None:
    asked = instances("generate_until", ("scene:plain", {"until": []}), ("scene:unicode", {"until": []}))
    for backend in ("remote", None):
        found = model(tokenizer_backend=backend).generate_until(asked, disable_tqdm=True)
        same(found, ["Paris.", STAGE["unicode"]])


@check
def stop() -> None:
    asked = instances("generate_until", ("scene:stop", {"until": ["</s>", "\n\n"]}))
    same(model(tokenizer_backend="remote").generate_until(asked, disable_tqdm=True), ["one"])


play()
