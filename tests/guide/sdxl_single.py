"""The SDXL on TPU v5e page, the script with jit=True. Imports and the cache line differ; prompts are our own."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from canvax.flax_api import FlaxStableDiffusionXLPipeline, replicate

jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())

import time  # noqa: E402

NUM_DEVICES = jax.device_count()

# 1. Load the pipeline
pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(
    "stabilityai/stable-diffusion-xl-base-1.0", revision="refs/pr/95", split_head_dim=True
)

# 2. Cast all parameters to bfloat16 but those of the scheduler
scheduler_state = params.pop("scheduler")
params = jax.tree_util.tree_map(lambda x: x.astype(jnp.bfloat16), params)
params["scheduler"] = scheduler_state

# 3. Inputs
default_prompt = "a castle on a cliff above the sea, watercolour"
default_neg_prompt = "fog, grainy, purple"
default_seed = 33
default_guidance_scale = 5.0
default_num_steps = 25


# 4. Tokens
def tokenize_prompt(prompt, neg_prompt):
    prompt_ids = pipeline.prepare_inputs(prompt)
    neg_prompt_ids = pipeline.prepare_inputs(neg_prompt)
    return prompt_ids, neg_prompt_ids


# 5. A copy for each device
p_params = replicate(params)


def replicate_all(prompt_ids, neg_prompt_ids, seed):
    p_prompt_ids = replicate(prompt_ids)
    p_neg_prompt_ids = replicate(neg_prompt_ids)
    rng = jax.random.PRNGKey(seed)
    rng = jax.random.split(rng, NUM_DEVICES)
    return p_prompt_ids, p_neg_prompt_ids, rng


# 6. All of it
def generate(
    prompt,
    negative_prompt,
    seed=default_seed,
    guidance_scale=default_guidance_scale,
    num_inference_steps=default_num_steps,
):
    prompt_ids, neg_prompt_ids = tokenize_prompt(prompt, negative_prompt)
    prompt_ids, neg_prompt_ids, rng = replicate_all(prompt_ids, neg_prompt_ids, seed)
    assert prompt_ids.shape == (8, 1, 2, 77)
    images = pipeline(
        prompt_ids,
        p_params,
        rng,
        num_inference_steps=num_inference_steps,
        neg_prompt_ids=neg_prompt_ids,
        guidance_scale=guidance_scale,
        jit=True,
    ).images
    assert images.shape == (8, 1, 64, 64, 3)  # (8, 1, 1024, 1024, 3) with the full model
    assert len({image.tobytes() for image in np.asarray(images)}) == 8

    images = images.reshape((images.shape[0] * images.shape[1],) + images.shape[-3:])  # noqa: RUF005
    return pipeline.numpy_to_pil(np.array(images))


# 7. Compile
start = time.time()
print("Compiling ...")
generate(default_prompt, default_neg_prompt)
print(f"Compiled in {time.time() - start}")

# 8. Fast
start = time.time()
prompt = "a rhino in a suit at the bar, photograph"
neg_prompt = "cartoon, illustration, animation"
images = generate(prompt, neg_prompt)
print(f"Inference in {time.time() - start}")

for i, image in enumerate(images):
    image.save(f"castle_{i}.png")
