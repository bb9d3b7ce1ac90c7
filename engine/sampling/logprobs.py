"""Log-probabilities of tokens: log_softmax of the model's raw logits in fp32, before temperature, penalties, bias and
masks, as vLLM and OpenAI give them. So they do not change with how a request samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.sampling.vocabulary import likeliest
from engine.types import TokenLogprobs

_LOGIT_ROWS = 128  # rows of a prompt's logits that exist at once: 25 MB at a vocabulary of 49,152, 78 MB at 152,000


@dataclass(frozen=True, slots=True)
class Logprobs:
    """
    chosen  [rows] fp32, of the token that came
    ids     [rows, count] int64, the likeliest tokens; top [rows, count] fp32, theirs
    """

    chosen: torch.Tensor
    ids: torch.Tensor
    top: torch.Tensor

    def by_token(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """On the host, each row with as many of its likeliest tokens as it asked for."""
        columns = zip(self.chosen.tolist(), self.ids.tolist(), self.top.tolist(), counts, strict=True)
        return [TokenLogprobs(chosen, tuple(ids[:n]), tuple(top[:n])) for chosen, ids, top, n in columns]


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> Logprobs:
    """logits [rows, vocab] fp32, token_ids [rows] int64."""
    log_total = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - log_total
    count = min(count, logits.shape[1])
    values, ids = likeliest(logits, count) if count else (logits[:, :0], token_ids.new_empty(len(logits), 0))
    return Logprobs(chosen.squeeze(1), ids, values - log_total)


def prompt_logprobs_of(
    hidden: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor], token_ids: torch.Tensor, count: int
) -> Logprobs:
    """Of the tokens that came after these hidden states [rows, hidden]; logits are made for some rows at a time."""
    parts = [
        logprobs_of(logits_of(rows), following, count)
        for rows, following in zip(hidden.split(_LOGIT_ROWS), token_ids.split(_LOGIT_ROWS), strict=True)
    ]
    chosen, ids, top = (torch.cat(columns) for columns in zip(*((p.chosen, p.ids, p.top) for p in parts), strict=True))
    return Logprobs(chosen, ids, top)
