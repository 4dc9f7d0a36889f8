"""Change an image: python examples/edit_image.py"""

from PIL import Image

import canvax

pipe = canvax.load("emoji")
lemon, apple = pipe(["a lemon", "a red apple"], seed=[3, 1]).images

# Image to image. The strength is the amount of change. It never recompiles, so only the first call compiles.
tangerines = [pipe("a tangerine", image=lemon, strength=strength, seed=1) for strength in (0.3, 0.5, 0.7, 0.9)]

# Inpainting. White parts of the mask are generated, black parts stay.
mask = Image.new("L", apple.size, "black")
mask.paste("white", (0, 0, apple.width, apple.height * 2 // 5))
green = pipe("a green apple", image=apple, mask=mask, seed=2)

for result in (*tangerines, green):
    print(*result.save("out"), sep="\n")
