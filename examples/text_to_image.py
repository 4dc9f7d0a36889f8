"""Generate an image from a prompt: python examples/text_to_image.py "a red apple" """

import sys

import canvax

prompt = sys.argv[1] if len(sys.argv) > 1 else "a red apple"

pipe = canvax.load("emoji")  # or "owner/name" on the Hub, or a folder
result = pipe(prompt, num_inference_steps=20, guidance_scale=3.0, seed=3)
print(*result.save("out"), sep="\n")
