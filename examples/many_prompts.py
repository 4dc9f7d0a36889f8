"""Generate an image for each line of a file, eight at a time: python examples/many_prompts.py PROMPTS.txt

For long files use `canvax batch`: it resumes after a stop, lists what was made and packs the images.
"""

import sys
from pathlib import Path

import canvax

BATCH = 8

prompts = [line for line in Path(sys.argv[1]).read_text("utf-8").splitlines() if line.strip()]
output = Path("out")
output.mkdir(exist_ok=True)

pipe = canvax.load("emoji")
for first in range(0, len(prompts), BATCH):
    batch = prompts[first : first + BATCH]
    # A smaller batch would be another program, so the last batch is filled up.
    filled = batch + [""] * (BATCH - len(batch))
    result = pipe(filled, seed=[first + i for i in range(BATCH)])
    for i, image in enumerate(result.images[: len(batch)]):
        image.save(output / f"prompt-{first + i:05}.png")
    print(f"{first + len(batch)} of {len(prompts)}; programs compiled: {result.compilations}")
