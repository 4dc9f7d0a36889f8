"""FLOPs of a program as it is written, whatever the compiler makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jax.extend.core import jaxprs_in_params

from canvax.kernels.target import traced


def count_flops(function: Callable[..., Any], *arguments: Any) -> float:
    """Matmuls, convolutions and custom kernels of a call, with abstract arguments; a multiply-add is two.

    Loops of known length count for each turn, others once. This is how papers count a network; the compiler's own
    figure has element-wise work too, and counts the body of any loop once.
    """
    return _count(traced(function, *arguments))


def _count(jaxpr: Any) -> float:
    return sum(_equation(equation) for equation in jaxpr.eqns)


def _equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel, layout = equation.invars[1].aval.shape, params["dimension_numbers"].rhs_spec
        taps = math.prod(kernel) / kernel[layout[0]] / math.prod(params["lhs_dilation"])  # its zeros are never met
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * taps
    if name == "pallas_call":
        estimate = params["cost_estimate"]
        return float(estimate.flops) if estimate is not None else 0.0
    if name == "cond":
        return max(_count(branch.jaxpr) for branch in params["branches"])
    turns = params["length"] if name == "scan" else 1
    return turns * sum(_count(inner) for inner in jaxprs_in_params(params))
