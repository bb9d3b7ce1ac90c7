"""The table of angles for rotary position embedding."""

import math

import torch

from engine.model.spec import RopeSpec


def cos_sin_table(spec: RopeSpec, head_dim: int, max_len: int) -> torch.Tensor:
    """[max_len, 2, head_dim / 2] fp32: cosines, then sines, of position * frequency."""
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies(spec, head_dim))
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] fp32 radians a position."""
    base = 1.0 / spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if spec.kind == "linear":
        return base / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, base)
    return base


def _llama3(spec: RopeSpec, base: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1 report)."""
    wavelength = 2 * math.pi / base
    longest_kept = spec.original_max_position_embeddings / spec.high_freq_factor
    shortest_stretched = spec.original_max_position_embeddings / spec.low_freq_factor
    blend = (spec.original_max_position_embeddings / wavelength - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    between = (1 - blend) * base / spec.factor + blend * base
    stretched = torch.where(wavelength > shortest_stretched, base / spec.factor, base)
    return torch.where((wavelength <= shortest_stretched) & (wavelength >= longest_kept), between, stretched)
