"""Write the denoising loop yourself, for any sampler: python examples/your_loop.py

A sampler is a table with a row for each evaluation of the network; see docs/under-the-pipeline.md.
"""

import jax
import jax.numpy as jnp
from PIL import Image

import canvax
from canvax.samplers import build_table

pipe = canvax.load("emoji")
denoiser, decode = jax.jit(pipe.denoiser), jax.jit(pipe.decode)


def generate(prompt: str, noise: jax.Array, sampler: str, scale: float = 3.0) -> jax.Array:
    """Images [B, H, W, 3] in 0..1 from unit-variance noise [B, h, w, C]."""
    table = build_table(pipe.model.scheduler, 20, sampler=sampler)
    conditional, unconditional = pipe.encode(prompt), pipe.encode("")
    state = jnp.zeros((6, *noise.shape)).at[0].set(table.init_scale * noise)
    for row in range(len(table)):
        x = table.c_in[row] * state[0]
        # Weights as arguments: JAX would compile others into the program as constants, which takes long.
        toward, away = (
            denoiser(x, table.timestep[row], text, params=pipe.params) for text in (conditional, unconditional)
        )
        output = away + scale * (toward - away)  # replace this line with your guidance
        denoised = table.p[row] * state[0] + table.q[row] * output
        fresh = jnp.zeros_like(denoised)  # random samplers: jax.random.normal(key, denoised.shape)
        state = jnp.tensordot(table.M[row], jnp.stack([*state, denoised, fresh]), axes=1)
    return decode(state[0], params=pipe.params)


noise = jax.random.normal(jax.random.key(0), (1, 8, 8, 32))
for sampler in ("Euler", "DPM++ 2M", "UniPC"):
    (pixels,) = jax.device_get(generate("a red apple", noise, sampler))
    Image.fromarray((255 * pixels).round().astype("uint8")).save(f"{sampler}.png")
    print(f"{sampler}.png")
