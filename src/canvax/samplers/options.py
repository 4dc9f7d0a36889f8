"""What can be chosen about a sampler, in one frozen record shared by the solvers and the catalogue."""

from __future__ import annotations

from dataclasses import dataclass

SPACINGS = ("leading", "trailing", "linspace")
SIGMAS = ("normal", "karras", "exponential", "lu")


@dataclass(frozen=True)
class SamplerOptions:
    """Choices of a sampler; a field that a solver does not use is ignored by it.

    Fields keep the names of diffusers' scheduler_config.json, except `spacing` (timestep_spacing) and `sigmas`
    (use_karras_sigmas, use_exponential_sigmas, use_lu_lambdas). `eta` None means the solver's own: 0 for DDIM,
    1 for ancestral samplers. `s_churn` (Euler) is the stochasticity of Karras et al. 2022, algorithm 2. `restart`: rows
    below this timestep are another run's, so that nothing is remembered of the rows before them.
    """

    spacing: str = "leading"
    steps_offset: int = 0
    sigmas: str = "normal"
    eta: float | None = None
    s_churn: float = 0.0
    restart: float | None = None

    # DDIM, DDPM, PNDM
    set_alpha_to_one: bool = True
    clip_sample: bool = False
    clip_sample_range: float = 1.0
    thresholding: bool = False
    dynamic_thresholding_ratio: float = 0.995
    sample_max_value: float = 1.0
    variance_type: str | None = None
    skip_prk_steps: bool = True

    # Euler and DPM-Solver: which noise levels
    sigma_min: float | None = None
    sigma_max: float | None = None
    interpolation_type: str = "linear"
    timestep_type: str = "discrete"
    final_sigmas_type: str = "zero"
    lambda_min_clipped: float = float("-inf")
    round_timesteps: bool = True

    # DPM-Solver
    algorithm_type: str = "dpmsolver++"
    solver_order: int = 2
    solver_type: str = "midpoint"
    lower_order_final: bool = True
    euler_at_final: bool = False
