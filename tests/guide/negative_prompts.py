"""The guide with negative prompts, from its first line to its last. Only imports differ; prompts are our own."""

import jax

num_devices = jax.device_count()
device_type = jax.devices()[0].device_kind
print(f"Found {num_devices} JAX devices of type {device_type}.")

# ruff: noqa: E402, RUF005
import jax.numpy as jnp
import numpy as np
from PIL import Image

from canvax.flax_api import FlaxStableDiffusionPipeline, replicate, shard

dtype = jnp.bfloat16
pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(
    "CompVis/stable-diffusion-v1-4",
    revision="bf16",
    dtype=dtype,
)

prompt = "a lighthouse on a cliff in a storm, oil painting, dramatic light"
prompt = [prompt] * jax.device_count()
prompt_ids = pipeline.prepare_inputs(prompt)
assert prompt_ids.shape == (8, 77)

neg_prompt = "blurred, grey, text"
neg_prompt = [neg_prompt] * jax.device_count()
neg_prompt_ids = pipeline.prepare_inputs(neg_prompt)

p_params = replicate(params)

prompt_ids = shard(prompt_ids)
neg_prompt_ids = shard(neg_prompt_ids)
assert prompt_ids.shape == (8, 1, 77)


def create_key(seed=0):
    return jax.random.PRNGKey(seed)


rng = create_key(0)
rng = jax.random.split(rng, jax.device_count())

images = pipeline(prompt_ids, p_params, rng, neg_prompt_ids=neg_prompt_ids, jit=True)[0]
assert images.shape == (8, 1, 64, 64, 3)
without = pipeline(prompt_ids, p_params, rng, jit=True)[0]
assert np.abs(images - without).max() > 0.01


def image_grid(imgs, rows, cols):
    w, h = imgs[0].size
    grid = Image.new("RGB", size=(cols * w, rows * h))
    for i, img in enumerate(imgs):
        grid.paste(img, box=(i % cols * w, i // cols * h))
    return grid


images = images.reshape((images.shape[0] * images.shape[1],) + images.shape[-3:])
images = pipeline.numpy_to_pil(images)
assert image_grid(images, 2, 4).size == (4 * 64, 2 * 64)

prompts = [f"{thing} in the rain" for thing in ("a fox", "a bridge", "a teapot", "a map", "a cat", "a chair", "a", "b")]
prompt_ids = shard(pipeline.prepare_inputs(prompts))
images = pipeline(prompt_ids, p_params, rng, jit=True).images
assert images.shape == (8, 1, 64, 64, 3)
