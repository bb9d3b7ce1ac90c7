"""The table of angles for rotary position embedding.

The angles of two kinds depend on a length: dynamic (its base grows with it) and longrope (short or long factors). It is
the longest that a sequence may become here, never a sequence's length now: keys lie in the cache with their rotation
and are shared by sequences of any length, so all must be turned alike, and a hit must be what a miss computes.
"""

import math
from collections.abc import Callable

import torch

from engine.model.spec import RopeSpec


def cos_sin_table(spec: RopeSpec, max_len: int) -> torch.Tensor:
    """[max_len, 2, rotary_dim / 2] fp32: cosines, then sines, of position * frequency."""
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies(spec, max_len))
    return torch.stack((angles.cos(), angles.sin()), dim=1) * spec.attention_factor


def inverse_frequencies(spec: RopeSpec, max_len: int) -> torch.Tensor:
    """[rotary_dim / 2] fp32 radians a position, for sequences of up to `max_len` tokens."""
    return _KINDS[spec.kind](spec, max_len)


def stretching_note(spec: RopeSpec, max_len: int) -> str | None:
    """What to tell of a context that changes the angles of short sequences too; None where it changes none."""
    if spec.kind not in ("dynamic", "longrope") or max_len <= spec.original_length:
        return None
    return (
        f"RoPE type {spec.kind}: positions are scaled for sequences of {max_len} tokens, in short ones too. A context "
        f"of {spec.original_length} or less leaves them as the model was first trained."
    )


def _plain(spec: RopeSpec, theta: float) -> torch.Tensor:
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim
    return 1.0 / theta**exponents


def _default(spec: RopeSpec, max_len: int) -> torch.Tensor:
    return _plain(spec, spec.theta)


def _linear(spec: RopeSpec, max_len: int) -> torch.Tensor:
    return _plain(spec, spec.theta) / spec.factor


def _dynamic(spec: RopeSpec, max_len: int) -> torch.Tensor:
    """NTK-aware: the base grows so that the slowest wave just stretches over the longest sequence."""
    length = max(max_len, spec.original_length)
    stretch = spec.factor * length / spec.original_length - (spec.factor - 1)
    return _plain(spec, spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2)))


def _llama3(spec: RopeSpec, max_len: int) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1 report)."""
    base = _plain(spec, spec.theta)
    wavelength = 2 * math.pi / base
    longest_kept = spec.original_length / spec.high_freq_factor
    shortest_stretched = spec.original_length / spec.low_freq_factor
    blend = (spec.original_length / wavelength - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    between = (1 - blend) * base / spec.factor + blend * base
    stretched = torch.where(wavelength > shortest_stretched, base / spec.factor, base)
    return torch.where((wavelength <= shortest_stretched) & (wavelength >= longest_kept), between, stretched)


def _yarn(spec: RopeSpec, max_len: int) -> torch.Tensor:
    """Waves that turn often are kept, those that turn seldom stretched, a ramp between (Peng et al. 2023)."""
    base = _plain(spec, spec.theta)
    low, high = (_pair_that_turns(spec, times) for times in (spec.beta_fast, spec.beta_slow))
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    pairs = torch.arange(spec.rotary_dim // 2, dtype=torch.float32)
    stretched = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return base / spec.factor * stretched + base * (1 - stretched)


def _pair_that_turns(spec: RopeSpec, times: float) -> float:
    """Index, with a fraction, of the pair of numbers that turns so many times over the original length."""
    wave = spec.original_length / (times * 2 * math.pi)
    return spec.rotary_dim * math.log(wave) / (2 * math.log(spec.theta))


def _longrope(spec: RopeSpec, max_len: int) -> torch.Tensor:
    """A factor a pair, found by search: one set for the original length, one beyond it (Ding et al. 2024)."""
    factors = spec.long_factors if max_len > spec.original_length else spec.short_factors
    return _plain(spec, spec.theta) / torch.tensor(factors)


_KINDS: dict[str, Callable[[RopeSpec, int], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
