"""One uniform number for each (seed, position): what a row draws depends on nothing else, so neither on its company
nor on how often it was preempted. Two rounds of SplitMix64 (Steele et al. 2014), in the wrapping int64 of tensors.
"""

import torch


def uniform_numbers(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[rows] fp64 in [0, 1). seeds, positions [rows] int64."""
    return _shifted(_mix(_mix(seeds) + positions), 11).double() * 2.0**-53


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ _shifted(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros coming in: torch shifts the sign in."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """A 64-bit word as the int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word
