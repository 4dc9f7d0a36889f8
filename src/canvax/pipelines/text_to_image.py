"""Text to image with Stable Diffusion 1.x, 2.x and XL: tokenize, encode, noise, table, denoise, decode."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from canvax.compile.aot import Build
from canvax.compile.monitor import Counts, counting
from canvax.compile.programs import PROGRAMS, Programs, at_once
from canvax.denoise import WINDOW, features_shape, initial_state, window_rows
from canvax.errors import Cancelled, InputError, check_count
from canvax.images.convert import to_pil
from canvax.models.text import SECOND, Conditions
from canvax.noise import initial_noise, seed_keys
from canvax.parallel import multihost
from canvax.parallel.memory import Memory, check_programs, cures, explained, free_bytes
from canvax.parallel.mesh import over_batch, padded_batch
from canvax.parallel.place import map_parts, own_rows, put
from canvax.parallel.rules import check_params, is_on, place_all
from canvax.params import Params
from canvax.pipelines.checkpoint import Checkpoint, open_checkpoint
from canvax.pipelines.conditions import check_layers, time_ids, zeros_like
from canvax.pipelines.display import Clock, Display, summary
from canvax.pipelines.estimate import estimate
from canvax.pipelines.options import Options, Step, Tiling, check_merging
from canvax.pipelines.record import metadata
from canvax.pipelines.request import Request, check_size, is_tiled, make_request
from canvax.pipelines.result import Result
from canvax.pipelines.work import Work
from canvax.samplers import SamplerTable, build_table
from canvax.types import Array

Ids = dict[str, np.ndarray]
"""Token ids [B, T] for each text encoder."""


@dataclass(frozen=True, eq=False, repr=False)
class StableDiffusion:
    """A text-to-image pipeline. Made by :meth:`from_pretrained` or :func:`canvax.load`.

    Attributes:
        checkpoint: where the model came from, its configs, tokenizers and noise schedule.
        programs: the compiled programs.
        params: ``{"unet": ..., "vae": ..., "text_encoder": ...}`` (SDXL also ``text_encoder_2``), nested dicts of
            arrays; None when the caller keeps them and passes them to each call.
    """

    checkpoint: Checkpoint
    programs: Programs
    params: Params | None = None

    def __repr__(self) -> str:
        return summary(self)

    @classmethod
    def from_pretrained(cls, model: str | Path, **keywords: Any) -> tuple[Self, Params]:
        """Load a model as ``(pipeline, params)``; keywords are those of :func:`canvax.load`."""
        checkpoint, programs, params = open_checkpoint(model, **keywords)
        return cls(checkpoint, programs), params

    def __call__(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        num_images_per_prompt: int = 1,
        seed: int | Sequence[int] | None = None,
        sampler: str | None = None,
        latents: np.ndarray | Array | None = None,
        options: Options | None = None,
        params: Params | None = None,
    ) -> Result:
        """Draw pictures. Nothing but height, width, the number of images and guidance on or off ever compiles again.

        Guidance that is on in a part of the run alone takes both programs.

        Args:
            prompt: what to draw; a list draws each.
            negative_prompt: what to keep away from; one for all, or one for each prompt.
            height: pixels, divisible by 8; by default the size the model was trained for.
            width: likewise.
            num_inference_steps: steps of the sampler; by default the model's own, else 50.
            guidance_scale: how closely to follow the prompt; 1 or less switches guidance off and halves the work. By
                default the model's own, else 7.5, and 5 for SDXL.
            num_images_per_prompt: images for each prompt.
            seed: image i of the call uses ``seed + i``; a list gives each image its own; None or -1 chooses one.
            sampler: any name from ``canvax samplers``; by default the checkpoint's own.
            latents: initial noise of unit variance [B, h, w, C] float32 in place of the seed's; with
                ``options.denoising_start``, the noisy latents to go on from.
            options: what is seldom changed.
            params: the parameters, if the pipeline does not hold them; if they are not on its
                devices, :meth:`place` puts them there, for this call alone.

        Returns:
            The pictures; where several processes draw together, those of this process.

        Raises:
            InputError: an argument cannot be used; nothing has been compiled.
            Cancelled: the callback returned False.
            OutOfMemoryError: a device has too little memory; before anything runs where that can be foreseen.
        """
        params = self._params(params)
        request = make_request(
            self.checkpoint,
            prompt,
            negative_prompt,
            num_images_per_prompt,
            size=(height, width),
            steps=num_inference_steps,
            guidance=guidance_scale,
            seed=seed,
            sampler=sampler,
            latents=latents,
            options=options,
        )
        about = self.checkpoint
        cure = cures(
            self.programs.mesh,
            about.dtype,
            quantized=about.quantize is not None,
            batch=len(request.prompts),
            height=request.height,
            width=request.width,
        )
        if multihost.is_spread(self.programs.mesh):
            request = replace(request, seeds=multihost.agree(request.seeds, seed, *request.said()))
        with explained(cure), counting() as counts:
            return self._draw(params, request, cure, counts)

    def save(
        self, folder: str | Path, params: Params | None = None, *, dtype: Any = None, overwrite: bool = False
    ) -> Path:
        """Write the model in the diffusers layout, which PyTorch diffusers loads.

        Where several processes run, the first one writes and all wait for it.

        Args:
            folder: where to write; one that is not empty only with ``overwrite``, which replaces files.
            params: the parameters, if the pipeline does not hold them.
            dtype: of the written arrays; their own by default.
            overwrite: see ``folder``.
        """
        params, spread = self._params(params), multihost.is_spread(self.programs.mesh)
        if any(len({device.process_index for device in row}) > 1 for row in self.programs.mesh.devices):
            raise InputError("mesh splits the weights over several processes; load with model=1 to save them")
        with multihost.together("canvax save") if spread else nullcontext():
            if not spread or multihost.leads(self.programs.mesh):
                self.checkpoint.save(folder, params, dtype=dtype, overwrite=overwrite)
        return Path(folder)

    def place(self, params: Params) -> Params:
        """``params`` on the devices of this pipeline, each of which receives its own part; what is there stays there.

        Args:
            params: arrays of any kind, on the host or on devices; nested dicts as :meth:`from_pretrained` returns them.

        Raises:
            InputError: they do not fit the model.
        """
        return {
            part.name: place_all(part.spec, params.get(part.name, {}), self.programs.mesh, part.name)
            for part in self.checkpoint.components
        }

    def memory(
        self, height: int | None = None, width: int | None = None, batch: int = 1, *, guided: bool = True
    ) -> Memory:
        """What each device needs to draw ``batch`` images at once, estimated in seconds, without compiling.

        Args:
            height: pixels, divisible by 8; by default the size the model was trained for.
            width: likewise.
            batch: images of one call.
            guided: whether the guidance scale is above 1.
        """
        found = estimate(
            self.checkpoint,
            dtype=self.checkpoint.dtype,
            size=(height, width),
            batch=batch,
            sizes=self.programs.mesh.shape,
            platform=self.programs.mesh.devices.flat[0].platform,
            guided=guided,
        )
        free = free_bytes(self.programs.mesh)
        held = found.weights if self.params is not None else 0
        return replace(found, limit=None if free is None else free + held)

    def compile(
        self,
        height: int | None = None,
        width: int | None = None,
        batch: int = 1,
        *,
        guidance: bool = True,
        reuse_layers: int = 0,
        token_merging: float = 0.0,
        progress: bool = True,
        params: Params | None = None,
    ) -> tuple[Build, ...]:
        """Make the three programs of a size and batch ready, without running them.

        They come from the cache if they are there, and are compiled and kept there if not.

        Args:
            height: pixels, divisible by 8; by default the size the model was trained for.
            width: likewise.
            batch: number of images, rounded up to the number of devices.
            guidance: with it on; a guidance scale of 1 or less is another program.
            reuse_layers: for ``options.reuse``: ``options.reuse_layers``, which is 1 unless you change it.
            token_merging: for ``options.token_merging``.
            progress: show what is done on stderr.
            params: the parameters, if the pipeline does not hold them. Shapes, dtypes and shardings are enough
                (``jax.ShapeDtypeStruct``).

        Returns:
            What was loaded or compiled, and what that took; nothing for what this pipeline had ready.

        Raises:
            InputError: an argument cannot be used; nothing has been compiled.
        """
        params = self._params(params)
        side, factor = self.checkpoint.native_size, self.programs.vae.factor
        height, width = check_size("height", height, side[0]), check_size("width", width, side[1])
        images = padded_batch(check_count("batch", batch), self.programs.mesh)
        shape = (images, height // factor, width // factor, self.programs.unet.in_channels)
        table = build_table(self.checkpoint.scheduler, self.checkpoint.defaults.num_inference_steps)
        display = Display(shown=progress and multihost.leads(self.programs.mesh))
        if reuse_layers:
            check_layers(reuse_layers, self.checkpoint)
        check_merging(token_merging)
        self._build(params, shape, {guidance}, table, display, layers=reuse_layers, merging=token_merging)
        return tuple(sorted(display.builds, key=lambda build: PROGRAMS.index(build.program)))

    def _build(
        self,
        params: Params,
        shape: tuple[int, int, int, int],
        guided: Collection[bool],
        table: SamplerTable,
        display: Display,
        *,
        layers: int = 0,
        merging: float = 0.0,
        decoder: Tiling | None = "auto",
    ) -> tuple[Any, dict[bool, Any], Any]:
        """The programs for latents of ``shape``: a denoiser with guidance, one without, or both, by ``guided``.

        With ``layers`` they reuse what lies deeper, with ``merging`` they merge tokens. ``decoder`` None: it is not
        wanted, and None in its place.
        """
        programs, tell = self.programs, display.announce
        height, width = (side * programs.vae.factor for side in shape[1:3])
        denoise = partial(
            programs.denoise, params, shape, clip=table.clip, layers=layers, merging=merging, announce=tell
        )
        encode, decode, *denoisers = at_once(
            [
                lambda: programs.encode_text(params, shape[0], tell),
                lambda: (
                    programs.decode(params, shape, tell, tiled=is_tiled(height, width, decoder)) if decoder else None
                ),
                *(partial(denoise, guided=one) for one in guided),
            ]
        )
        return encode, dict(zip(guided, denoisers, strict=True)), decode

    def _draw(self, params: Params, request: Request, cure: str, counts: Counts) -> Result:
        began = time.perf_counter()
        mesh, shape = self.programs.mesh, request.shape
        display = Display(shown=request.options.progress and multihost.leads(mesh))
        clock = Clock()
        table = self._table(request)
        ids = self._tokenize(request.prompts, request.prompts_2)
        negative_ids = self._tokenize(request.negatives, request.negatives_2)

        padded = (padded_batch(shape[0], mesh), *shape[1:])
        whole = request.options.denoising_end == 1
        work = Work.of(table, guided=request.guided, reuse=request.options.reuse, order=request.options.reuse_order)
        layers = request.options.reuse_layers if work.reuses else 0
        static = {"layers": layers, "merging": request.options.token_merging}
        tiling = request.options.tiling if whole else None
        encode, denoise, decode = self._build(params, padded, work.programs, table, display, **static, decoder=tiling)

        for one in denoise.values():
            check_programs({"text encoder": encode, "denoiser": one, "decoder": decode}, mesh, cure)

        with clock("encode"):
            conditions, negative = self._conditions(
                partial(encode, self.programs.text_params(params)), ids, negative_ids, request, padded
            )
            jax.block_until_ready(conditions)
        with clock("denoise"):
            noise = request.latents
            if noise is None:
                noise = initial_noise(request.seeds, shape[1:], request.options.noise)
            state = self._denoise(denoise, params, conditions, negative, noise, work, request, display, padded)
            indices, own = own_rows(state, shape[0])
            latents = own[:, 0]
        with clock("decode"):
            pixels = np.zeros((0, request.height, request.width, 3), np.float32)
            if decode:
                _, pixels = own_rows(decode(params["vae"], map_parts(lambda part: part[:, 0], state)), shape[0])

        timings = {"compile": display.compile_seconds, **clock.seconds}
        timings["step"] = timings["denoise"] / len(table)
        timings["first_step"] = display.first_step - began
        timings["total"] = time.perf_counter() - began
        told = metadata(self.checkpoint, request)
        told = [told[i] for i in indices]
        return Result(to_pil(pixels), pixels, latents, told, timings, counts.compilations, indices)

    def _denoise(
        self,
        programs: Mapping[bool, Any],
        params: Params,
        conditions: Conditions,
        negative: Conditions | None,
        noise: np.ndarray,
        work: Work,
        request: Request,
        display: Display,
        padded: tuple[int, ...],
    ) -> Array:
        """Run all rows of the table, a few at a time; returns the final state, its batch filled up."""
        batch, table, total = len(noise), work.table, len(work.table)
        callback = request.options.callback
        # Processes that draw together keep step: what one of them measures may not decide how far it goes.
        singly = callback or multihost.is_spread(self.programs.mesh)
        features = None
        keys = self._put(seed_keys(request.seeds), padded)
        state = self._put(initial_state(noise, np.full(batch, table.init_scale)), padded)
        with display.bar(total) as bar:
            for stretch, start, count in work.calls(lambda left: 1 if singly else bar.chunk(left)):
                rows, noisy = window_rows(table, start, WINDOW, padded[0])
                batched = {name: self._put(column, padded) for name, column in rows.items()}
                told = (conditions, negative if stretch.guided else None)
                if start == stretch.start:
                    features = self._no_features(params, work, request, padded, guided=stretch.guided)
                reuse = work.reuse(start, features)
                state, denoised, features = programs[stretch.guided](
                    params["unet"], state, *told, batched, keys, noisy, np.int32(count), reuse
                )
                jax.block_until_ready(state)
                done = start + count
                bar.advance(count)
                display.stepped()
                if callback:
                    _, noisy_state = own_rows(state, batch)
                    step = Step(done - 1, total, noisy_state[:, 0], own_rows(denoised, batch)[1])
                    if isinstance(go_on := callback(step), bool | np.bool_) and not go_on:
                        raise Cancelled(f"cancelled by the callback after step {done} of {total}")
        return state

    def _no_features(
        self, params: Params, work: Work, request: Request, padded: tuple[int, ...], *, guided: bool
    ) -> Array | None:
        """Deep features before the first row of a stretch, which computes them; None if nothing is reused."""
        if not work.reuses:
            return None
        shape = features_shape(self.programs.unet, padded, request.options.reuse_layers, guided=guided)
        dtype = params["unet"]["conv_in"]["weight"].dtype
        return put(np.zeros(shape, dtype), over_batch(self.programs.mesh))

    def _table(self, request: Request) -> SamplerTable:
        options = request.options
        return build_table(
            self.checkpoint.scheduler,
            request.steps,
            sampler=request.sampler,
            eta=options.eta,
            spacing=options.spacing,
            sigmas=options.sigmas,
            guidance=options.guidance_steps or request.guidance,
            rescale=options.guidance_rescale,
            start=options.denoising_start,
            end=options.denoising_end,
            guidance_interval=options.guidance_interval,
            settings=options.settings,
        )

    def _conditions(
        self, encode: Any, ids: Ids, negative_ids: Ids, request: Request, padded: tuple[int, ...]
    ) -> tuple[Conditions, Conditions | None]:
        """What the UNet is told about each image and, if guided, about what to keep away from."""
        skip = np.int32(request.options.clip_skip)

        def told(ids: Ids) -> Conditions:
            return encode({name: self._put(array, padded) for name, array in ids.items()}, skip)

        conditions, negative = told(ids), None
        if request.guided:
            negative = zeros_like(conditions) if request.zeros else told(negative_ids)
        if self.checkpoint.is_xl:
            refiner = self.checkpoint.is_refiner
            numbers = time_ids(request.options, request.height, request.width, refiner=refiner)
            for half, row in zip((conditions, negative), numbers, strict=True):
                if half is not None:
                    half["time_ids"] = self._put(np.tile(row, (padded[0], 1)), padded)
        return conditions, negative

    def _tokenize(self, prompts: list[str], prompts_2: list[str]) -> Ids:
        """Ids for each text encoder; one that is alone reads the first prompts."""
        length, tokenizers = self.programs.text.tokens, self.checkpoint.tokenizers
        second = prompts_2 if len(tokenizers) > 1 else prompts
        return {name: one(second if name == SECOND else prompts, length=length) for name, one in tokenizers.items()}

    def _put(self, array: np.ndarray, padded: tuple[int, ...]) -> Array:
        """On the devices, split over the batch; the batch is filled up to ``padded`` with copies of its last entry."""
        missing = padded[0] - len(array)
        if missing:
            array = np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])
        return put(array, over_batch(self.programs.mesh))

    def _params(self, params: Params | None) -> Params:
        params = self.params if params is None else params
        if params is None:
            raise InputError("params=None: this pipeline holds no parameters; pass those that from_pretrained returned")
        if params is self.params:
            return params
        if not isinstance(params, Mapping):
            raise InputError(f"params={params!r} is not a dict of arrays; pass those that from_pretrained returned")
        for part in self.checkpoint.components:
            check_params(part.spec, params.get(part.name, {}), part.name)
        return params if is_on(params, self.programs.mesh) else self.place(params)
