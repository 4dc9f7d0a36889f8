"""The networks of SDXL and its refiner against PyTorch diffusers; ``test_features`` has whole pipelines."""

from __future__ import annotations

import diffusers
import jax
import numpy as np
import pytest
import torch
import transformers

from canvax.models.clip import clip_configs, clip_encoders
from canvax.models.presets import SDXL_REFINER_UNET, SDXL_TEXT, SDXL_TEXT_2, SDXL_UNET
from canvax.models.text import encode_text
from canvax.models.unet import unet, unet_spec
from canvax.params import flatten
from tests.support.bundled import VOCABULARY
from tests.support.random_numbers import rng

from .peer import clip, clip_config, given, xl_unet
from .reference import nchw, nhwc, params_of, randomise, relative_error

TOLERANCE = 1e-4


@pytest.mark.parametrize("numbers", [6, 5])
def test_unet(numbers: int) -> None:
    cfg = xl_unet(72, 40, numbers)
    assert cfg.time_ids(40) == numbers
    reference = randomise(diffusers.UNet2DConditionModel(**given(cfg)))
    params = params_of(reference, unet_spec(cfg))
    x, text, pooled = (rng.standard_normal(s, np.float32) for s in ((2, 18, 13, 4), (2, 77, 72), (2, 40)))
    time_ids = np.array([[1024, 768, 0, 13, 1000, 2.5], [512, 512, 7, 0, 1280, 6]], np.float32)[:, :numbers]
    t = np.array([981.0, 3.25], np.float32)
    added = {"text_embeds": torch.from_numpy(pooled), "time_ids": torch.from_numpy(time_ids)}
    with torch.no_grad():
        want = nhwc(reference(nchw(x), torch.from_numpy(t), torch.from_numpy(text), added_cond_kwargs=added).sample)
    got = jax.jit(unet, static_argnums=4)(params, x, t, text, cfg, pooled, time_ids)
    assert relative_error(got, want) <= TOLERANCE


@pytest.mark.parametrize("name", ["base", "refiner", "text_encoder", "text_encoder_2"])
def test_full_size_parameters(name: str) -> None:
    """Names and shapes of the released models, without their memory."""
    text = clip_encoders(SDXL_TEXT, SDXL_TEXT_2)
    unets = {"base": SDXL_UNET, "refiner": SDXL_REFINER_UNET}
    with torch.device("meta"):
        if name in unets:
            module = diffusers.UNet2DConditionModel(**given(unets[name]))
        else:
            cls = "CLIPTextModelWithProjection" if name == "text_encoder_2" else "CLIPTextModel"
            module = getattr(transformers, cls)(transformers.CLIPTextConfig(**given(clip_configs(text)[name])))
    prefix = "text_model." if name == "text_encoder" else ""
    declared = dict(flatten(unet_spec(unets[name]) if name in unets else text.specs[name]))
    found = {prefix + key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    assert found == {key: param.checkpoint_shapes[0] for key, param in declared.items()}


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("eos", [2, VOCABULARY - 1], ids=["legacy", "named"])
def test_text_encoders(skip: int, eos: int) -> None:
    cfg = clip_encoders(clip_config("quick_gelu", 2), clip_config("gelu", eos))
    first, second = (
        clip(clip_configs(cfg)["text_encoder"], "CLIPTextModel", 1),
        clip(clip_configs(cfg)["text_encoder_2"], "CLIPTextModelWithProjection", 2),
    )
    params = {
        "text_encoder": params_of(first, cfg.specs["text_encoder"], prefix="text_model."),
        "text_encoder_2": params_of(second, cfg.specs["text_encoder_2"]),
    }
    ids = {name: rng.integers(3, VOCABULARY - 1, (3, 77)) for name in params}
    for i, end in enumerate((5, 40, 76)):
        ids["text_encoder_2"][i, end:] = VOCABULARY - 1
    with torch.no_grad():
        one = first(torch.from_numpy(ids["text_encoder"]), output_hidden_states=True)
        two = second(torch.from_numpy(ids["text_encoder_2"]), output_hidden_states=True)
    want = np.concatenate([out.hidden_states[-(skip + 2)].numpy() for out in (one, two)], axis=-1)
    inputs = {name: {"ids": each, "skip": np.full(3, skip, np.int32)} for name, each in ids.items()}
    got = jax.jit(encode_text, static_argnames="cfg")(params, inputs, cfg=cfg)
    assert relative_error(got["text"], want) <= TOLERANCE
    assert relative_error(got["pooled"], two.text_embeds.numpy()) <= TOLERANCE
    alone = clip_encoders(None, clip_configs(cfg)["text_encoder_2"])
    got = jax.jit(encode_text, static_argnames="cfg")(params, inputs, cfg=alone)
    assert relative_error(got["text"], want[..., 32:]) <= TOLERANCE
