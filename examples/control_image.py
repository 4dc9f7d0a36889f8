"""Follow the edges of a photo: python examples/control_image.py MODEL CONTROLNET PHOTO PROMPT

For example: stable-diffusion-v1-5/stable-diffusion-v1-5 lllyasviel/sd-controlnet-canny photo.png "a stone house"
"""

import sys

from PIL import Image

import canvax
from canvax.images.maps import control_map

model, controlnet, photo, prompt = sys.argv[1:]

pipe = canvax.load(model, controlnet=controlnet)
edges = control_map("canny", Image.open(photo).convert("RGB"))
# The control's strength and end never recompile.
for scale, end in ((1.0, 1.0), (0.6, 1.0), (1.0, 0.5)):
    result = pipe(prompt, control=edges, control_scale=scale, control_end=end, seed=1)
    print(*result.save("out"), sep="\n")
