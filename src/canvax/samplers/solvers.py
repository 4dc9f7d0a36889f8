"""The solvers: each a function (NoiseSchedule, steps, options) -> SamplerTable.

Notation: x is slot 0, in the variance-preserving frame; a = alpha and s = sigma of the row (a^2 + s^2 = 1), a_to and
s_to after it. D is the denoised image; eps = (x - a D) / s the noise it implies. A solver written for the
variance-exploding frame (y = x / a, level s / a) is converted here and nowhere else; its last row leaves y, which is
what such samplers hand over.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from canvax.errors import InputError, nearest
from canvax.samplers import spacing
from canvax.samplers.options import SamplerOptions
from canvax.samplers.schedule import SMALLEST_ALPHA_CUMPROD, NoiseSchedule
from canvax.samplers.table import DENOISED, NOISE, SLOTS, Clip, SamplerTable

VARIANCE_TYPES = ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log")
ALGORITHM_TYPES = ("dpmsolver++", "dpmsolver", "sde-dpmsolver++", "sde-dpmsolver")


def ddim(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """DDIM: Song et al. 2021, eq. 12, with eta of eq. 16.

    The step goes from t to t - train // steps whatever the spacing, and the noise direction comes from the unclipped
    output: both as checkpoints were tuned with.
    """
    eta = 0.0 if options.eta is None else options.eta
    if not 0.0 <= eta <= 1.0:
        raise InputError(f"eta={eta} is outside 0..1; 0 is deterministic DDIM, 1 is as random as DDPM")
    timesteps = spacing.training_timesteps(schedule, steps, options)
    remaining = schedule.alphas_cumprod[timesteps]
    remaining_to = _remaining_at(schedule, timesteps - schedule.num_train_timesteps // steps, options)
    _demand_signal(schedule, remaining, "ddim")
    a, s = np.sqrt(remaining), np.sqrt(1 - remaining)
    variance = (1 - remaining_to) / (1 - remaining) * (1 - remaining / remaining_to)
    std = eta * np.sqrt(variance)
    direction = np.sqrt(1 - remaining_to - std**2)
    M = _carried(len(timesteps))
    M[:, 0, 0] = direction / s
    M[:, 0, DENOISED] = np.sqrt(remaining_to)
    M[:, 0, NOISE] = std
    from_raw = np.zeros((len(timesteps), SLOTS))
    from_raw[:, 0] = -direction * a / s
    clip = _clip(options)
    if clip is None:
        M[:, 0, DENOISED] += from_raw[:, 0]
    return _table(schedule, timesteps, a, s, M, clip=clip, raw=from_raw)


def ddpm(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Ancestral sampling of DDPM: Ho et al. 2020, eq. 7, between the timesteps visited; the last step lands on x0."""
    timesteps = spacing.training_timesteps(schedule, steps, options)
    remaining = schedule.alphas_cumprod[timesteps]
    _demand_signal(schedule, remaining, "ddpm")
    remaining_to = np.append(remaining[1:], 1.0)
    beta = 1 - remaining / remaining_to
    M = _carried(len(timesteps))
    M[:, 0, 0] = np.sqrt(remaining / remaining_to) * (1 - remaining_to) / (1 - remaining)
    M[:, 0, DENOISED] = np.sqrt(remaining_to) * beta / (1 - remaining)
    M[:, 0, NOISE] = np.where(timesteps > 0, _ddpm_std(options, beta, remaining, remaining_to), 0.0)
    return _table(schedule, timesteps, np.sqrt(remaining), np.sqrt(1 - remaining), M, clip=_clip(options))


def _ddpm_std(options: SamplerOptions, beta: np.ndarray, remaining: np.ndarray, remaining_to: np.ndarray) -> np.ndarray:
    """Noise added by a DDPM step: the posterior's (small) or the forward step's (large); Ho et al. 2020, 3.2."""
    match options.variance_type:
        case None | "fixed_small" | "fixed_small_log":
            return np.sqrt((1 - remaining_to) / (1 - remaining) * beta)
        case "fixed_large" | "fixed_large_log":
            return np.sqrt(beta)
    raise InputError(
        f"variance_type={options.variance_type!r} cannot be honoured: it needs a network that also predicts its "
        f"variance; use one of {', '.join(VARIANCE_TYPES)}, or another sampler such as 'ddim'"
    )


