"""Where Triton's kernels run in a test: on the card, if there is one, else interpreted on CPU tensors."""

import torch

ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
# Interpreted, bf16 is taken for whole numbers and comes out as noise.
DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if ON_CARD else ()))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def error_of(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference, relative to the root mean square of what is right."""
    return float((ours.double() - exact.double()).abs().max() / exact.double().pow(2).mean().sqrt())


def steps(dtype: torch.dtype, count: float) -> float:
    """So many of the steps that dtype has at 1: what a rounding may differ by."""
    return count * torch.finfo(dtype).eps
