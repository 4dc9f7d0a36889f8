"""Bridges to the reference implementation (PyTorch diffusers and transformers) for the parity tests."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import torch

from canvax.params import Param, Params, Spec, flatten, unflatten
from tests.support.drawing import psnr as psnr


def randomise(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Give every parameter, biases and norms included, a random value, so that none can hide behind 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim > 1:
                fan_in = p[0].numel()
                p.copy_(noise * fan_in**-0.5)
            elif name.endswith("weight"):
                p.copy_(1 + 0.2 * noise)
            else:
                p.copy_(0.1 * noise)
    return module.eval()


def params_of(module: torch.nn.Module, spec: Spec, prefix: str = "") -> Params:
    """The module's weights in canvax's layout; fails unless names and shapes match the spec exactly."""
    state = {prefix + name: tensor.numpy() for name, tensor in module.state_dict().items()}
    declared: dict[str, Param] = dict(flatten(spec))
    assert set(state) == set(declared), set(state) ^ set(declared)
    for name, param in declared.items():
        assert state[name].shape == param.checkpoint_shapes[0], name
    return unflatten((name, np.ascontiguousarray(p.from_checkpoint(state[name]))) for name, p in declared.items())


def given_noise(monkeypatch: Any, pipe: Any, noise: np.ndarray) -> None:
    """Let a pipeline of diffusers begin from our noise [B, H, W, C], and take the mean of what its VAE encodes."""
    moments = diffusers.models.autoencoders.vae.DiagonalGaussianDistribution
    monkeypatch.setattr(moments, "sample", lambda self, *_: self.mode())
    monkeypatch.setattr(f"{type(pipe).__module__}.randn_tensor", lambda *_, **__: nchw(noise))


def nchw(x: np.ndarray) -> torch.Tensor:
    """[B, H, W, C] array -> [B, C, H, W] tensor."""
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


def nhwc(x: torch.Tensor) -> np.ndarray:
    """[B, C, H, W] tensor -> [B, H, W, C] array."""
    return np.moveaxis(x.detach().numpy(), 1, -1)


def relative_error(got: Any, want: Any) -> float:
    """Largest difference over the largest value of the reference."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(np.abs(got - want).max() / np.abs(want).max())
