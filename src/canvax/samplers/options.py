"""What can be chosen about a sampler, in one frozen record shared by the solvers and the catalogue."""

from __future__ import annotations

from dataclasses import dataclass

SPACINGS = ("leading", "trailing", "linspace")


@dataclass(frozen=True)
class SamplerOptions:
    """Choices of a sampler; a field that a solver does not use is ignored by it.

    Fields keep the names of diffusers' scheduler_config.json, except `spacing` (timestep_spacing) and `sigmas`
    (use_karras_sigmas, use_exponential_sigmas, use_beta_sigmas, use_lu_lambdas). `sigmas` is a name of
    `canvax.samplers.CURVES` or the levels themselves; "automatic" leaves them to `spacing`. `timesteps` are the
    timesteps themselves. `eta` None means the solver's own: 0 for DDIM, 1 for ancestral samplers, 0.3 for TCD.
    """

    spacing: str = "leading"
    steps_offset: int = 0
    sigmas: str | tuple[float, ...] = "automatic"
    timesteps: tuple[float, ...] | None = None
    eta: float | None = None
    solver_order: int = 2
    solver_type: str = "midpoint"

    # Karras et al. 2022, algorithm 2: noise added in each step, between two levels, and its size.
    s_churn: float = 0.0
    s_tmin: float = 0.0
    s_tmax: float = float("inf")
    s_noise: float = 1.0

    # Where the levels lie: `rho` of the Karras (7) and polyexponential (1) curves, limits of a curve, the end.
    rho: float | None = None
    sigma_min: float | None = None
    sigma_max: float | None = None
    interpolation_type: str = "linear"
    timestep_type: str = "discrete"
    final_sigmas_type: str = "zero"
    lambda_min_clipped: float = float("-inf")
    round_timesteps: bool = True
    sigma_schedule: str = "karras"

    # DDIM, DDPM, PNDM, LCM, TCD
    set_alpha_to_one: bool = True
    clip_sample: bool = False
    clip_sample_range: float = 1.0
    thresholding: bool = False
    dynamic_thresholding_ratio: float = 0.995
    sample_max_value: float = 1.0
    variance_type: str | None = None
    skip_prk_steps: bool = True
    original_inference_steps: int = 50
    timestep_scaling: float = 10.0

    # DPM-Solver, DEIS, UniPC, SA-Solver
    algorithm_type: str = "dpmsolver++"
    lower_order_final: bool = True
    euler_at_final: bool = False
    predict_x0: bool = True
    disable_corrector: tuple[int, ...] = ()
    predictor_order: int = 2
    corrector_order: int = 2

    # Flow models: `mu` is the shift of this picture size, where the config asks for a dynamic one.
    use_dynamic_shifting: bool = False
    time_shift_type: str = "exponential"
    mu: float | None = None
    shift_terminal: float | None = None
    flow_from_one: bool = False
    stochastic_sampling: bool = False

    restart: int = 0
    """Steps at the beginning that another run has done: nothing is remembered of them."""
