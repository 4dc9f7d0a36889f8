"""The catalogue of samplers: all spellings of their names, their cost, and when to use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from canvax.errors import check_function
from canvax.samplers import solvers
from canvax.samplers.options import SamplerOptions
from canvax.samplers.schedule import NoiseSchedule
from canvax.samplers.table import SamplerTable

Solver = Callable[[NoiseSchedule, int, SamplerOptions], SamplerTable]

CHURN = ("s_churn", "s_tmin", "s_tmax", "s_noise")
SINGLESTEP = ("solver_order", "solver_type", "lower_order_final", "final_sigmas_type", "lambda_min_clipped")
DPM = (*SINGLESTEP, "euler_at_final")


@dataclass(frozen=True)
class SamplerSpec:
    """A sampler of the catalogue.

    diffusers_class: the class whose fields of a scheduler_config.json it reads; None for EulerDiscreteScheduler.
    order: order of convergence, if deterministic. stochastic: whether it adds noise at its default eta. evaluations:
    number of network evaluations for n steps. implied: options that the name determines, whatever the checkpoint says.
    curves: whether it accepts Karras and other sigma curves. eta: whether eta can be set. settings: further fields of
    SamplerOptions that it reads. a1111_curve: the sigma curve that A1111 takes where the schedule type is "Automatic".
    """

    name: str
    label: str
    diffusers_class: str | None
    k_diffusion: str | None
    comfyui: str | None
    solver: Solver
    order: str = ""
    stochastic: bool = False
    evaluations: str = "n"
    when: str = ""
    source: str = ""
    implied: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    curves: bool = True
    eta: bool = False
    settings: tuple[str, ...] = ()
    a1111_curve: str = ""

    @classmethod
    def of(cls, solver: Solver) -> SamplerSpec:
        """Return a sampler outside of the catalogue: its solver reads any field of SamplerOptions."""
        check_function("sampler", solver, 3, "(schedule, steps, options), and returns a SamplerTable")
        name = getattr(solver, "__name__", type(solver).__name__)
        settings = tuple(each.name for each in fields(SamplerOptions))
        return cls(name, name, None, None, None, solver, evaluations="", eta=True, settings=settings)

    @property
    def spellings(self) -> tuple[str, ...]:
        """All names of the sampler, the canonical name first."""
        known = (self.name, self.label, self.k_diffusion, self.comfyui, *self.also)
        return tuple(dict.fromkeys(name for name in known if name))


SAMPLERS = (
    SamplerSpec(
        *("dpmpp_2m", "DPM++ 2M", "DPMSolverMultistepScheduler", "sample_dpmpp_2m", "dpmpp_2m"),
        solver=solvers.dpm_multistep,
        order="2",
        when="The best default: converged in 20 to 25 steps, with or without Karras sigmas.",
        source="Lu et al. 2022, arXiv:2211.01095",
        implied={"algorithm_type": "dpmsolver++", "solver_order": 2},
        also=("k_dpmpp_2m", "dpm_solver_multistep", "dpm_solver++", "dpm_multistep"),
        settings=DPM,
        a1111_curve="karras",
    ),
    SamplerSpec(
        *("unipc", "UniPC", "UniPCMultistepScheduler", None, "uni_pc", solvers.unipc),
        order="4",
        when="Corrects each step with the next evaluation; converged in 15 to 20 steps. B(h) = h.",
        source="Zhao et al. 2023, arXiv:2302.04867",
        implied={"predict_x0": True, "solver_type": "bh1", "solver_order": 3},
        also=("uni_pc_bh1",),
        settings=("solver_order", "solver_type", "lower_order_final", "final_sigmas_type", "disable_corrector"),
    ),
    SamplerSpec(
        *("euler", "Euler", "EulerDiscreteScheduler", "sample_euler", "euler", solvers.euler),
        order="1",
        when="Simple and robust; 20 to 30 steps; the default of SDXL.",
        source="Karras et al. 2022, arXiv:2206.00364",
        also=("k_euler",),
        settings=(*CHURN, "final_sigmas_type", "interpolation_type", "timestep_type"),
    ),
    SamplerSpec(
        *("euler_a", "Euler a", "EulerAncestralDiscreteScheduler", "sample_euler_ancestral", "euler_ancestral"),
        solver=solvers.euler_ancestral,
        order="1 (eta 0)",
        stochastic=True,
        when="Varied and soft images in 20 to 40 steps; the image keeps changing with the number of steps.",
        source="Song et al. 2021, arXiv:2011.13456; k-diffusion",
        also=("k_euler_a", "k_euler_ancestral"),
        eta=True,
        settings=("s_noise",),
    ),
    SamplerSpec(
        *("dpmpp_2m_sde", "DPM++ 2M SDE", "DPMSolverMultistepScheduler", "sample_dpmpp_2m_sde", "dpmpp_2m_sde"),
        solver=solvers.dpm_multistep,
        order="2 (eta 0)",
        stochastic=True,
        when="DPM++ 2M with fresh noise in each step: more texture, 25 to 40 steps.",
        source="Lu et al. 2022, arXiv:2211.01095, appendix B",
        implied={"algorithm_type": "sde-dpmsolver++", "solver_order": 2},
        also=("k_dpmpp_2m_sde", "dpmpp_2m_sde_gpu"),
        eta=True,
        settings=("s_noise", *DPM),
        a1111_curve="exponential",
    ),
    SamplerSpec(
        *("dpmpp_3m_sde", "DPM++ 3M SDE", "DPMSolverMultistepScheduler", "sample_dpmpp_3m_sde", "dpmpp_3m_sde"),
        solver=solvers.dpm_multistep,
        order="2 (eta 0)",
        stochastic=True,
        when="DPM++ 2M SDE with one more step of memory; exponential sigmas, 30 to 50 steps.",
        source="Lu et al. 2022, arXiv:2211.01095; k-diffusion",
        implied={
            "algorithm_type": "sde-dpmsolver++",
            "solver_order": 3,
            "solver_type": "heun",
            "lower_order_final": False,
        },
        also=("k_dpmpp_3m_sde", "dpmpp_3m_sde_gpu"),
        eta=True,
        settings=("s_noise", *DPM),
        a1111_curve="exponential",
    ),
    SamplerSpec(
        *("dpmpp_sde", "DPM++ SDE", "DPMSolverSDEScheduler", "sample_dpmpp_sde", "dpmpp_sde", solvers.dpmpp_sde),
        order="2 (eta 0)",
        stochastic=True,
        evaluations="2n - 1",
        when="Crisp detail in few steps (10 to 20), two evaluations each.",
        source="Lu et al. 2022, arXiv:2211.01095; k-diffusion",
        also=("k_dpmpp_sde", "dpmpp_sde_gpu"),
        eta=True,
        settings=("s_noise",),
        a1111_curve="karras",
    ),
    SamplerSpec(
        *("ddim", "DDIM", "DDIMScheduler", None, "ddim", solvers.ddim),
        order="1",
        when="Simple, and works with every model; 30 to 50 steps. With `eta` above 0 it adds noise.",
        source="Song et al. 2021, arXiv:2010.02502",
        also=("DDIMParallelScheduler",),
        eta=True,
        settings=("set_alpha_to_one",),
    ),
    SamplerSpec(
        *("ddpm", "DDPM", "DDPMScheduler", None, "ddpm", solvers.ddpm),
        stochastic=True,
        when="The original stochastic sampler; needs hundreds of steps. For comparison with papers.",
        source="Ho et al. 2020, arXiv:2006.11239",
        also=("DDPMParallelScheduler",),
        settings=("variance_type",),
    ),
    SamplerSpec(
        *("pndm", "PLMS", "PNDMScheduler", None, None, solvers.pndm),
        order="2",
        evaluations="n + 1",
        when="The original sampler of Stable Diffusion 1.x; 50 steps. DPM++ 2M is as good in half of them.",
        source="Liu et al. 2022, arXiv:2202.09778",
        implied={"skip_prk_steps": True},
        also=("k_plms", "pndm_plms"),
        settings=("set_alpha_to_one",),
    ),
    SamplerSpec(
        *("pndm_prk", "PNDM PRK", "PNDMScheduler", None, None, solvers.pndm),
        order="2",
        evaluations="n + 9",
        when="PNDM with its Runge-Kutta start, as in the paper; at least 4 steps.",
        source="Liu et al. 2022, arXiv:2202.09778",
        implied={"skip_prk_steps": False},
        also=("prk",),
        settings=("set_alpha_to_one",),
    ),
    SamplerSpec(
        *("heun", "Heun", "HeunDiscreteScheduler", "sample_heun", "heun", solvers.heun),
        order="2",
        evaluations="2n - 1",
        when="Accurate, with two evaluations per step; 15 to 25 steps. Good as a reference, not for speed.",
        source="Karras et al. 2022, arXiv:2206.00364",
        also=("k_heun",),
        settings=CHURN,
    ),
    SamplerSpec(
        *("dpm2", "DPM2", "KDPM2DiscreteScheduler", "sample_dpm_2", "dpm_2", solvers.dpm2),
        order="2",
        evaluations="2n - 1",
        when="The midpoint method; like Heun, 15 to 25 steps.",
        source="Lu et al. 2022, arXiv:2206.00927; k-diffusion",
        also=("k_dpm_2", "k_dpm2"),
        settings=CHURN,
        a1111_curve="karras",
    ),
    SamplerSpec(
        *("dpm2_a", "DPM2 a", "KDPM2AncestralDiscreteScheduler", "sample_dpm_2_ancestral", "dpm_2_ancestral"),
        solver=solvers.dpm2_ancestral,
        order="2 (eta 0)",
        stochastic=True,
        evaluations="2n - 1",
        when="DPM2 with fresh noise; 20 to 30 steps, two evaluations each.",
        source="k-diffusion",
        also=("k_dpm_2_a", "k_dpm_2_ancestral"),
        eta=True,
        settings=("s_noise",),
        a1111_curve="karras",
    ),
    SamplerSpec(
        *("lms", "LMS", "LMSDiscreteScheduler", "sample_lms", "lms", solvers.lms),
        order="4",
        when="From the first days of Stable Diffusion; 40 to 60 steps, unstable with few. DPM++ 2M is better.",
        source="Adams methods; k-diffusion",
        also=("k_lms",),
    ),
    SamplerSpec(
        *("dpmpp_2s_a", "DPM++ 2S a", "EulerAncestralDiscreteScheduler", "sample_dpmpp_2s_ancestral"),
        comfyui="dpmpp_2s_ancestral",
        solver=solvers.dpmpp_2s_ancestral,
        order="2 (eta 0)",
        stochastic=True,
        evaluations="2n - 1",
        when="Fine texture with fresh noise; 15 to 25 steps, two evaluations each.",
        source="Lu et al. 2022, arXiv:2211.01095; k-diffusion",
        also=("DPM++ 2S Ancestral", "k_dpmpp_2s_a"),
        eta=True,
        settings=("s_noise",),
        a1111_curve="karras",
    ),
    SamplerSpec(
        *("dpmpp_3m", "DPM++ 3M", "DPMSolverMultistepScheduler", None, None, solvers.dpm_multistep),
        order="2",
        when="Smaller error than DPM++ 2M, for unguided or weakly guided images.",
        source="Lu et al. 2022, arXiv:2211.01095",
        implied={"algorithm_type": "dpmsolver++", "solver_order": 3},
        settings=DPM,
    ),
    SamplerSpec(
        *("dpmpp_2m_sde_heun", "DPM++ 2M SDE Heun", "DPMSolverMultistepScheduler", None, "dpmpp_2m_sde_heun"),
        solver=solvers.dpm_multistep,
        order="2 (eta 0)",
        stochastic=True,
        when="DPM++ 2M SDE with another second-order correction; hardly different.",
        source="Lu et al. 2022, arXiv:2211.01095, appendix B",
        implied={"algorithm_type": "sde-dpmsolver++", "solver_order": 2, "solver_type": "heun"},
        also=("dpmpp_2m_sde_heun_gpu",),
        eta=True,
        settings=("s_noise", *DPM),
        a1111_curve="exponential",
    ),
    SamplerSpec(
        *("dpm_single_2", "DPM-Solver++ singlestep 2", "DPMSolverSinglestepScheduler", None, None),
        solver=solvers.dpm_singlestep,
        order="2",
        when="DPM++ without memory between blocks of two evaluations; 20 to 30 steps.",
        source="Lu et al. 2022, arXiv:2211.01095",
        implied={"algorithm_type": "dpmsolver++", "solver_order": 2, "lower_order_final": True},
        also=("DPM++ 2S", "dpmpp_2s", "dpm_solver_singlestep", "dpm_singlestep"),
        settings=SINGLESTEP,
    ),
    SamplerSpec(
        *("dpm_single_3", "DPM-Solver++ singlestep 3", "DPMSolverSinglestepScheduler", None, None),
        solver=solvers.dpm_singlestep,
        order="3",
        when="Singlestep 2 with blocks of three evaluations; for unguided images.",
        source="Lu et al. 2022, arXiv:2211.01095",
        implied={"algorithm_type": "dpmsolver++", "solver_order": 3, "solver_type": "heun", "lower_order_final": True},
        also=("DPM++ 3S", "dpmpp_3s"),
        settings=SINGLESTEP,
    ),
    SamplerSpec(
        *("unipc_bh2", "UniPC BH2", "UniPCMultistepScheduler", None, "uni_pc_bh2", solvers.unipc),
        order="4",
        when="UniPC with B(h) = exp(h) - 1, better for guided images in 5 to 10 steps.",
        source="Zhao et al. 2023, arXiv:2302.04867",
        implied={"predict_x0": True, "solver_type": "bh2", "solver_order": 3},
        settings=("solver_order", "solver_type", "lower_order_final", "final_sigmas_type", "disable_corrector"),
    ),
    SamplerSpec(
        *("deis", "DEIS", "DEISMultistepScheduler", None, "deis", solvers.deis),
        order="3",
        when="Multistep in eps, related to DPM-Solver; 20 to 30 steps.",
        source="Zhang and Chen 2023, arXiv:2204.13902",
        implied={"solver_order": 3, "final_sigmas_type": "zero"},
        settings=("solver_order", "lower_order_final", "final_sigmas_type"),
    ),
    SamplerSpec(
        *("ipndm", "IPNDM", "IPNDMScheduler", None, "ipndm", solvers.ipndm),
        order="2",
        when="PNDM without its start, one evaluation a step; 20 to 30 steps of an even schedule.",
        source="Zhang and Chen 2023, arXiv:2204.13902; Liu et al. 2022, arXiv:2202.09778",
    ),
    SamplerSpec(
        *("sa_solver", "SA-Solver", "SASolverScheduler", None, "sa_solver", solvers.sa_solver),
        order="2 (eta 0)",
        stochastic=True,
        when="Stochastic, with predictor and corrector; 20 to 40 steps.",
        source="Xue et al. 2023, arXiv:2309.05019",
        implied={"predict_x0": True, "final_sigmas_type": "zero"},
        eta=True,
        settings=("predictor_order", "corrector_order", "lower_order_final", "final_sigmas_type"),
    ),
    SamplerSpec(
        *("lcm", "LCM", "LCMScheduler", None, "lcm", solvers.lcm),
        stochastic=True,
        when="Only for latent consistency models and LCM adapters; 2 to 8 steps, guidance 1 to 2.",
        source="Luo et al. 2023, arXiv:2310.04378",
        implied={"timestep_scaling": float("inf")},
        also=("k_lcm",),
        settings=("original_inference_steps", "timestep_scaling"),
    ),
    SamplerSpec(
        *("tcd", "TCD", "TCDScheduler", None, None, solvers.tcd),
        stochastic=True,
        when="Only for trajectory consistency models and Hyper-SD adapters; 2 to 8 steps; eta (gamma) 0.3.",
        source="Zheng et al. 2024, arXiv:2402.19159",
        implied={"final_sigmas_type": "zero"},
        eta=True,
        settings=("original_inference_steps", "final_sigmas_type"),
    ),
    SamplerSpec(
        *("edm_euler", "EDM Euler", "EDMEulerScheduler", None, None, solvers.euler),
        order="1",
        when="For models with EDM preconditioning; elsewhere it is Euler.",
        source="Karras et al. 2022, arXiv:2206.00364",
        settings=(*CHURN, "final_sigmas_type"),
    ),
    SamplerSpec(
        *("edm_dpmpp_2m", "EDM DPM++ 2M", "EDMDPMSolverMultistepScheduler", None, None),
        solver=solvers.dpm_multistep,
        order="2",
        when="For models with EDM preconditioning (Playground v2.5); elsewhere it is DPM++ 2M.",
        source="Karras et al. 2022, arXiv:2206.00364; Lu et al. 2022, arXiv:2211.01095",
        implied={"algorithm_type": "dpmsolver++", "solver_order": 2},
        also=("edm_dpm",),
        settings=DPM,
    ),
    SamplerSpec(
        *("flow_euler", "Flow Euler", "FlowMatchEulerDiscreteScheduler", None, None, solvers.euler),
        order="1",
        when="The usual one of flow models; elsewhere it is Euler.",
        source="Lipman et al. 2023, arXiv:2210.02747; Esser et al. 2024, arXiv:2403.03206",
        also=("flow_match_euler",),
        settings=("stochastic_sampling",),
    ),
    SamplerSpec(
        *("flow_heun", "Flow Heun", "FlowMatchHeunDiscreteScheduler", None, None, solvers.heun),
        order="2",
        evaluations="2n - 1",
        when="For flow models, two evaluations a step; elsewhere it is Heun.",
        source="Lipman et al. 2023, arXiv:2210.02747",
        also=("flow_match_heun",),
    ),
    SamplerSpec(
        *("ddim_inverse", "DDIM inversion", "DDIMInverseScheduler", None, None, solvers.ddim_inverse),
        order="1",
        when="Backwards: from the latents of an image to the noise that DDIM starts from. 50 steps or more.",
        source="Song et al. 2021, arXiv:2010.02502",
        also=("ddim_inversion",),
        curves=False,
        settings=("set_alpha_to_one",),
    ),
)
