"""Generate with a LoRA at four weights and one seed: python examples/lora.py FILE [MODEL [PROMPT]]"""

import sys

import canvax

file = sys.argv[1]
model = sys.argv[2] if len(sys.argv) > 2 else "emoji"
prompt = sys.argv[3] if len(sys.argv) > 3 else "a cat"

pipe = canvax.load(model)
pipe.adapters.load("style", file)
for weight in (0.0, 0.4, 0.8, 1.2):
    pipe.adapters.set({"style": weight})  # nothing compiles: the weights keep their shapes
    result = pipe(prompt, seed=1)
    print(weight, *result.save("out"))
