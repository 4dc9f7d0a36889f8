"""Weights of multistep formulas: integrals of interpolating polynomials."""

from __future__ import annotations

import math

import numpy as np


def lagrange_weights(nodes: np.ndarray, moments: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Return the weights [n, p] of the values at `nodes` [n, p] in the integral of their interpolating polynomial.

    moments [n, p]: the integrals of u^0, u^1, ... with the weight function of the method. Row i uses the first
    orders[i] nodes; the other weights are 0. Solves sum_j w_j nodes_j^k = moments_k.
    """
    out = np.zeros(nodes.shape)
    for order in np.unique(orders):
        at = orders == order
        far = np.abs(nodes[at, :order]).max(axis=1)
        unit = np.where(far > 0, far, 1.0)[:, None]  # in units of the farthest node the powers stay near 1
        powers = np.arange(order)
        vandermonde = (nodes[at, None, :order] / unit[..., None]) ** powers[:, None]
        right = moments[at, :order] / unit**powers
        out[at, :order] = np.linalg.solve(vandermonde, right[..., None])[..., 0]
    return out


_TERMS = np.arange(24)
_FACTORIALS = np.array([math.factorial(int(m)) for m in _TERMS], np.float64)


def exponential_moments(h: np.ndarray, rate: np.ndarray | float, count: int) -> np.ndarray:
    """Return the integrals of exp(-rate * u) * u^k over 0..h for k < count, [n, count]; rate must not be 0.

    Small rate * h use the power series, since the closed form cancels there.
    """
    h, rate = np.broadcast_arrays(np.asarray(h, np.float64), np.asarray(rate, np.float64))
    z = rate * h
    small = np.abs(z) < 1.0
    out = np.empty((*h.shape, count))
    with np.errstate(all="ignore"):
        # Cumulative products, since powers of arrays are slow.
        ones = np.ones((*z.shape, 1))
        ratios = np.where(small, -z, 0.0)[..., None] / _TERMS[1:]
        series = np.cumprod(np.concatenate([ones, ratios], axis=-1), axis=-1)
        partial = np.cumsum(
            np.cumprod(np.concatenate([ones, z[..., None] / _TERMS[1:count]], axis=-1), axis=-1), axis=-1
        )
        decay = np.exp(-z)
        for k in range(count):
            near = h ** (k + 1) * (series / (_TERMS + k + 1)).sum(axis=-1)
            far = _FACTORIALS[k] / rate ** (k + 1) * (1 - np.where(np.isposinf(z), 0.0, decay * partial[..., k]))
            out[..., k] = np.where(small, near, far)
    return out
