"""What a run begins with: noise of its seeds, latents of the images that it was given, and what stays of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jax.sharding import Mesh

from canvax.compile.kinds import Ready
from canvax.denoise import Known
from canvax.families.base import Model
from canvax.images.masks import as_floats
from canvax.noise import initial_noise, pasted_in_the_middle, slerp
from canvax.parallel.mesh import over_batch, padded_batch
from canvax.parallel.place import put
from canvax.params import Params
from canvax.pipelines.request import Request
from canvax.samplers import SamplerTable
from canvax.types import HostArray


def noise_of(request: Request) -> HostArray:
    """Initial noise of each image [n, h, w, C] float32, of its seed and, in part, of its variation seed."""
    options, shape = request.options, request.shape[1:]

    def noise(seeds: list[int]) -> HostArray:
        whole = initial_noise(seeds, shape, options.noise)
        if options.seed_size is None:
            return whole
        factor = request.height // shape[0]
        own = initial_noise(
            seeds, (options.seed_size[0] // factor, options.seed_size[1] // factor, shape[2]), options.noise
        )
        return pasted_in_the_middle(whole, own)

    if not options.variation_strength:
        return noise(request.seeds)
    assert options.variation_seed is not None
    return slerp(noise(request.seeds), noise([options.variation_seed]), options.variation_strength)


def keeps(model: Model, request: Request) -> bool:
    """Whether parts of the given images stay; an inpainting network sees to that by itself."""
    return bool(request.given and request.given.masks) and not model.networks.inpaints


EncodeImages = Callable[[list[HostArray]], HostArray]


def begin(
    model: Model, request: Request, encode: EncodeImages
) -> tuple[HostArray | None, Known | None, HostArray | None]:
    """What a run takes from the images of its request: each [n, h, w, ...], encoded where it is used, else None.

    Latents to begin from; what is to stay of them; and what an inpainting network sees beside the noisy latents.
    """
    given = request.given
    assert given is not None
    if model.networks.inpaints:
        holes, mask = given.behind_latents(model.vae.factor)
        latents = encode(holes)
        masked = np.concatenate([np.broadcast_to(mask, (*latents.shape[:3], 1)), latents], axis=-1)
        images = None if given.from_noise else encode([as_floats(image) for image in given.images])
        return images, None, masked
    images = encode([as_floats(image) for image in given.images])
    return None if given.from_noise else images, given.known(images, model.vae.factor, request.options), None


def start(request: Request, images: HostArray, noise: HostArray, factor: int) -> HostArray:
    """Latents to begin from [n, h, w, C]: those of the images, with something else where they are masked."""
    given, fill = request.given, request.options.mask_fill
    assert given is not None
    if not given.masks or fill in ("original", "fill"):
        return images
    mask = given.latent_masks(len(images), factor, hard=request.options.mask_mode == "hard")
    return (1 - mask) * images + (mask * noise if fill == "noise" else 0)


def encode_images(ready: Ready, params: Params, mesh: Mesh, request: Request, images: list[HostArray]) -> HostArray:
    """Latents of the image of each image of the call [n, h, w, C] float32, on the host; each image is encoded once."""
    shape, split = (padded_batch(1, mesh), request.height, request.width, 3), over_batch(mesh)
    moments = []
    for image in images:
        # Every device encodes the same, so that each of several processes has it.
        outputs = ready["image encoder"](params, put(np.broadcast_to(image, shape), split))
        moments.append([np.asarray(output.addressable_shards[0].data)[0] for output in outputs])
    means, deviations = (np.stack(parts) for parts in zip(*moments, strict=True))
    if request.options.image_encoding == "sample":
        seeds = [(seed + _ENCODING_SEED) % 2**64 for seed in request.seeds]
        means = means + deviations * initial_noise(seeds, request.shape[1:], request.options.noise)
    return np.broadcast_to(means, request.shape).astype(np.float32)


_ENCODING_SEED = 0x9E3779B97F4A7C15
"""Added to an image's seed for the noise of its encoding, which must not be its initial noise again."""


def keep_renoised(known: Known, noise: HostArray, table: SamplerTable, latents: HostArray, row: int) -> HostArray:
    """Latents [n, h, w, C] before ``row`` with the known ones, as noisy, where they stay; at the end without noise."""
    before = known.latents if row == len(table) else table.noised(known.latents, noise, row)
    return ((1 - known.mask) * before + known.mask * latents).astype(np.float32)
