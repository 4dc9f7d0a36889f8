"""The JAX/Flax guide for Stable Diffusion from its first line to its last. Only imports differ; prompts are our own."""

import jax

num_devices = jax.device_count()
device_type = jax.devices()[0].device_kind
print(f"Found {num_devices} JAX devices of type {device_type}.")

# ruff: noqa: E402, RUF005
import jax.numpy as jnp
import numpy as np
from jax import pmap

from canvax.flax_api import FlaxStableDiffusionPipeline, make_image_grid, replicate, shard

# Load a model
dtype = jnp.bfloat16
pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(
    "CompVis/stable-diffusion-v1-4",
    revision="bf16",
    dtype=dtype,
)

# Inference
prompt = "a lighthouse on a cliff in a storm, oil painting, dramatic light"
prompt = [prompt] * jax.device_count()
prompt_ids = pipeline.prepare_inputs(prompt)
assert prompt_ids.shape == (8, 77)

# parameters
p_params = replicate(params)

# arrays
prompt_ids = shard(prompt_ids)
assert prompt_ids.shape == (8, 1, 77)


def create_key(seed=0):
    return jax.random.PRNGKey(seed)


rng = create_key(0)
rng = jax.random.split(rng, jax.device_count())

images = pipeline(prompt_ids, p_params, rng, jit=True)[0]
same_prompt = images
assert images.shape == (8, 1, 64, 64, 3)  # (8, 1, 512, 512, 3) with the full model

images = images.reshape((images.shape[0] * images.shape[1],) + images.shape[-3:])
images = pipeline.numpy_to_pil(images)
grid = make_image_grid(images, 2, 4)
assert grid.size == (4 * 64, 2 * 64)

# Using different prompts
prompts = [
    "a fox asleep in the snow",
    "a bridge in the rain at night",
    "a teapot in the style of a woodcut",
    "a field of sunflowers, from above",
    "an old map of an island",
    "portrait of a sailor, close-up",
    "a chair made of glass",
    "a cat in a space suit",
]

prompt_ids = pipeline.prepare_inputs(prompts)
prompt_ids = shard(prompt_ids)

images = pipeline(prompt_ids, p_params, rng, jit=True).images
assert np.abs(images - same_prompt).max() > 0.01
different_prompts = images
images = images.reshape((images.shape[0] * images.shape[1],) + images.shape[-3:])
images = pipeline.numpy_to_pil(images)

make_image_grid(images, 2, 4)

# How does parallelization work?
p_generate = pmap(pipeline._generate)

images = p_generate(prompt_ids, p_params, rng)
images = images.block_until_ready()
assert images.shape == (8, 1, 64, 64, 3)
assert np.abs(np.asarray(images) - different_prompts).max() < 0.1  # bfloat16, compiled by two routes
