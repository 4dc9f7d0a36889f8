"""Find the noise of a picture, then change the prompt: python examples/invert.py [PICTURE PROMPT CHANGED]

A row of DDIM is x' = a x + c D(x), with D = p x + q output. Read backwards it is the fixed point of
x = (x' - c q output(x)) / (a + c p), which a few evaluations find (Garibi et al. 2024, "ReNoise"; Pan et al. 2023).
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw

import canvax
from canvax.samplers import SLOTS

TIMES = 5  # evaluations of a row

pipe = canvax.load("emoji")
(height, width), (_, *arguments) = pipe.model.networks.native_size, sys.argv
name, prompt, changed = arguments or ["", "a red apple", "a green apple"]
if name:
    picture = Image.open(name).convert("RGB").resize((width, height))
else:  # by hand: the model has never seen it
    picture = Image.new("RGB", (1024, 1024), "white")
    brush = ImageDraw.Draw(picture)
    brush.ellipse((150, 330, 600, 900), "#d8242f")
    brush.ellipse((420, 330, 870, 900), "#d8242f")
    brush.line([(510, 420), (520, 300), (570, 190)], "#6d4c33", 40)
    brush.ellipse((560, 170, 800, 290), "#5c9e31")
    picture = picture.resize((width, height))
latents = pipe.encode_image(jnp.asarray(np.asarray(picture)[None]))

start = pipe.start(changed, negative_prompt=prompt, num_inference_steps=20, sampler="DDIM", seed=1)
before, after = start.conditions


@jax.jit
def invert(params, latents, text, columns):
    """The noise from which the table's run generates the latents, and the largest change in the last evaluations."""

    def back(x, row):
        a, c, target = row["M"][0, 0], row["M"][0, SLOTS], x

        def nearer(_, pair):
            output = pipe.denoiser(row["c_in"] * pair[0], row["timestep"], text, params=params)
            return (target - c * row["q"] * output) / (a + c * row["p"]), pair[0]

        x, last = jax.lax.fori_loop(0, TIMES, nearer, (x, x))
        return x, jnp.abs(x - last).max()

    rows = {name: column for name, column in columns.items() if name != "init_scale"}
    x, rest = jax.lax.scan(back, latents, rows, reverse=True)
    return x / columns["init_scale"], rest


def draw(noise, conditions, table):
    return canvax.rollout(pipe, pipe.params, noise, start.keys, conditions, table).latents


noise, rest = invert(pipe.params, latents, before, start.table.columns())
print(f"noise of deviation {noise.std():.3f}; the last evaluation changed {rest.max():.1g} at most")

results = {"decoded": latents, "again": draw(noise, before, start.table)}
for scale in (0.5, 1.0, 1.5):  # 0 is the prompt of the picture, 1 the other one
    results[f"changed at {scale:g}"] = draw(noise, (before, after), start.table.with_guidance(scale))
pixels = {name: np.asarray(pipe.decode(latents))[0] for name, latents in results.items()}
error = np.square(pixels["again"] - pixels["decoded"]).mean()
print(f"again: {-10 * np.log10(error):.1f} dB")
row = [np.asarray(picture), *((255 * image).round().astype(np.uint8) for image in pixels.values())]
Image.fromarray(np.concatenate(row, axis=1)).save("inverted.png")
