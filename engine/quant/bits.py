"""Fields of a few bits inside integer words. Shared by every format; knows nothing of any."""

import torch


def unpack_fields(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Spread each 32-bit word into its 32 / bits fields along `dim`, least significant first.

    words  int32, any shape; bits divides 32
    Returns uint8 with shape[dim] multiplied by 32 / bits
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    dim = dim % words.dim()
    view = [1] * (words.dim() + 1)
    view[dim + 1] = -1
    fields = (words.unsqueeze(dim + 1) >> shifts.view(view)) & ((1 << bits) - 1)
    return fields.to(torch.uint8).flatten(dim, dim + 1)
