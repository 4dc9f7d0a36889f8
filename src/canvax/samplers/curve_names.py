"""Names of sigma curves, which A1111 calls schedule types and ComfyUI schedulers."""

from __future__ import annotations

from dataclasses import dataclass

from canvax.errors import InputError, nearest


@dataclass(frozen=True)
class Curve:
    """A way to place noise levels. `also`: its names in other programs; the first is A1111's."""

    name: str
    also: tuple[str, ...]
    when: str
    source: str


CURVES = (
    Curve("automatic", ("Automatic", "default"), "determined by sampler, checkpoint and `spacing`", "diffusers"),
    Curve(
        "karras", ("Karras", "k"), "more steps at low noise; the usual choice for few steps", "arXiv:2206.00364 eq. 5"
    ),
    Curve("exponential", ("Exponential",), "even in log sigma; many steps at low noise", "k-diffusion"),
    Curve("polyexponential", ("Polyexponential",), "even in (log sigma)^(1/rho); rho 1 is exponential", "k-diffusion"),
    Curve("lu", ("Lu",), "even in log SNR, for DPM++", "arXiv:2206.00927 section 3.4"),
    Curve("beta_sigmas", ("Beta sigmas",), "diffusers' use_beta_sigmas: beta quantiles of sigma itself", "diffusers"),
    Curve(
        "normal", ("Normal", "Uniform", "discrete"), "timesteps even from the noisiest to the cleanest", "k-diffusion"
    ),
    Curve("simple", ("Simple",), "every n-th training timestep, counted from the noisiest", "ComfyUI"),
    Curve("sgm_uniform", ("SGM Uniform",), "even timesteps that stop short of the cleanest; Lightning models", "sgm"),
    Curve("ddim_uniform", ("DDIM", "DDIM Uniform"), "every n-th training timestep, counted from 1", "ComfyUI"),
    Curve("beta", ("Beta",), "beta(0.6, 0.6) quantiles of the timestep: more steps at both ends", "arXiv:2407.12173"),
    Curve("kl_optimal", ("KL Optimal",), "even in atan(sigma)", "arXiv:2404.14507"),
    Curve("ays", ("Align Your Steps", "AYS"), "optimised for Stable Diffusion 1.x at 10 steps", "arXiv:2404.14507"),
    Curve("ays_sdxl", ("Align Your Steps SDXL", "AYS SDXL"), "optimised for SDXL at 10 steps", "arXiv:2404.14507"),
)


def curve_label(name: str) -> str:
    """Return A1111's name of the curve `name`."""
    for curve in CURVES:
        if curve.name == name:
            return curve.also[0]
    raise InputError("sigmas", "is not known", cure=nearest(str(name), NAMES), value=name)


NAMES = tuple(curve.name for curve in CURVES)
