"""DPM-Solver and related solvers: exponential integrators in lambda = log(alpha / std).

    x_to = on_x * x + c0 * m + c1 * D1 + c2 * D2 + up * noise

m is the model's value at the start of the step, either the image D or eps = (X - alpha D) / std; D1 and D2 are its
first and second divided differences in lambda, over earlier steps (multistep) or within the step (singlestep).
"""

from __future__ import annotations

import numpy as np

from canvax.errors import InputError
from canvax.samplers.options import SamplerOptions
from canvax.samplers.path import Path
from canvax.samplers.rows import NOISE, S1, S2, S3, D, X, column, history, lag, rows, step_table
from canvax.samplers.schedule import NoiseSchedule
from canvax.samplers.spacing import dpm_path
from canvax.samplers.table import SamplerTable
from canvax.samplers.weights import exponential_moments, lagrange_weights


def dpm_multistep(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """DPM-Solver++ multistep (2M, 3M), DPM-Solver multistep, and their SDE forms; orders 1 to 3.

    Sources: Lu et al. 2022b (DPM-Solver++), eq. 8-9, algorithm 2 and appendix B for the SDE forms; Lu et al. 2022a
    (DPM-Solver), eq. 4.1 and appendix B for eps prediction. Slots 1 and 2 hold the last two D (or eps).
    """
    algorithm = _checked(options)
    if algorithm == "sde-dpmsolver" and options.solver_order == 3:
        raise InputError(
            "solver_order", "is not defined for algorithm_type='sde-dpmsolver'", cure="use solver_order=2", value=3
        )
    path = dpm_path(schedule, steps, options)
    orders = orders_of(path, options, options.solver_order)
    with np.errstate(all="ignore"):  # h is infinite at a last level of 0; infinite values are not used
        h = np.diff(path.lambdas)
        on_x, c, up = _coefficients(path, np.arange(len(path)), h, algorithm, options)
        weights = _differences(orders, lag(h, 1) / h, lag(h, 2) / h, c)
    value = model_value(path, data=algorithm.endswith("++"))
    moved = (
        column(on_x) * X
        + column(weights[0]) * value
        + column(weights[1]) * S1
        + column(weights[2]) * S2
        + column(up) * NOISE
    )
    return step_table(path, rows(len(path), {0: moved, 1: value, 2: S1}))


def dpm_singlestep(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """DPM-Solver singlestep: blocks of `solver_order` evaluations, each block a step of this order.

    n steps take n evaluations. Every row leaves x at the next level; it starts from the beginning of its block, with a
    higher order than the previous row. Sources: Lu et al. 2022a, algorithms 1 and 2; Lu et al. 2022b, algorithm 1.
    Slots: 1 x at the beginning of the block, 2 and 3 the values of its first and second evaluation.
    """
    algorithm = _checked(options)
    if algorithm == "sde-dpmsolver":
        raise InputError(
            "algorithm_type",
            "is not defined for a singlestep solver",
            cure="use 'sde-dpmsolver++'",
            value="sde-dpmsolver",
        )
    path = dpm_path(schedule, steps, options)
    count = len(path)
    orders = _blocks(count, options)
    at = np.arange(count)
    begin = at - orders + 1
    lambdas = path.lambdas
    with np.errstate(all="ignore"):
        h = lambdas[1:] - lambdas[begin]
        on_x, (c0, second, third, c2), up = _coefficients(path, begin, h, algorithm, options)
        r0 = (lambdas[:-1] - lambdas[begin]) / h
        r1 = (lambdas[np.maximum(at - 1, 0)] - lambdas[begin]) / h
        # Weights of the values at the begin (m_b), before (m_1) and now (m_0) that give D1 and D2.
        if options.solver_type == "heun":
            slope0 = (third * -r1 + 2 * c2) / (r0 * (r0 - r1))
            slope1 = (third * r0 - 2 * c2) / (r1 * (r0 - r1))
        else:
            slope0, slope1 = third / r0, np.zeros(count)
        now = np.select([orders == 1, orders == 2], [c0, second / r0], slope0)
        middle = np.where(orders == 3, slope1, 0.0)
        old = np.select([orders == 1, orders == 2], [np.zeros(count), c0 - second / r0], c0 - slope0 - slope1)
    value = model_value(path, data=algorithm.endswith("++"))
    first = column(orders == 1)
    moved = column(on_x) * np.where(first, X, S1) + column(now) * value + column(up) * NOISE
    moved = moved + column(old) * S2 + column(middle) * S3
    slots = {
        0: moved,
        1: np.where(first, X, S1),
        2: np.where(first, value, S2),
        3: np.where(column(orders == 2), value, S3),
    }
    return step_table(path, rows(count, slots))


def deis(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """DEIS in log rho: interpolates eps in log(std / alpha) and integrates it over std / alpha; orders 1 to 3.

    Source: Zhang and Chen 2023 (DEIS), eq. 15, rho-AB with t = log rho. Slots 1 and 2: earlier eps, newest first.
    """
    path = dpm_path(schedule, steps, options)
    orders = orders_of(path, options, options.solver_order)
    # u = log(rho_0 / rho), the distance in lambda; rho falls from rho_0 as exp(-u).
    lambdas, level = path.lambdas, path.ratios
    nodes = np.stack([lag(lambdas[:-1], k) - lambdas[:-1] for k in range(3)], axis=1)
    moments = -column(level[:-1]) * exponential_moments(np.diff(lambdas), 1.0, 3)
    weights = lagrange_weights(nodes, moments, orders)
    value = model_value(path, data=False)
    moved = X / column(path.alpha[:-1]) + column(weights[:, 0]) * value + weights[:, 1:] @ np.stack([S1, S2])
    return step_table(path, rows(len(path), {0: column(path.alpha[1:]) * moved, 1: value, 2: S1}))


def model_value(path: Path, *, data: bool) -> np.ndarray:
    """Return the form of D, or of eps = (X - alpha D) / std, at each row."""
    if data:
        return np.broadcast_to(D, (len(path), D.size))
    return (X - column(path.alpha[:-1]) * D) / column(path.std[:-1])


def orders_of(path: Path, options: SamplerOptions, limit: int) -> np.ndarray:
    """Return the order of each row: limited by the history, and low near the end of short runs."""
    orders = history(len(path), limit)
    short = options.lower_order_final and path.total < 15
    if short or options.euler_at_final or path.sigmas[-1] == 0:
        orders[-1:] = 1
    if short:
        orders[-2:-1] = np.minimum(orders[-2:-1], 2)
    return orders


def _blocks(count: int, options: SamplerOptions) -> np.ndarray:
    """Return the orders 1, 2, 3, 1, 2, 3, ... up to `solver_order`; 1 at the end if steps or last level require it."""
    limit = options.solver_order
    final = options.lower_order_final or count % limit or options.final_sigmas_type == "zero"
    orders = np.arange(count) % limit + 1
    if (final and count % limit == 0) or options.final_sigmas_type == "zero":
        orders[-1] = 1
    return orders


def _coefficients(
    path: Path, begin: np.ndarray, h: np.ndarray, algorithm: str, options: SamplerOptions
) -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray]:
    """Return on_x, (c0, c1 at order 2, c1 at order 3, c2) and up of the steps from row `begin` to the next row.

    They are phi_1, phi_2 and phi_3 of exponential integrators, at -g if x0 is integrated and at g if eps is.
    """
    a, s = path.alpha[begin], path.std[begin]
    a_to, s_to = path.alpha[1:], path.std[1:]
    eta = 1.0 if options.eta is None else options.eta
    up = np.zeros_like(h)
    if algorithm == "dpmsolver++":
        on_x, k, sign, g = s_to / s, a_to, -1.0, h
    elif algorithm == "sde-dpmsolver++":
        on_x, k, sign, g = s_to / s * np.exp(-eta * h), a_to, -1.0, (1 + eta) * h
        up = s_to * np.sqrt(-np.expm1(-2 * eta * h))
        if eta == 0:
            on_x, up = s_to / s, np.zeros_like(h)
    else:
        on_x, k, sign, g = a_to / a, -s_to, 1.0, h
        if algorithm == "sde-dpmsolver":
            # As in the data form, the score has the weight 1 + eta, and the noise eta times the variance.
            k = (1 + eta) * k
            up = s_to * np.sqrt(eta * np.expm1(2 * h))
    c0 = k * sign * np.expm1(sign * g)
    heun = k * (np.expm1(sign * g) / g - sign)
    second = heun if options.solver_type == "heun" else c0 / 2
    c2 = k * ((sign * np.expm1(sign * g) - g) / g**2 - sign * 0.5)
    return on_x, (c0, second, heun, c2), options.s_noise * up


def _differences(orders: np.ndarray, r0: np.ndarray, r1: np.ndarray, c: tuple[np.ndarray, ...]) -> np.ndarray:
    """Convert the weights of the differences to weights [3, R] of the newest three values."""
    c0, second, third, c2 = c
    # D1 = d0 + r0 (d0 - d1) / (r0 + r1) and D2 = (d0 - d1) / (r0 + r1) with d0 = (m0 - m1) / r0, d1 = (m1 - m2) / r1.
    older = (third * r0 + c2) / (r0 + r1)
    on_d0 = np.where(orders == 3, third + older, second) / r0
    on_d1 = -older / r1
    on_d0, on_d1 = np.where(orders > 1, on_d0, 0.0), np.where(orders > 2, on_d1, 0.0)
    return np.stack([c0 + on_d0, on_d1 - on_d0, -on_d1])


def _checked(options: SamplerOptions) -> str:
    """Return the algorithm of the options, after checking that it can be used."""
    algorithm = "dpmsolver++" if options.algorithm_type == "deis" else options.algorithm_type
    if not algorithm.endswith("++") and options.final_sigmas_type == "zero":
        raise InputError(
            "algorithm_type",
            "with final_sigmas_type='zero' divides by zero at its last step",
            cure="use final_sigmas_type='sigma_min' or algorithm_type='dpmsolver++'",
            value=algorithm,
        )
    return algorithm
