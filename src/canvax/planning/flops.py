"""FLOPs of a program as written, independent of the compiler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from canvax.compile.additions import ReadsReferences
from canvax.compile.kinds import DENOISERS, Kinds
from canvax.compile.programs import Programs
from canvax.kernels.target import traced
from canvax.params import Params
from canvax.quantize import compute_dtype


def count_flops(function: Callable[..., Any], *arguments: Any, narrow: bool = False) -> float:
    """Count the FLOPs of matmuls, convolutions and custom kernels in a call; a multiply-add counts as two.

    Arguments can be abstract. The body of a loop counts once per iteration, or once if the length is unknown. Papers
    count networks in this way; the compiler's figure includes element-wise work, and counts the body of any loop once.
    With ``narrow`` only matmuls of 8-bit numbers count.
    """
    return _count(traced(function, *arguments), narrow)


def evaluation_flops(
    programs: Programs,
    params: Params,
    latents: tuple[int, int, int, int],
    *,
    guided: bool,
    references: tuple[tuple[int, int], ...] = (),
    narrow: bool = False,
) -> float:
    """Count the FLOPs of a denoiser evaluation on a batch of latents [B, h, w, C], without what is done once before the
    loop; guidance doubles the batch.

    ``params`` are arrays, or their shapes and dtypes; ``references`` are heights and widths of reference images;
    ``narrow`` as for ``count_flops``.
    """
    denoiser = programs.networks.denoiser
    samples = latents[0] * (2 if guided else 1), *latents[1:]
    kinds = Kinds((False,)).adding(references and ReadsReferences(references))
    program = programs.wanted(params, samples, kinds)[DENOISERS[False]]
    conditions = program.inputs[0].flight.prompts[0]

    loop = programs.networks.packing.shape(samples)

    def network(params: Params, x: Any, timestep: Any, prepared: Any) -> Any:
        return denoiser.apply(params, x, {"timestep": timestep}, prepared, None)

    weights = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params[denoiser.component])
    prepared = jax.eval_shape(lambda params, given: denoiser.prepare(params, given, loop), weights, conditions)
    x = jax.ShapeDtypeStruct(loop, compute_dtype(params[denoiser.component]))
    return count_flops(network, weights, x, jax.ShapeDtypeStruct(samples[:1], jnp.float32), prepared, narrow=narrow)


def _count(jaxpr: Any, narrow: bool) -> float:
    return sum(_equation(equation, narrow) for equation in jaxpr.eqns)


def _equation(equation: Any, narrow: bool) -> float:
    name, params = equation.primitive.name, equation.params
    if narrow and name in ("dot_general", "conv_general_dilated", "pallas_call"):
        widest = max(operand.aval.dtype.itemsize for operand in equation.invars)
        if name != "dot_general" or widest > 1:
            return 0.0
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel, layout = equation.invars[1].aval.shape, params["dimension_numbers"].rhs_spec
        taps = math.prod(kernel) / kernel[layout[0]] / math.prod(params["lhs_dilation"])  # skips the dilation's zeros
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * taps
    if name == "pallas_call":
        estimate = params["cost_estimate"]
        return float(estimate.flops) if estimate is not None else 0.0
    if name == "cond":
        return max(_count(branch.jaxpr, narrow) for branch in params["branches"])
    turns = params["length"] if name == "scan" else 1
    return turns * sum(_count(inner, narrow) for inner in jaxprs_in_params(params))
