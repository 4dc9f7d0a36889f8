"""Generate one batch on all devices: python examples/several_devices.py

Without a TPU or several GPUs, the processor can act as eight devices:
XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python examples/several_devices.py
"""

import jax

import canvax

print(*jax.devices(), sep="\n")
pipe = canvax.load("emoji")  # on all devices; canvax.make_mesh(data=4, model=2) splits the weights as well
prompts = ["a red apple", "a dog face", "a lemon", "a house"] * max(1, jax.device_count() // 4)
result = pipe(prompts, seed=list(range(len(prompts))))  # the first call compiles
result = pipe(prompts[::-1], seed=1)  # no later one does
print(f"programs compiled: {result.compilations}; {len(prompts) / result.timings['total']:.1f} images a second")
result.grid().save("grid.png")
