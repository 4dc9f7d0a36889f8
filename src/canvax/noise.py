"""Initial noise and seeds. The host computes the noise of each image from that image's seed only.

Every operation is integer arithmetic or a float64 operation that IEEE 754 rounds exactly (``+ - * / sqrt``), each in a
separate numpy call. Logarithm, sine and cosine are short series of these operations, because the results of libm and of
numpy's vector units differ in their last bits between processors. So a seed gives the same bits on every machine,
whatever the batch, the device or the sharding.

Two kinds of noise:

``philox``
    The default. Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the seed as
    its key and the counter at zero, equal to ``numpy.random.Philox(key=seed)``; then Box-Muller (see `_philox`).
``torch``
    Equal to ``torch.randn((1, C, h, w), generator=torch.Generator("cpu").manual_seed(seed))`` (see `_torch`).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import get_args

import numpy as np

from canvax.call import MAX_SEED, NoiseKind
from canvax.errors import InputError, nearest


def random_seed() -> int:
    """Return a random seed in 0..2**32-1: short enough to type, and distinct under either kind of noise."""
    return secrets.randbelow(2**32)


def check_seed(seed: int | None) -> int:
    """Return ``seed``, or a random seed for ``None`` and ``-1`` (A1111's convention).

    Raises:
        InputError: ``seed`` is not an integer, or is outside -1..2**64-1.
    """
    if seed is None:
        return random_seed()
    if isinstance(seed, bool | np.bool_) or not isinstance(seed, int | np.integer):
        raise InputError("seed", "is not a whole number in 0..2**64-1, or None for a random one", value=seed)
    seed = int(seed)
    if seed == -1:
        return random_seed()
    if seed < 0:
        cure = f"PyTorch's seed {seed} is {seed % 2**64} here" if seed >= -(2**63) else "pass a smaller number"
        raise InputError("seed", "must be in 0..2**64-1, or -1 for a random one", cure=f"got {seed} ({cure})")
    if seed > MAX_SEED:
        raise InputError("seed", "must be in 0..2**64-1", cure=f"got {seed}, which needs {seed.bit_length()} bits")
    return seed


def image_seeds(seed: int | None, count: int) -> list[int]:
    """Return the seeds of ``count`` images of the same call: image i has ``seed + i`` modulo 2**64.

    Raises:
        InputError: `check_seed` refuses the seed, or ``count`` is below 1.
    """
    if count < 1:
        raise InputError("count", f"must be 1 or more, got {count}")
    first = check_seed(seed)
    return [(first + i) % 2**64 for i in range(count)]


def seed_keys(seeds: Sequence[int]) -> np.ndarray:
    """Return the keys of the images' step noise, uint32 [B, 2]: the high and the low half of each seed.

    This is the layout of JAX's ``threefry2x32`` keys (``jax.random.wrap_key_data``). For a seed below 2**32 the key
    equals the data of ``jax.random.key(seed)``.
    """
    words = [(seed >> 32, seed & 0xFFFFFFFF) for seed in map(_exact_seed, seeds)]
    return np.array(words, np.uint32).reshape(-1, 2)


def initial_noise(
    seeds: Sequence[int], shape: tuple[int, int, int], kind: NoiseKind = "philox", draw: int = 0
) -> np.ndarray:
    """Return standard normal noise for each seed, float32 [B, h, w, C].

    Args:
        seeds: a seed in 0..2**64-1 for each image (``torch`` uses the low 32 bits only, as PyTorch does).
        shape: h, w, C of an image's latents.
        kind: ``philox`` or ``torch``.
        draw: of ``torch``: which tensor of this shape the generator gives, the first is 0.

    Raises:
        InputError: a seed is out of range, the shape is empty or the kind is unknown.
    """
    if kind not in get_args(NoiseKind):
        raise InputError(f"unknown noise {kind!r}; {nearest(str(kind), get_args(NoiseKind))}")
    if len(shape) != 3 or min(shape) < 1:
        raise InputError("shape", f"must be three positive numbers (h, w, C), got {shape}")
    h, w, channels = shape
    noise = np.empty((len(seeds), h, w, channels), np.float32)
    for image, seed in zip(noise, map(_exact_seed, seeds), strict=True):
        if kind == "philox":
            image[...] = _philox(seed, image.size).reshape(h, w, channels)
        else:
            image[...] = np.moveaxis(_torch(seed, image.size, draw).reshape(channels, h, w), 0, -1)
    return noise


def slerp(noise: np.ndarray, other: np.ndarray, part: float) -> np.ndarray:
    """Interpolate spherically from ``noise`` [B, h, w, C] (``part`` 0) to ``other`` (``part`` 1), image by image.

    Unlike linear interpolation this keeps the norm of Gaussian noise. ``other`` may be [1, h, w, C], shared by all
    images.
    """
    a, b = (array.astype(np.float64).reshape(len(array), -1) for array in (noise, other))
    cosine = (a * b).sum(axis=1) / np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    angle = np.arccos(np.clip(cosine, -1, 1))[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        mixed = (np.sin((1 - part) * angle) * a + np.sin(part * angle) * b) / np.sin(angle)
    return np.where(np.sin(angle) > 1e-6, mixed, a).astype(np.float32).reshape(noise.shape)


def pasted_in_the_middle(noise: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Paste ``other``, noise of another size, into the centre of ``noise`` [B, h, w, C].

    With it a seed keeps its composition when the size of the image changes.
    """
    result = noise.copy()
    theirs, ours = [], []
    for large, small in zip(noise.shape[1:3], other.shape[1:3], strict=True):
        length = min(large, small)
        ours.append(slice((large - length) // 2, (large - length) // 2 + length))
        theirs.append(slice((small - length) // 2, (small - length) // 2 + length))
    result[:, ours[0], ours[1]] = other[:, theirs[0], theirs[1]]
    return result


def _exact_seed(seed: int) -> int:
    """Return ``seed`` as a Python int; unlike `check_seed`, it does not replace None and -1 by a random seed."""
    if seed is None or seed == -1:
        raise InputError(f"a seed in 0..2**64-1 is needed here, got {seed}; choose one with check_seed or image_seeds")
    return check_seed(seed)


def _philox(seed: int, count: int) -> np.ndarray:
    """Return ``count`` normals, float32.

    Let a and b be the upper 53 bits of words 2k and 2k+1 of the stream. With ``r = sqrt(-2 log((a + 1) / 2**53))``,
    normals 2k and 2k+1 are ``r cos(2 pi b / 2**53)`` and ``r sin(2 pi b / 2**53)``, computed in float64 and rounded
    once. Latents are filled with C fastest, then w, then h.
    """
    words = np.random.Philox(key=seed).random_raw(count + count % 2) >> np.uint64(11)
    bits = words.reshape(-1, 2).astype(np.float64)
    radius = np.sqrt(-2.0 * _log((bits[:, 0] + 1.0) * 2.0**-53))
    cos, sin = _cos_sin(bits[:, 1] * 2.0**-53)
    return np.stack([radius * cos, radius * sin], axis=1).reshape(-1)[:count].astype(np.float32)


def _torch(seed: int, count: int, draw: int = 0) -> np.ndarray:
    """Return ``count`` normals of PyTorch's CPU generator after ``draw`` times as many, float32, in the order of a
    contiguous tensor.

    The words come from MT19937 (Matsumoto and Nishimura, 1998) with its 32-bit seeding. PyTorch converts them to
    normals differently for tensors below 16 elements and for larger tensors.
    """
    # Enough words for both conversions; RandomState's stream is frozen (NumPy NEP 19).
    generator = np.random.RandomState(seed & 0xFFFFFFFF)
    words = generator.randint(0, 2**32, size=(draw + 1) * (count + 17), dtype=np.uint32)
    if count < 16:  # an odd number leaves half a pair for the next tensor, so they are one stream
        return _torch_small(words, (draw + 1) * count)[draw * count :]
    return _torch_large(words[draw * (count + (16 if count % 16 else 0)) :], count)


def _torch_small(words: np.ndarray, count: int) -> np.ndarray:
    """Convert words below 16 elements: two words make a 53-bit uniform, two uniforms (angle, radius) two normals."""
    high, low = words[: 4 * -(-count // 2)].astype(np.uint64).reshape(-1, 2).T
    bits = ((high << np.uint64(32)) | low) & np.uint64(2**53 - 1)
    uniforms = bits.astype(np.float64).reshape(-1, 2) * 2.0**-53
    radius = np.sqrt(-2.0 * _log(1.0 - uniforms[:, 1]))
    cos, sin = _cos_sin(uniforms[:, 0])
    return np.stack([radius * cos, radius * sin], axis=1).reshape(-1)[:count].astype(np.float32)


def _torch_large(words: np.ndarray, count: int) -> np.ndarray:
    """Convert words from 16 elements on: 24-bit uniforms fill the tensor, then each block of 16 becomes 16 normals.

    If the size is not a multiple of 16, the last 16 elements are computed again from 16 new words.
    """
    uniforms = (words & np.uint32(2**24 - 1)).astype(np.float32) * np.float32(2.0**-24)
    whole = count - count % 16
    out = np.empty(count, np.float32)
    out[:whole] = _torch_blocks(uniforms[:whole])
    if count % 16:
        out[-16:] = _torch_blocks(uniforms[count : count + 16])
    return out


def _torch_blocks(uniforms: np.ndarray) -> np.ndarray:
    """Apply Box-Muller to blocks of 16: 8 uniforms for the radius, 8 for the angle; 8 cosines, then 8 sines.

    The float32 roundings are PyTorch's; without them the result differs by up to 3e-6.
    """
    blocks = uniforms.reshape(-1, 2, 8)
    log = _log((np.float32(1) - blocks[:, 0]).astype(np.float64)).astype(np.float32)
    radius = np.sqrt(np.float32(-2) * log)
    angle = np.float32(2 * math.pi) * blocks[:, 1]
    cos, sin = _cos_sin(angle.astype(np.float64) / (2 * math.pi))
    return np.stack([radius * cos.astype(np.float32), radius * sin.astype(np.float32)], axis=1).reshape(-1)


def _log(x: np.ndarray) -> np.ndarray:
    """Return the natural logarithm of positive float64 numbers, relative error 3e-16, with the same bits everywhere.

    ``log(m 2**e) = e log 2 + 2 artanh((m - 1) / (m + 1))`` with m in [sqrt(1/2), sqrt(2)).
    """
    mantissa, exponent = np.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial(s * s, [1.0 / (2 * k + 1) for k in range(13)])
    return (exponent - small) * math.log(2.0) + 2.0 * s * series


def _cos_sin(turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cosine and sine of ``2 pi turns`` (float64), error 3e-16, with the same bits everywhere.

    The nearest quarter turn is subtracted exactly; Taylor series cover the rest, at most an eighth of a turn.
    """
    quarter = np.rint(turns * 4.0)
    angle = (turns - quarter * 0.25) * (2.0 * math.pi)
    square = angle * angle
    cos = _polynomial(square, [(-1.0) ** k / math.factorial(2 * k) for k in range(10)])
    sin = angle * _polynomial(square, [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(10)])
    quadrant = quarter.astype(np.int64) % 4
    odd = quadrant % 2 == 1
    cos, sin = np.where(odd, sin, cos), np.where(odd, cos, sin)
    return np.where((quadrant == 1) | (quadrant == 2), -cos, cos), np.where(quadrant >= 2, -sin, sin)


def _polynomial(x: np.ndarray, coefficients: Sequence[float]) -> np.ndarray:
    """Evaluate a polynomial by Horner's rule with a rounding after each operation (no fused multiply-add)."""
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x
        total = total + coefficient
    return total
