"""Fields of a few bits inside integer words. Shared by every format; knows nothing of any."""

import torch


def unpack_fields(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Spread 32-bit words into fields of `bits` along `dim`: one stream of bits, least significant first.

    words  int32, any shape. Fields of 3 bits straddle words: 32 of them in every three
    Returns uint8 with shape[dim] * 32 // bits fields along `dim`
    """
    dim = dim % words.dim()
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
        view = [1] * (words.dim() + 1)
        view[dim + 1] = -1
        fields = (words.unsqueeze(dim + 1) >> shifts.view(view)) & ((1 << bits) - 1)
        return fields.to(torch.uint8).flatten(dim, dim + 1)
    return _unpack_straddling(words, bits, dim)


def _unpack_straddling(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Each field from the 64 bits that begin with the word of its lowest bit."""
    num_words = words.shape[dim]
    starts = torch.arange(num_words * 32 // bits, device=words.device) * bits
    first = starts // 32
    stream = words.long() & 0xFFFFFFFF
    low = stream.index_select(dim, first)
    high = stream.index_select(dim, (first + 1).clamp(max=num_words - 1))  # past the end: bits that no field has
    shape = [1] * words.dim()
    shape[dim] = -1
    shifts = (starts % 32).view(shape)
    return (((low >> shifts) | (high << (32 - shifts))) & ((1 << bits) - 1)).to(torch.uint8)


def words_of(num_fields: int, bits: int) -> int:
    """32-bit words that hold so many fields."""
    return -(-num_fields * bits // 32)
