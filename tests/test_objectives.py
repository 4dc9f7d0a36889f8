"""What training minimises, against the same sums written in numpy, with noise that is not zero."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_finetune import write_pictures

from canvax.errors import InputError
from canvax.models.clip import clip_encoders
from canvax.models.configs import VaeConfig
from canvax.parallel.mesh import make_mesh
from canvax.pipelines import loaded
from canvax.samplers import NoiseSchedule, from_scheduler_config
from canvax.samplers.schedule import make_betas
from canvax.train import diffusion, objectives
from canvax.train.finetune import finetune
from canvax.train.task import Training
from tests.support.small_checkpoint import SCHEDULER, TEXT, UNET, write_small_checkpoint

ALPHAS = np.cumprod(1 - make_betas("scaled_linear", 0.00085, 0.012, 1000))
KINDS = ("epsilon", "v_prediction", "sample")


def run_loss(
    monkeypatch: pytest.MonkeyPatch, kind: str | NoiseSchedule, batch: int, **options: Any
) -> tuple[dict[str, np.ndarray], float, float]:
    """Loss and mse of a network that halves its input, and what that network was given."""
    seen: dict[str, Any] = {}

    def encode_text(p: Any, inputs: Any, *, cfg: Any) -> Any:
        seen["ids"] = np.asarray(inputs["text_encoder"]["ids"])
        return {"text": inputs["text_encoder"]["ids"]}

    def unet(p: Any, x: Any, times: Any, *, text: Any, cfg: Any, options: Any, residuals: Any) -> Any:
        seen.update(x=np.asarray(x, np.float64), times=np.asarray(times))
        return 0.5 * x

    monkeypatch.setattr(diffusion, "encode_text", encode_text)
    monkeypatch.setattr(diffusion, "unet", unet)
    schedule = NoiseSchedule(ALPHAS, kind) if isinstance(kind, str) else kind
    loss = diffusion.denoising_loss(clip_encoders(TEXT), UNET, schedule, **options)
    x0 = np.random.default_rng(0).standard_normal((batch, 1, 2, 2, 3), np.float32)
    ids = np.arange(1, batch + 1, dtype=np.int32).reshape(batch, 1, 1)
    samples = {"latents": jnp.asarray(x0), "captions": {"text_encoder": jnp.asarray(ids)}}
    shared = {"empty": {"text_encoder": jnp.zeros(1, jnp.int32)}}
    value, parts = loss({"text_encoder": {}, "unet": {}}, samples, shared, jax.random.key(5))
    seen.update(x0=x0[:, 0].astype(np.float64), own_ids=ids[:, 0])
    return seen, float(value), float(parts["mse"])


@pytest.mark.parametrize("gamma", [None, 0.7, 5.0])
@pytest.mark.parametrize("kind", KINDS)
def test_denoising_loss_by_hand(monkeypatch: pytest.MonkeyPatch, kind: str, gamma: float | None) -> None:
    seen, value, mse = run_loss(monkeypatch, kind, 64, gamma=gamma, empty=0.0)
    np.testing.assert_array_equal(seen["ids"], seen["own_ids"])
    a = ALPHAS[seen["times"]]
    alpha, std = (np.sqrt(part).reshape(-1, 1, 1, 1) for part in (a, 1 - a))
    eps = (seen["x"] - alpha * seen["x0"]) / std
    assert abs(eps.mean()) < 0.2
    assert 0.9 < eps.std() < 1.1
    target = {"epsilon": eps, "v_prediction": alpha * eps - std * seen["x0"], "sample": seen["x0"]}[kind]
    errors = ((0.5 * seen["x"] - target) ** 2).mean((1, 2, 3))
    # Hang et al. 2023, section 3.4, with SNR + 1 for v so that pure noise still counts.
    snr = a / (1 - a)
    weights = {
        "epsilon": [min(s, gamma or 0) / s for s in snr],
        "v_prediction": [min(s + 1, gamma or 0) / (s + 1) for s in snr],
        "sample": [min(s, gamma or 0) for s in snr],
    }[kind]
    assert mse == pytest.approx(errors.mean(), rel=1e-3)
    assert value == pytest.approx((errors if gamma is None else weights * errors).mean(), rel=1e-3)


def test_loss_of_a_flow_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Esser et al. 2024, eq. 23: the times are shifted."""
    schedule = NoiseSchedule.flow(1000, 3.0)
    seen, value, mse = run_loss(monkeypatch, schedule, 64, gamma=None, empty=0.0)
    t = seen["times"] / 1000
    even = np.sort(1000 * t / (3 - 2 * t))
    np.testing.assert_array_less(np.abs(even - 1000 * (np.arange(64) + 0.5) / 64), 1000 / 64)
    t = t.reshape(-1, 1, 1, 1)
    eps = (seen["x"] - (1 - t) * seen["x0"]) / t
    assert abs(eps.mean()) < 0.2
    assert 0.9 < eps.std() < 1.1
    want = ((0.5 * seen["x"] - (eps - seen["x0"])) ** 2).mean()
    assert mse == pytest.approx(want, rel=1e-3)
    assert value == pytest.approx(want, rel=1e-3)
    with pytest.raises(InputError) as caught:
        run_loss(monkeypatch, schedule, 64, gamma=5.0)
    assert caught.value.argument == "gamma"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
