"""top_k, top_p and min_p: a draw among the likeliest tokens only.

What is kept is found among the first 80 tokens, nearly always; a row whose own logits are too flat for that is looked
at again with 1,024, with 16,384 and at last with all. So the vocabulary is sorted for almost nobody.
"""

from dataclasses import dataclass

import torch

from engine.sampling.vocabulary import draw, first_past, likeliest

_WIDTHS = (80, 1024, 16_384)
_FEW = 1024  # to put so many tokens in the order of their ids is quicker than to go through the vocabulary


@dataclass(frozen=True, slots=True)
class Truncation:
    """Limits of the rows, [rows, 1] each; measured in the order min_p, top_k, top_p, each on what the others left.

    top_k        the vocabulary's size keeps all
    top_p        fp64
    log_min_p    fp32; -inf keeps all
    most_kept    no row keeps more tokens than this before top_p; the vocabulary's size where some row has no limit
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    most_kept: int

    def of(self, rows: torch.Tensor) -> "Truncation":
        return Truncation(self.top_k[rows], self.top_p[rows], self.log_min_p[rows], self.most_kept)


def draw_truncated(logits: torch.Tensor, limits: Truncation, uniform: torch.Tensor) -> torch.Tensor:
    """logits [rows, vocab] fp32 with the temperature in them, uniform [rows] fp64 -> token ids [rows].

    Tokens that tie with the last one kept are kept too, and the draw goes through the kept in order of their ids: so
    the order in which a device happens to sort equal logits changes nothing.
    """
    vocab_size = logits.shape[1]
    total = _total(logits) if limits.most_kept == vocab_size else None
    first, *wider = _widths(limits.most_kept, vocab_size, logits.device)
    token_ids, is_sure = _draw_among(first, logits, limits, uniform, total)
    for width in wider:
        left = (~is_sure).nonzero().squeeze(1)
        if not left.numel():
            break
        left_total = None if total is None else total[left]
        token_ids[left], is_sure[left] = _draw_among(width, logits[left], limits.of(left), uniform[left], left_total)
    return token_ids


def _widths(most_kept: int, vocab_size: int, device: torch.device) -> list[int]:
    """Growing numbers of tokens to look at. On a card the only one: to see whether it was enough would wait for it."""
    widths = [width for width in _WIDTHS if width < vocab_size]
    if device.type == "cpu":
        return [*widths, vocab_size]
    return [next((width for width in widths if width > most_kept), vocab_size)]


def _draw_among(
    width: int, logits: torch.Tensor, limits: Truncation, uniform: torch.Tensor, total: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and whether all that a row keeps was among its `width` likeliest."""
    values, ids = likeliest(logits, width)
    last, is_sure = _last_kept(values, limits, total, logits.shape[1])
    first = values[:, :1]
    if width > _FEW:
        return draw((logits - first).exp_().mul_(logits >= last), uniform), is_sure
    ids, order = ids.sort(dim=-1)
    values = values.gather(1, order)
    index, _ = first_past((values - first).exp().where(values >= last, 0.0), uniform)
    return ids.gather(1, index.unsqueeze(1)).squeeze(1), is_sure


def _last_kept(
    values: torch.Tensor, limits: Truncation, total: torch.Tensor | None, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest logit that no limit excludes [rows, 1], and whether the row's `width` likeliest were enough to tell.

    values [rows, width], largest first
    """
    width, first = values.shape[1], values[:, :1]
    kth = values.gather(1, (limits.top_k - 1).clamp(max=width - 1))
    floor = torch.maximum(kth.where(limits.top_k <= width, float("-inf")), first + limits.log_min_p)
    weights = (values - first).double().exp().where(values >= floor, 0.0)
    is_closed = (values[:, -1:] < floor) | values[:, -1:].isneginf() | (width == vocab_size)
    mass = weights.sum(dim=-1, keepdim=True)
    is_sure = is_closed
    if total is not None:
        is_free = (limits.top_k >= vocab_size) & limits.log_min_p.isneginf()
        is_sure = is_closed | (is_free & (mass >= limits.top_p * total))
        mass = mass.where(is_closed, total)
    before = weights.cumsum(dim=-1) - weights
    in_nucleus = (before < limits.top_p * mass) | (limits.top_p >= 1.0)
    last = values.where(in_nucleus, float("inf")).amin(dim=-1, keepdim=True)
    return torch.maximum(last, floor), is_sure.squeeze(1)


def _total(logits: torch.Tensor) -> torch.Tensor:
    """[rows, 1] fp64: the sum of all weights, where the likeliest token has weight 1."""
    first = logits.amax(dim=-1, keepdim=True)
    return torch.exp(torch.logsumexp(logits, dim=-1, keepdim=True) - first).double()
