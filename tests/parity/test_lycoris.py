"""Every algorithm of LyCORIS: what its own layers compute, after their state is read as a file's would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lycoris.modules import locon, loha, lokr

from canvax.adapters import Part, change, faults, kind_of, rank
from canvax.weights.adapter_names import split_name

from .reference import relative_error

ALGORITHMS: dict[str, tuple[type, dict[str, Any]]] = {
    "LoCon": (locon.LoConModule, {"lora_dim": 4, "alpha": 3}),
    "LoCon with a core": (locon.LoConModule, {"lora_dim": 4, "alpha": 3, "use_tucker": True}),
    "LoCon, rank-stabilised": (locon.LoConModule, {"lora_dim": 4, "alpha": 3, "rs_lora": True}),
    "DoRA by outputs": (locon.LoConModule, {"lora_dim": 4, "alpha": 3, "weight_decompose": True}),
    "DoRA by inputs": (locon.LoConModule, {"lora_dim": 4, "alpha": 3, "weight_decompose": True, "wd_on_out": False}),
    "LoHa": (loha.LohaModule, {"lora_dim": 4, "alpha": 3}),
    "LoHa with cores": (loha.LohaModule, {"lora_dim": 4, "alpha": 3, "use_tucker": True}),
    "LoHa with DoRA": (loha.LohaModule, {"lora_dim": 4, "alpha": 3, "weight_decompose": True}),
    "LoKr": (lokr.LokrModule, {"lora_dim": 2, "alpha": 3, "factor": 4}),
    "LoKr of wholes": (lokr.LokrModule, {"lora_dim": 200, "alpha": 3, "factor": 4, "full_matrix": True}),
    "LoKr of products": (lokr.LokrModule, {"lora_dim": 1, "alpha": 3, "factor": 8, "decompose_both": True}),
    "LoKr with a core": (lokr.LokrModule, {"lora_dim": 2, "alpha": 3, "factor": 4, "use_tucker": True}),
    "LoKr with DoRA": (lokr.LokrModule, {"lora_dim": 2, "alpha": 3, "factor": 4, "weight_decompose": True}),
}


@pytest.mark.parametrize("layer", ["linear", "convolution"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm(name: str, layer: str) -> None:
    kind_of_module, keywords = ALGORITHMS[name]
    torch.manual_seed(0)
    base = torch.nn.Linear(24, 32) if layer == "linear" else torch.nn.Conv2d(24, 32, 3, padding=1)
    module = kind_of_module("x", base, 1.0, **keywords).eval()
    with torch.no_grad():
        for own, parameter in module.named_parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + (own == "rescale"))
    roles = {}
    for key, value in (module.custom_state_dict() or module.state_dict()).items():
        split = split_name(f"x.{key}")
        assert split is not None
        assert split.role, key
        roles[split.role] = value.detach().numpy()
    weight = base.weight.detach().numpy()
    kind = kind_of(frozenset(roles))
    assert kind is not None
    shapes = {role: array.shape for role, array in roles.items()}
    alpha = float(roles.pop("alpha", 0.0))
    assert not faults(kind, {role: shapes[role] for role in roles}, weight.shape)
    r = rank(kind, shapes, weight.shape)
    part = Part(kind, roles, alpha / r if alpha and r else 1.0)
    merged = torch.from_numpy(np.ascontiguousarray(weight + change(weight, part)))
    with torch.no_grad():
        if layer == "linear":
            x = torch.randn(40, 24)
            want, got = module(x), torch.nn.functional.linear(x, merged, base.bias)
        else:
            x = torch.randn(2, 24, 9, 9)
            want, got = module(x), torch.nn.functional.conv2d(x, merged, base.bias, padding=1)
    assert relative_error(got, want) < 2e-6