def test_the_share_of_empty_captions(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    batch = 10_000
    seen, _, _ = run_loss(monkeypatch, "epsilon", batch, empty=share)
    without = seen["ids"] == 0
    assert abs(without.mean() - share) <= 4 * np.sqrt(share * (1 - share) / batch)
    np.testing.assert_array_equal(seen["ids"], np.where(without, 0, seen["own_ids"]))
    if share:  # neither early nor late times, nor the first images of a batch, are without words more often
        for half in (seen["times"] < 500, np.arange(batch) < batch // 2):
            assert abs(without[half].mean() - share) <= 4 * np.sqrt(share * (1 - share) / half.sum())


def test_autoencoder_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    images = rng.uniform(-1, 1, (2, 4, 4, 3))
    mean, logvar, noise = rng.standard_normal((3, 2, 4, 4, 3)) * np.array([1.0, 0.7, 1.0]).reshape(3, 1, 1, 1, 1)
    cfg = replace(VaeConfig(), scaling_factor=0.25, shift_factor=0.5)

    def encode(p: Any, x: Any, cfg: Any) -> Any:
        np.testing.assert_allclose(x, images, rtol=1e-6)
        return jnp.asarray(mean, jnp.float32), jnp.asarray(logvar, jnp.float32)

    monkeypatch.setattr(objectives, "vae_encode", encode)
    monkeypatch.setattr(objectives, "vae_decode", lambda p, z, cfg: jnp.tanh(z / cfg.scaling_factor + cfg.shift_factor))
    value, parts = objectives.autoencoder_loss(
        {}, jnp.asarray(images, jnp.float32), jnp.asarray(noise, jnp.float32), cfg, kl=0.3, edges=2.0
    )
    error = np.tanh(mean + np.exp(logvar / 2) * noise) - images
    mse = (error**2).mean()
    outlines = np.abs(error[:, 1:] - error[:, :-1]).mean() + np.abs(error[:, :, 1:] - error[:, :, :-1]).mean()
    # Kingma and Welling 2014, appendix B: -KL = (1 + log var - mean^2 - var) / 2.
    kl = -(1 + logvar - mean**2 - np.exp(logvar)).mean() / 2
    assert float(parts["mse"]) == pytest.approx(mse, rel=1e-5)
    assert float(parts["kl"]) == pytest.approx(kl, rel=1e-5)
    assert float(value) == pytest.approx(mse + 2.0 * outlines + 0.3 * kl, rel=1e-5)


UNTRAINABLE = {
    "EDM": ({"_class_name": "EDMEulerScheduler"}, "EDM"),
    "angle": ({"_class_name": "IPNDMScheduler"}, "IPNDM"),
}


def test_every_prediction_is_trained() -> None:
    for prediction in KINDS:
        diffusion.denoising_loss(
            clip_encoders(TEXT), UNET, from_scheduler_config(SCHEDULER | {"prediction_type": prediction}).schedule
        )


@pytest.mark.parametrize("kind", UNTRAINABLE)
def test_fine_tuning_refuses_them_before_weights_are_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, message = UNTRAINABLE[kind]
    model = write_small_checkpoint(tmp_path / "model", scheduler=config)
    pictures = write_pictures(tmp_path / "images")
    monkeypatch.setattr(loaded, "load_components", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(InputError, match=message):
        finetune(Training(model, pictures, tmp_path / "run"), make_mesh(jax.devices()[:1]))
    assert not (tmp_path / "run").exists()
