"""UniPC and SA-Solver: each evaluation first corrects the previous step, then predicts the next."""

from __future__ import annotations

import numpy as np

from canvax.samplers.options import SamplerOptions
from canvax.samplers.path import Path
from canvax.samplers.rows import NOISE, S1, S2, S3, S4, S5, X, column, history, lag, rows, step_table
from canvax.samplers.schedule import NoiseSchedule
from canvax.samplers.solvers.dpm import model_value
from canvax.samplers.spacing import dpm_path
from canvax.samplers.table import SamplerTable
from canvax.samplers.weights import exponential_moments, lagrange_weights


def unipc(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """UniPC: Zhao et al. 2023, algorithms 5 to 8 (UniP and UniC, eq. 9), orders 1 to 3, B(h) of bh1 or bh2.

    The last step is not corrected, since this would need another evaluation. Slots: 1 the corrected x of the previous
    row, 2 to 4 the last three model values, newest first.
    """
    path = dpm_path(schedule, steps, options)
    count = len(path)
    orders = history(count, options.solver_order)
    if options.lower_order_final:
        orders = np.minimum(orders, np.arange(count, 0, -1))
    if path.sigmas[-1] == 0:
        orders[-1] = 1
    value = model_value(path, data=options.predict_x0)
    stored = (S2, S3, S4)
    with np.errstate(all="ignore"):
        on_x, k, hh = _uni_frame(path, options)
        corrected = np.broadcast_to(X, value.shape).copy()
        if count > 1:
            now, *old = _uni_weights(path, orders[:-1], hh[:-1], k[:-1], options, corrects=True)
            correction = column(on_x[:-1]) * S1 + column(now) * value[1:]
            correction = correction + sum(column(weight) * form for weight, form in zip(old, stored, strict=True))
            off = np.isin(options.restart + np.arange(count - 1), options.disable_corrector)
            corrected[1:] = np.where(column(off), X, correction)
        first, *old = _uni_weights(path, orders, hh, k, options, corrects=False)
        moved = column(on_x) * corrected + column(first) * value
        moved = moved + sum(column(weight) * form for weight, form in zip(old, stored[:2], strict=True))
    M = rows(count, {0: moved, 1: corrected, 2: value, 3: S2, 4: S3})
    return step_table(path, M)


def _uni_frame(path: Path, options: SamplerOptions) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return on_x, k and hh of x_to = on_x x - k (expm1(hh) m + ...); hh is -h if x0 is integrated, h if eps is."""
    a, s, h = path.alpha, path.std, np.diff(path.lambdas)
    if options.predict_x0:
        return s[1:] / s[:-1], a[1:], -h
    return a[1:] / a[:-1], s[1:], h


def _uni_weights(
    path: Path, orders: np.ndarray, hh: np.ndarray, k: np.ndarray, options: SamplerOptions, *, corrects: bool
) -> list[np.ndarray]:
    """Return the weights of m_i, m_(i-1), m_(i-2) for the predictor, of m_(i+1) to m_(i-2) for the corrector.

    Row i is the step from i to i + 1. Zhao et al. 2023, eq. 3 to 5: R rho = b, where R has the powers of the ratios r;
    the corrector's last ratio is 1. As in the paper, UniP of order 2 and UniC of order 1 use rho = 1/2.
    """
    count, lambdas = len(orders), path.lambdas[: len(orders) + 1]
    h = np.diff(lambdas)
    B = hh if options.solver_type == "bh1" else np.expm1(hh)
    ratios = np.stack([(lag(lambdas[:-1], j) - lambdas[:-1]) / h for j in (1, 2)], axis=1)
    phi, factorial, targets = np.expm1(hh) / hh - 1, 1, []
    for i in range(1, 4):
        targets.append(phi * factorial / B)
        factorial *= i + 1
        phi = phi / hh - 1 / factorial
    target = np.stack(targets, axis=1)
    rho = np.zeros((count, 3))  # of m_(i-1), m_(i-2), and the corrector's new value
    for order in (1, 2, 3):
        at = orders == order
        held = order - 1
        nodes = np.concatenate([ratios[at, :held], np.ones((at.sum(), int(corrects)))], axis=1)
        solved = _solve_powers(nodes, target[at])
        if order == (1 if corrects else 2):
            solved = np.full_like(solved, 0.5)
        rho[at, :held] = solved[:, :held]
        rho[at, 2] = solved[:, -1] if corrects else 0.0
    # B is infinite in a step to zero, which has order 1 and does not use it.
    old = np.where(rho[:, :2] != 0, column(B) * rho[:, :2] / ratios, 0.0)
    new = np.where(rho[:, 2] != 0, B * rho[:, 2], 0.0)
    weights = [-k * (np.expm1(hh) - old.sum(axis=1) - new), -k * old[:, 0], -k * old[:, 1]]
    return [-k * new, *weights] if corrects else weights


def _solve_powers(nodes: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Solve sum_j rho_j nodes_j^i = target_i, i < p, for rho [n, p]."""
    p = nodes.shape[1]
    if p == 0 or not len(nodes):
        return np.zeros(nodes.shape)
    powers = nodes[:, None, :] ** np.arange(p)[:, None]
    return np.linalg.solve(powers, target[:, :p, None])[..., 0]


def sa_solver(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """SA-Solver: Xue et al. 2023, algorithm 1, stochastic Adams with predictor and corrector of orders 1 to 4.

    tau, the amount of noise, is eta for timesteps 200 to 800 and 0 elsewhere; data or noise prediction. At order 2 the
    weights are those of the authors' code, which replace h^2 / 2 in the expansion. Slots: 1 the corrected x of the
    previous row, 2 its noise, 3 to 5 the last three model values, newest first.
    """
    path = dpm_path(schedule, steps, options)
    count = len(path)
    eta = 1.0 if options.eta is None else options.eta
    tau = eta * ((path.timesteps >= 200) & (path.timesteps <= 800))
    left = np.arange(count, 0, -1) if options.lower_order_final else np.full(count, 9)
    predictor = np.minimum(history(count, options.predictor_order), left)
    corrector = np.minimum(np.minimum(np.arange(count) + 2, options.corrector_order), left + 1)
    if path.sigmas[-1] == 0:
        predictor[-1] = 1
    value = model_value(path, data=options.predict_x0)
    stored = np.stack([S3, S4, S5])
    with np.errstate(all="ignore"):
        on_x, up = _sa_frame(path, tau, options)
        corrected = np.broadcast_to(X, value.shape).copy()
        if count > 1:
            weights = _sa_weights(path, tau, corrector[:-1], options, corrects=True)
            correction = column(on_x[:-1]) * S1 + column(up[:-1]) * S2 + column(weights[:, 0]) * value[1:]
            corrected[1:] = correction + weights[:, 1:] @ stored
        weights = _sa_weights(path, tau, predictor, options, corrects=False)
        moved = column(on_x) * corrected + column(weights[:, 0]) * value + weights[:, 1:] @ stored + column(up) * NOISE
    return step_table(path, rows(count, {0: moved, 1: corrected, 2: column(up > 0) * NOISE, 3: value, 4: S3, 5: S4}))


def _sa_frame(path: Path, tau: np.ndarray, options: SamplerOptions) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of x and of the noise in each step: Xue et al. 2023, eq. 13."""
    a, s, h = path.alpha, path.std, np.diff(path.lambdas)
    if options.predict_x0:
        decay = np.where(tau > 0, np.exp(-(tau**2) * h), 1.0)
        return decay * s[1:] / s[:-1], s[1:] * np.sqrt(np.where(tau > 0, -np.expm1(-2 * tau**2 * h), 0.0))
    return a[1:] / a[:-1], np.where(tau > 0, tau * s[1:] * np.sqrt(np.expm1(2 * h)), 0.0)


def _sa_weights(
    path: Path, tau: np.ndarray, orders: np.ndarray, options: SamplerOptions, *, corrects: bool
) -> np.ndarray:
    """Return the weights [n, 4] of the values, newest first: before the step, with `corrects` also after it.

    They integrate the interpolating polynomial in lambda times the method's exponential over the step.
    """
    count, lambdas = len(orders), path.lambdas[: len(orders) + 1]
    h, c = np.diff(lambdas), 1 + tau[:count] ** 2
    # u = lambda_to - lambda, from 0 at the end of the step.
    known = slice(1, None) if corrects else slice(None, -1)
    nodes = np.stack([lambdas[1:] - lag(lambdas, j)[known] for j in range(4)], axis=1)
    moments = exponential_moments(h, c if options.predict_x0 else -1.0, 4)
    nodes[~np.isfinite(nodes) & (np.arange(4) < column(orders))] = 1.0  # a step to zero has order 1: any node works
    weights = lagrange_weights(nodes, moments, orders)
    if not options.predict_x0:
        return -column(c * path.std[1 : count + 1]) * weights
    gap = h if corrects else lambdas[:-1] - lag(lambdas[:-1], 1)
    change = (h**2 / 2 - (h * c - 1 + np.exp(-c * h)) / c**2) / gap
    change = np.where(orders == 2, change, 0.0)
    weights[:, 0] += change
    weights[:, 1] -= change
    return column(c * path.alpha[1 : count + 1]) * weights
