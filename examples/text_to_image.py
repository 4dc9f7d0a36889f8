"""The shortest way to a picture: python examples/text_to_image.py "a red apple" """

import sys

import canvax

pipe = canvax.load("emoji")
result = pipe(sys.argv[1] if len(sys.argv) > 1 else "a red apple", seed=3)
print(*result.save("out"), sep="\n")