class _Stage(NamedTuple):
    """One evaluation of PNDM: told a timestep, it moves the x of slot `base` from level `start` to level `end` along
    now * output + past . (slots 3-5) + summed * (slot 2)."""

    told: int
    start: int
    end: int
    now: float
    past: tuple[float, float, float] = (0.0, 0.0, 0.0)
    summed: float = 0.0
    base: int = 0
    anchors: bool = False  # slot 1 takes x
    keep: float = 1.0  # slot 2 becomes keep * slot 2 + add * output
    add: float = 0.0
    pushes: bool = True  # slots 3-5 take the output


def pndm(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """PNDM: Liu et al. 2022, algorithm 2, its Runge-Kutta start (eq. 14) and linear multistep (eq. 12).

    With skip_prk_steps the start is a predictor and a corrector, steps + 1 evaluations in all (also called PLMS); the
    table has a row for each, the last included. Otherwise three Runge-Kutta steps of four evaluations come first.
    Slots: 1 the x that a several-stage step started from, 2 the Runge-Kutta sum, 3-5 earlier outputs, newest first.
    With v prediction it is v that is combined over time, not the eps it implies: checkpoints were tuned so.
    """
    timesteps = spacing.training_timesteps(schedule, steps, options)
    stride = schedule.num_train_timesteps // steps
    begin = _restart(timesteps, options)
    stages_of = _plms_stages if options.skip_prk_steps else _prk_stages
    before = _plms_stages(timesteps[:begin], stride) if begin else []
    stages = before + stages_of(timesteps[begin:], stride)
    told, start, end, now, past, summed, base, anchors, keep, add, pushes = map(np.array, zip(*stages, strict=True))
    remaining = schedule.alphas_cumprod[told]
    _demand_signal(schedule, remaining, "pndm")
    a, s = np.sqrt(remaining), np.sqrt(1 - remaining)
    # The output again from what a row knows: on_x * x + on_d * D.
    velocity = schedule.prediction_type == "v_prediction"
    on_x, on_d = (a / s, -1 / s) if velocity else (1 / s, -a / s)
    carry, gain = _transfer(_remaining_at(schedule, start, options), _remaining_at(schedule, end, options), velocity)

    M = _carried(len(stages))
    M[:, 0, 0], M[:, 0, DENOISED] = gain * now * on_x, gain * now * on_d
    M[:, 0, 2], M[:, 0, 3:6] = gain * summed, gain[:, None] * past
    M[np.arange(len(stages)), 0, base] += carry
    M[anchors, 1, :2] = 1.0, 0.0
    M[:, 2, 0], M[:, 2, 2], M[:, 2, DENOISED] = add * on_x, keep, add * on_d
    M[pushes, 3:6] = np.eye(SLOTS, SLOTS + 2, -1)[3:6]
    M[pushes, 3, 2] = 0.0
    M[pushes, 3, 0], M[pushes, 3, DENOISED] = on_x[pushes], on_d[pushes]
    return _table(schedule, told, a, s, M)


def _plms_stages(timesteps: np.ndarray, stride: int) -> list[_Stage]:
    """Predictor, corrector (told the second timestep, which the next stage is told again), then Adams-Bashforth."""
    t = [int(value) for value in timesteps]
    stages = [_Stage(t[0], t[0], t[0] - stride, 1.0, anchors=True)]
    if len(t) > 1:
        stages.append(_Stage(t[1], t[1] + stride, t[1], 0.5, (0.5, 0.0, 0.0), base=1, pushes=False))
    for i in range(1, len(t)):
        now, *past = _ADAMS_BASHFORTH[min(i, 3)]
        stages.append(_Stage(t[i], t[i], t[i] - stride, now, (past[0], past[1], past[2])))
    return stages


_ADAMS_BASHFORTH = {
    1: (3 / 2, -1 / 2, 0.0, 0.0),
    2: (23 / 12, -16 / 12, 5 / 12, 0.0),
    3: (55 / 24, -59 / 24, 37 / 24, -9 / 24),
}


def _prk_stages(timesteps: np.ndarray, stride: int) -> list[_Stage]:
    """Three Runge-Kutta steps over the first four timesteps, then Adams-Bashforth of order 4 from the fourth."""
    if len(timesteps) < 4:
        raise InputError(
            f"steps={len(timesteps)} is too few for PNDM with skip_prk_steps=false, whose start needs 4 timesteps; "
            "use at least 4 steps or sampler='plms'"
        )
    t = [int(value) for value in timesteps]
    half = stride // 2
    stages = []
    for begin, after in pairwise(t[:4]):
        middle = after + half
        stages += [
            _Stage(begin, begin, begin - half, 1.0, anchors=True, add=1 / 6),
            _Stage(middle, begin, middle, 1.0, base=1, add=1 / 3, pushes=False),
            _Stage(middle, begin, middle - half, 1.0, base=1, add=1 / 3, pushes=False),
            _Stage(after, begin, after, 1 / 6, summed=1.0, base=1, keep=0.0, pushes=False),
        ]
    now, *past = _ADAMS_BASHFORTH[3]
    return stages + [_Stage(at, at, at - stride, now, (past[0], past[1], past[2])) for at in t[3:]]


def _transfer(start: np.ndarray, end: np.ndarray, velocity: bool) -> tuple[np.ndarray, np.ndarray]:
    """Weights of x and of the network's output in a step between two levels, given as alphas_cumprod.

    Liu et al. 2022, eq. 11: x0 and eps are read at `start` and put together again at `end`.
    """
    a, s, a_to, s_to = np.sqrt(start), np.sqrt(1 - start), np.sqrt(end), np.sqrt(1 - end)
    if velocity:
        return a_to * a + s_to * s, s_to * a - a_to * s
    return a_to / a, s_to - a_to * s / a


def euler(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Euler's method on the probability-flow ODE: Karras et al. 2022, algorithm 2.

    With s_churn > 0 the noise of a step is added at the end of the row before it (before row 0: in the initial noise),
    so that the network sees the raised level, as in the paper.
    """
    if options.s_churn < 0:
        raise InputError(f"s_churn={options.s_churn} is negative; 0 is deterministic")
    timesteps, sigmas = spacing.euler_sigmas(schedule, steps, options)
    level, after = sigmas[:-1], sigmas[1:]
    if not options.s_churn:
        return _exploding(schedule, timesteps, level, after, after, np.zeros_like(after), options)
    raised = level * (1 + min(options.s_churn / len(level), np.sqrt(2) - 1))
    timesteps = spacing.timesteps_of(schedule, raised, options)
    left = np.append(raised[1:], after[-1])
    return _exploding(schedule, timesteps, raised, after, left, np.sqrt(left**2 - after**2), options)


def euler_ancestral(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Euler steps to below the next level, then fresh noise up to it: ancestral sampling seen from the exploding frame.

    Source: Song et al. 2021 (score SDE), appendix F; levels as in k-diffusion, eta scaling the fresh noise.
    """
    eta = 1.0 if options.eta is None else options.eta
    if not 0.0 <= eta <= 1.0:
        raise InputError(f"eta={eta} is outside 0..1; 0 is plain Euler, 1 is the usual ancestral sampler")
    timesteps, sigmas = spacing.euler_sigmas(schedule, steps, options)
    level, after = sigmas[:-1], sigmas[1:]
    up = eta * after * np.sqrt(1 - (after / level) ** 2)
    return _exploding(schedule, timesteps, level, np.sqrt(after**2 - up**2), after, up, options)


def _exploding(
    schedule: NoiseSchedule,
    timesteps: np.ndarray,
    level: np.ndarray,
    down: np.ndarray,
    after: np.ndarray,
    up: np.ndarray,
    options: SamplerOptions,
) -> SamplerTable:
    """y' = y + (down - level) * (y - D) / level + up * noise, then at level `after`; y = x * sqrt(1 + level^2)."""
    a = 1 / np.hypot(1, level)
    scale_to = 1 / np.hypot(1, after)
    scale_to[-1] = 1.0  # hands over y itself, even where the last level is not zero
    M = _carried(len(level))
    M[:, 0, 0] = scale_to * down / level / a
    M[:, 0, DENOISED] = scale_to * (1 - down / level)
    M[:, 0, NOISE] = scale_to * up
    # y starts as noise of the first level, or, with leading spacing, as if a picture of unit variance were in it.
    largest = float(max(level.max(), after.max()))
    start = np.hypot(1, largest) if options.spacing == "leading" else largest
    return _table(schedule, timesteps, a, level * a, M, init_scale=float(start * a[0]))


def dpm_multistep(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """DPM-Solver++ multistep (2M, 3M), DPM-Solver multistep, and their SDE forms; orders 1 to 3.

    Sources: Lu et al. 2022b (DPM-Solver++), eq. 8-9, algorithm 2 and appendix B for the SDE forms; Lu et al. 2022a
    (DPM-Solver), eq. 4.1 and appendix B for eps prediction. Slots 1 and 2 hold the last two D (or eps).
    """
    algorithm = "dpmsolver++" if options.algorithm_type == "deis" else options.algorithm_type
    _check_dpm(options, algorithm)
    timesteps, sigmas = spacing.dpm_sigmas(schedule, steps, options)
    rows = len(timesteps)
    a_all = 1 / np.hypot(1, sigmas)
    a, s = a_all[:-1], (sigmas * a_all)[:-1]
    orders = _dpm_orders(rows, _restart(timesteps, options), options)
    with np.errstate(all="ignore"):  # a last level of 0 has infinite h; what is not finite is not used
        weights = _dpm_weights(sigmas, a_all, orders, algorithm, options.solver_type)
    M = _carried(rows)
    M[:, 0, 0], M[:, 0, 1], M[:, 0, 2], M[:, 0, NOISE] = weights[0], weights[2], weights[3], weights[4]
    M[:, 2, 1:3] = 1.0, 0.0
    if algorithm.endswith("++"):  # what is remembered is D
        M[:, 0, DENOISED] = weights[1]
        M[:, 1, 1], M[:, 1, DENOISED] = 0.0, 1.0
    else:  # eps = (x - a D) / s
        M[:, 0, 0] += weights[1] / s
        M[:, 0, DENOISED] = -weights[1] * a / s
        M[:, 1, 0], M[:, 1, 1], M[:, 1, DENOISED] = 1 / s, 0.0, -a / s
    return _table(schedule, timesteps, a, s, M, clip=_clip(options, thresholding_only=True))


def _check_dpm(options: SamplerOptions, algorithm: str) -> None:
    if algorithm not in ALGORITHM_TYPES:
        raise InputError(f"algorithm_type={algorithm!r} is not known; {nearest(str(algorithm), ALGORITHM_TYPES)}")
    if options.solver_order not in (1, 2, 3):
        raise InputError(f"solver_order={options.solver_order} is not 1, 2 or 3; 2 is right for guided sampling")
    if options.solver_type not in ("midpoint", "heun", "logrho", "bh1", "bh2"):
        hint = nearest(str(options.solver_type), ("midpoint", "heun"))
        raise InputError(f"solver_type={options.solver_type!r} is not known; {hint}")
    if not algorithm.endswith("++") and options.final_sigmas_type == "zero":
        raise InputError(
            f"algorithm_type={algorithm!r} with final_sigmas_type='zero' divides by zero at its last step; use "
            "final_sigmas_type='sigma_min' or algorithm_type='dpmsolver++'"
        )
    if algorithm == "sde-dpmsolver" and options.solver_order == 3:
        raise InputError("solver_order=3 is not defined for algorithm_type='sde-dpmsolver'; use solver_order=2")


def _restart(timesteps: np.ndarray, options: SamplerOptions) -> int:
    """Index of the first timestep after a restart, 0 without one. (`timesteps` falls.)"""
    return 0 if options.restart is None else int(np.sum(timesteps >= options.restart))


def _dpm_orders(rows: int, begin: int, options: SamplerOptions) -> np.ndarray:
    """The order of each row: no more than the history allows, and low again near the end of short runs.

    Row `begin` has no history again.
    """
    at = np.arange(rows)
    orders = np.minimum(np.where(at < begin, at, at - begin) + 1, options.solver_order)
    short = options.lower_order_final and rows < 15
    if short or options.euler_at_final or options.final_sigmas_type == "zero":
        orders[-1:] = 1
    if short:
        orders[-2:-1] = np.minimum(orders[-2:-1], 2)
    return orders


def _dpm_weights(sigmas: np.ndarray, a_all: np.ndarray, orders: np.ndarray, algorithm: str, kind: str) -> np.ndarray:
    """Weights [5, R] of x, of the newest three model values, and of the noise.

    x_to = on_x x + c0 D0 + c1 D1 + c2 D2 + up noise, with D1 and D2 the first and second divided differences in
    lambda = -log(level); h is the step in lambda.
    """
    h = np.log(sigmas[:-1] / sigmas[1:])
    a, a_to = a_all[:-1], a_all[1:]
    s, s_to = (sigmas * a_all)[:-1], (sigmas * a_all)[1:]
    up = np.zeros_like(h)
    if algorithm == "dpmsolver++":
        on_x, k, sign, g = s_to / s, a_to, -1.0, h
    elif algorithm == "sde-dpmsolver++":
        on_x, k, sign, g = s_to / s * np.exp(-h), a_to, -1.0, 2 * h
        up = s_to * np.sqrt(-np.expm1(-2 * h))
    else:
        on_x, k, sign, g = a_to / a, -s_to, 1.0, h
        if algorithm == "sde-dpmsolver":
            k = 2 * k
            up = s_to * np.sqrt(np.expm1(2 * h))
    # phi_1, phi_2 and phi_3 of exponential integrators, at -g where x0 is integrated and at g where eps is.
    c0 = k * sign * np.expm1(sign * g)
    heun = k * (np.expm1(sign * g) / g - sign)
    second = heun if kind == "heun" else c0 / 2
    c2 = k * ((sign * np.expm1(sign * g) - g) / g**2 - sign * 0.5)
    return _blend(orders, h, on_x, (c0, second, heun, c2), up)


def _blend(
    orders: np.ndarray, h: np.ndarray, on_x: np.ndarray, c: tuple[np.ndarray, ...], up: np.ndarray
) -> np.ndarray:
    """Weights [5, R] from those of the differences: `c` is c0, c1 at order 2, c1 at order 3, c2."""
    before = np.append(np.nan, h[:-1])
    r0, r1 = before / h, np.append(np.nan, before[:-1]) / h
    c0, second, third, c2 = c
    # D1 = d0 + r0 (d0 - d1) / (r0 + r1) and D2 = (d0 - d1) / (r0 + r1) with d0 = (m0 - m1) / r0, d1 = (m1 - m2) / r1.
    older = (third * r0 + c2) / (r0 + r1)
    on_d0 = np.where(orders == 3, third + older, second) / r0
    on_d1 = -older / r1
    on_d0, on_d1 = np.where(orders > 1, on_d0, 0.0), np.where(orders > 2, on_d1, 0.0)
    return np.stack([on_x, c0 + on_d0, on_d1 - on_d0, -on_d1, up])


def _carried(rows: int) -> np.ndarray:
    """M that keeps every slot but leaves slot 0 to be filled in."""
    M = np.zeros((rows, SLOTS, SLOTS + 2))
    M[:, range(1, SLOTS), range(1, SLOTS)] = 1.0
    return M


def _remaining_at(schedule: NoiseSchedule, timesteps: np.ndarray, options: SamplerOptions) -> np.ndarray:
    """alphas_cumprod, also past the end (t < 0), where it is 1 or the first timestep's, as set_alpha_to_one says."""
    final = 1.0 if options.set_alpha_to_one else schedule.alphas_cumprod[0]
    return np.where(timesteps >= 0, schedule.alphas_cumprod[np.maximum(timesteps, 0)], final)


def _demand_signal(schedule: NoiseSchedule, remaining: np.ndarray, name: str) -> None:
    if schedule.prediction_type == "epsilon" and np.any(remaining == 0):
        raise InputError(
            f"prediction_type='epsilon' says nothing about the picture at the last timestep of a zero-terminal-SNR "
            f"schedule, which sampler={name!r} visits here; use spacing='leading', or sampler='euler'"
        )


def _clip(options: SamplerOptions, *, thresholding_only: bool = False) -> Clip | None:
    if options.thresholding:
        return Clip(options.sample_max_value, options.dynamic_thresholding_ratio)
    return Clip(options.clip_sample_range) if options.clip_sample and not thresholding_only else None


def _table(
    schedule: NoiseSchedule,
    timesteps: np.ndarray,
    a: np.ndarray,
    s: np.ndarray,
    M: np.ndarray,
    *,
    clip: Clip | None = None,
    raw: np.ndarray | None = None,
    init_scale: float = 1.0,
) -> SamplerTable:
    """The table of a solver whose rows stand at levels a, s: the one place where prediction types differ."""
    rows = len(timesteps)
    one, zero = np.ones(rows), np.zeros(rows)
    match schedule.prediction_type:
        case "epsilon":
            p, q = 1 / a, -s / a
        case "v_prediction":
            p, q = a, -s
        case _:
            p, q = zero, one
    smallest = np.sqrt(SMALLEST_ALPHA_CUMPROD)
    table = SamplerTable(
        timestep=np.asarray(timesteps, np.float64),
        c_in=one,
        p=p,
        q=q,
        M=M,
        raw=None if clip is None else (np.zeros((rows, SLOTS)) if raw is None else raw),
        guidance=one.copy(),
        rescale=zero.copy(),
        init_scale=init_scale,
        sigma=s / np.where(a > 0, a, smallest),
        clip=clip,
    )
    if not table.finite:
        raise InputError(
            f"steps={rows} gives this sampler two rows at one noise level, or a level it cannot leave; use fewer steps "
            "or another spacing"
        )
    return table
