"""The recipe of the model in the package: vocabulary, autoencoder, diffusion, larger autoencoder, finished folder.

Each stage leaves its state in the run's folder, so the same call goes on where the last one stopped. ``run.json`` in it
says what must stay the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from PIL import Image

from canvax.errors import CheckpointError, InputError
from canvax.files import read_json, written
from canvax.models.clip import clip_configs, clip_encoders
from canvax.models.configs import ClipTextConfig, UNetConfig, VaeConfig
from canvax.models.text import FIRST
from canvax.models.vae import vae_spec
from canvax.parallel.mesh import replicated
from canvax.params import Params, init_params
from canvax.pipelines.loaded import open_model
from canvax.pipelines.options import Options
from canvax.tokenizers.clip import ClipTokenizer
from canvax.tokenizers.concepts import FILE as CONCEPTS
from canvax.train.diffusion import denoising_loss, new_denoiser, read_captions
from canvax.train.encoding import encode_pictures
from canvax.train.loop import Plan, Session, check_same, facts_of, fit
from canvax.train.pictures import Pictures, read_pictures
from canvax.train.state import load_state, read_facts, save_state
from canvax.types import DType, HostArray
from canvax.weights.safetensors import open_safetensors
from canvax.weights.save import write_json
from recipes.emoji.assemble import Design, check_tokenizer, open_skeleton, save_model, write_skeleton
from recipes.emoji.autoencoder import (
    KL,
    in_pixel_metric,
    reconstruction_psnr,
    train_autoencoder,
    train_decoder,
)
from recipes.emoji.captions import FORMS, PLAIN
from recipes.emoji.drawings import LICENCES, licences
from recipes.emoji.enlarge import enlarged, reduced, train_pieces, train_whole
from recipes.emoji.variations import variations
from recipes.emoji.vocabulary import learn_vocabulary, save_vocabulary

PREVIEW = (
    "a red apple", "a slice of pizza in the style of noto", "a cat face in the style of twemoji", "an octopus",
    "a hamburger in the style of fluent", "a red heart in the style of fluent flat", "a house", "a rocket",
)  # fmt: skip
"""Prompts of the grids that are drawn along the way."""


@dataclass(frozen=True)
class Recipe:
    """Sizes and plans.

    Attributes:
        size: pixels of a picture along each side.
        enlarge: how many times larger the pictures are than those that the autoencoder learns first; a power of two.
        crop: pixels of the pieces that the autoencoder learns from.
        autoencoder: plan of the autoencoder.
        decoder: plan of its decoder alone, on whole pictures.
        diffusion: plan of text encoder and UNet.
        edges: plan of the levels that enlarge, on pieces.
        pieces: plan of the larger decoder, on pieces.
        whole: plan of the larger autoencoder, on whole pictures.
        variations: number of pictures of each kind of :class:`~recipes.emoji.variations.Variation`.
        decoded: number of pictures of each kind of variation that the larger autoencoder learns from.
        repeats: copies of each drawing among the training data of text encoder and UNet.
        channels: of the UNet's levels; the first, where there are most pixels, has no attention.
        vae_channels: of the first autoencoder's levels; each but the last halves the picture.
        edge_channels: of the levels that enlarge, the largest picture first.
        latent_channels: numbers at each place of the latents.
        kl: weight of the autoencoder's divergence.
        forms: how many of the captions of each drawing are learnt from. The last two, a tag and a style, suit many
            drawings, and the two before leave the style open.
        plain: how many more times a drawing has each of its two captions that are its label alone. Most prompts are
            like them, and they are the hardest captions: drawings of all styles have them.
        width: of the text encoder.
        vocabulary: entries of the tokenizer.
        focus: where the training times lie, see :func:`denoising_loss`.
        mixed: compute in bfloat16.
    """

    size: int
    crop: int
    autoencoder: Plan
    decoder: Plan
    diffusion: Plan
    edges: Plan
    pieces: Plan
    whole: Plan
    enlarge: int
    variations: Mapping[str, int] = field(default_factory=dict)
    decoded: Mapping[str, int] = field(default_factory=dict)
    repeats: int = 1
    channels: tuple[int, ...] = (64, 128, 144)
    vae_channels: tuple[int, ...] = (32, 64, 128)
    edge_channels: tuple[int, ...] = ()
    latent_channels: int = 4
    kl: float = KL
    forms: int = FORMS
    plain: int = 0
    width: int = 160
    vocabulary: int = 2500
    focus: tuple[float, float] | None = None
    mixed: bool = False

    @property
    def design(self) -> Design:
        """The model it makes."""
        lower, vae_channels = len(self.channels) - 1, (*self.edge_channels, *self.vae_channels)
        vae_levels = len(vae_channels)
        unet = UNetConfig(
            sample_size=self.size // 2 ** (vae_levels - 1),
            in_channels=self.latent_channels,
            out_channels=self.latent_channels,
            down_block_types=("DownBlock2D", *["CrossAttnDownBlock2D"] * lower),
            up_block_types=(*["CrossAttnUpBlock2D"] * lower, "UpBlock2D"),
            block_out_channels=self.channels,
            layers_per_block=1,
            attention_head_dim=4,
            cross_attention_dim=self.width,
            norm_num_groups=math.gcd(16, *self.channels),
        )
        vae = VaeConfig(
            latent_channels=self.latent_channels,
            down_block_types=("DownEncoderBlock2D",) * vae_levels,
            up_block_types=("UpDecoderBlock2D",) * vae_levels,
            block_out_channels=vae_channels,
            norm_num_groups=math.gcd(16, *self.vae_channels),
            scaling_factor=1.0,
        )
        text = ClipTextConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_hidden_layers=2,
            num_attention_heads=4,
            eos_token_id=self.vocabulary - 1,
        )
        defaults = {"num_inference_steps": 20, "guidance_scale": 3.0, "hires_strength": 0.1}
        return Design(text, unet, vae, SCHEDULER, defaults)

    @property
    def small(self) -> Recipe:
        """The recipe of the model before its autoencoder is enlarged."""
        return replace(self, size=self.size // self.enlarge, enlarge=1, edge_channels=())

    @property
    def dtype(self) -> DType:
        """Dtype computed in."""
        return jnp.bfloat16 if self.mixed else jnp.float32


SCHEDULER = {
    "_class_name": "DDIMScheduler",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "prediction_type": "v_prediction",
    # On a white ground the mean of a picture matters: training must have seen pure noise, which sampling begins with.
    "rescale_betas_zero_snr": True,
    "set_alpha_to_one": True,
    "steps_offset": 1,  # means nothing with trailing spacing, but diffusers warns of any other number
    "timestep_spacing": "trailing",
}
"""The noise of Stable Diffusion with zero terminal SNR (Lin et al. 2024), drawn with DDIM."""

CRITIC = {"critic": 4e-3}
"""Learning rate of the critic, which must learn faster than the decoder that it judges."""

SIZES: dict[str, Any] = {
    "size": 256,
    "enlarge": 4,
    "crop": 32,
    "channels": (64, 192),
    "vae_channels": (24, 48, 80, 112),
    "edge_channels": (16, 24),
    "latent_channels": 32,
    "kl": 5e-5,
    "forms": 16,
    "plain": 8,
    "focus": (0.4, 1.2),
    "variations": {"mirrored": 7_000, "coloured": 16_000, "pair": 12_000, "count": 6_000},
    "decoded": {"coloured": 600, "pair": 300, "count": 100},
    "repeats": 8,
}
"""The model in the package."""

MORE = {"mirrored": 7_000, "coloured": 24_000, "pair": 60_000, "count": 12_000, "posed": 30_000}
"""Variations for a training that sees each of them a hundred times: with few pairs of each drawing, it would learn them
by heart. Posed drawings are too much for a run on the CPU."""

RECIPES = {
    "gpu": Recipe(
        **{**SIZES, "variations": MORE},
        autoencoder=Plan(steps=12_000, batch=128, learning_rate=1e-3, chunk=100),
        decoder=Plan(steps=4_000, batch=32, learning_rate=3e-4, chunk=100, warmup=500),
        diffusion=Plan(steps=40_000, batch=512, learning_rate=1.5e-3, average=0.9995, chunk=200),
        edges=Plan(steps=600, batch=64, learning_rate=2e-3, chunk=40, warmup=50, average=0.99, final=0.1),
        pieces=Plan(steps=8_000, batch=64, learning_rate=1e-3, rates=CRITIC, chunk=40, warmup=50),
        whole=Plan(steps=4_000, batch=32, learning_rate=5e-4, rates=CRITIC, chunk=20, warmup=50),
        mixed=True,
    ),
    "cpu": Recipe(
        **SIZES,
        autoencoder=Plan(steps=5_500, batch=16, learning_rate=1e-3, chunk=50),
        decoder=Plan(steps=4_000, batch=8, learning_rate=3e-4, chunk=20, warmup=100),
        diffusion=Plan(steps=40_000, batch=32, learning_rate=1e-3, average=0.999, chunk=50),
        edges=Plan(steps=600, batch=8, learning_rate=2e-3, chunk=10, warmup=50, average=0.99, final=0.1),
        pieces=Plan(steps=3_000, batch=8, learning_rate=1e-3, rates=CRITIC, chunk=10, warmup=50, average=0.995),
        whole=Plan(steps=3_000, batch=4, learning_rate=5e-4, rates=CRITIC, chunk=10, warmup=50, average=0.99),
    ),
    "smoke": Recipe(
        size=64,
        enlarge=2,
        crop=16,
        autoencoder=Plan(steps=8, batch=8, chunk=4, warmup=2),
        decoder=Plan(steps=4, batch=8, chunk=4, warmup=2),
        diffusion=Plan(steps=8, batch=8, chunk=4, warmup=2),
        channels=(16, 16, 16),
        vae_channels=(8, 8, 8),
        edge_channels=(8,),
        edges=Plan(steps=4, batch=8, chunk=4, warmup=2),
        pieces=Plan(steps=4, batch=8, chunk=4, warmup=2),
        whole=Plan(steps=4, batch=8, chunk=4, warmup=2),
        variations={"mirrored": 4, "coloured": 4, "pair": 4, "count": 4, "posed": 4},
        decoded={"coloured": 2, "pair": 2},
        width=16,
        vocabulary=700,
    ),
}
"""By name: ``gpu`` and ``cpu`` make models of the same sizes; ``smoke`` nothing to look at, in seconds."""


LENGTH = 77
"""Tokens of a caption."""

REDRAWN, STEPS = (0.7,), 10
"""Strengths, and steps of a whole run, with which the denoiser redraws what the larger decoder learns from."""


@dataclass(frozen=True)
class Run:
    """A recipe at work.

    Attributes:
        recipe: the sizes and plans.
        data: the file of drawings.
        folder: where everything is kept.
        mesh: the devices.
        deadline: ``time.monotonic()`` at which to stop, to go on another time.
        say: told what is going on.
        start: a finished model of this recipe, or one whose autoencoder is yet to be enlarged; its text encoder and
            UNet are trained further. Its vocabulary and latents stay as they are. None to begin with nothing.
    """

    recipe: Recipe
    data: Path
    folder: Path
    mesh: Mesh
    deadline: float | None = None
    say: Callable[[str], None] = field(default=lambda _: None, repr=False)
    start: Path | None = None

    def session(self, stage: str, **more: Any) -> Session:
        """The session of a stage."""
        return Session(self.folder / stage, stage, self.mesh, deadline=self.deadline, **more)


def make_model(run: Run, *, dtype: DType = "float16") -> Path | None:
    """Do, or go on with, all stages; the finished model is in ``run.folder / "model"``.

    Returns:
        The model's folder, or None if the deadline came first.

    Raises:
        InputError: the folder holds a run with other sizes, data or start, or ``run.start`` is a model of other sizes.
        CheckpointError: ``run.start`` cannot be read.
    """
    target, drawings = run.folder / "model", read_pictures(run.data, run.recipe.size)
    _check_same_run(run, drawings)
    if (target / LICENCES).is_file():  # the last file that is written
        run.say(f"{target} is finished")
        return target
    train, held_out = drawings.split("train"), drawings.split("test")
    run.say(f"{len(drawings)} drawings of {run.recipe.size} pixels, {len(held_out)} of them held out")
    recipe = _with_vocabulary(run, train)
    start = _started(run, recipe)
    larger = recipe.enlarge > 1 and (start is None or _levels(start["vae"]) < len(recipe.design.vae.block_out_channels))
    first, smaller = (recipe.small, partial(reduced, factor=recipe.enlarge)) if larger else (recipe, lambda x: x)
    small = replace(train, pixels=smaller(train.pixels))
    if start is None:
        vae, finished = _autoencoder(run, first, small)
        if not finished:
            return None
        vae, finished = _decoder(run, first, small, smaller(held_out.pixels), vae)
        if not finished:
            return None
    else:
        vae = start["vae"]
    denoiser, finished = _diffusion(run, first, small, vae, start)
    if not finished:
        return None
    if larger:
        vae, finished = _enlarged(run, recipe, train, held_out, vae, denoiser)
        if not finished:
            return None
    if not target.exists():
        pipe = open_skeleton(run.folder / "skeleton", run.mesh)
        save_model(pipe, target, {**denoiser, "vae": vae}, dtype)
    with written(target / LICENCES) as path:
        path.write_text(f"Weights: Apache-2.0. Drawings that they were trained on:\n\n{licences()}")
    return target


def _check_same_run(run: Run, drawings: Pictures) -> None:
    """Write what must not change while the run goes on, or compare with it."""
    sizes = {
        name: value for name, value in asdict(run.recipe).items() if not isinstance(getattr(run.recipe, name), Plan)
    }
    start = None if run.start is None else str(run.start.resolve())
    now = json.loads(json.dumps({"data": drawings.digest(), "start": start, **sizes}))
    path = run.folder / "run.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, now)
        return
    before = read_json(path)
    if changed := sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name)):
        problem = f"holds a run with another {', '.join(changed)}"
        raise InputError("output", problem, cure="choose another folder", value=str(run.folder))


def _with_vocabulary(run: Run, train: Pictures) -> Recipe:
    """Learn the tokenizer and write all but the weights; the recipe with the size that the vocabulary came out at."""
    folder = run.folder / "skeleton"
    if run.start is not None and not (folder / "tokenizer").exists():
        if not (run.start / "tokenizer").is_dir():
            raise CheckpointError(f"{run.start}: has no tokenizer; start from a finished model, FOLDER/model of a run")
        shutil.copytree(run.start / "tokenizer", folder / "tokenizer")
    if not (folder / "tokenizer" / "tokenizer_config.json").is_file():
        vocabulary, merges = learn_vocabulary((c for texts in train.captions for c in texts), run.recipe.vocabulary)
        save_vocabulary(folder / "tokenizer", vocabulary, merges, LENGTH)
    tokenizer = ClipTokenizer.from_folder(folder / "tokenizer")
    recipe = replace(run.recipe, vocabulary=tokenizer.backend.get_vocab_size())
    check_tokenizer(tokenizer, recipe.design.text)
    write_skeleton(folder, recipe.design)
    if zipfile.is_zipfile(run.data):
        with zipfile.ZipFile(run.data) as archive:
            if CONCEPTS in archive.namelist():
                archive.extract(CONCEPTS, folder)
    if recipe.enlarge > 1:
        small = _skeleton(run, recipe.small)
        shutil.copytree(folder / "tokenizer", small / "tokenizer", dirs_exist_ok=True)
        write_skeleton(small, recipe.small.design)
    return recipe


def _skeleton(run: Run, recipe: Recipe) -> Path:
    """Folder of all of a model but its weights: the whole one, or that before its autoencoder is enlarged."""
    return run.folder / ("skeleton" if recipe.size == run.recipe.size else "small")


def _levels(vae: Params) -> int:
    return len(vae["decoder"]["up_blocks"])


def _started(run: Run, recipe: Recipe) -> Params | None:
    """The parameters of the model to start from, if there is one."""
    if run.start is None:
        return None
    checkpoint, _, params = open_model(run.start, dtype=jnp.float32, mesh=run.mesh, progress=False)
    design = recipe.design
    sizes = clip_configs(checkpoint.text).get(FIRST), checkpoint.unet
    if sizes != (design.text, design.unet) or checkpoint.vae not in (design.vae, recipe.small.design.vae):
        raise InputError(f"start = {str(run.start)!r} is a model of other sizes than the recipe's")
    return params


def _autoencoder(run: Run, recipe: Recipe, train: Pictures) -> tuple[Params, bool]:
    """The autoencoder in the metric of pixels; a finished one is read, and its training not compiled again."""
    cfg, path = recipe.design.vae, run.folder / "vae.safetensors"
    if path.is_file():
        check_same(path, recipe.autoencoder, len(train))
        return load_state(path, jax.device_put(init_params(vae_spec(cfg), 0), replicated(run.mesh))), True
    params, finished = train_autoencoder(
        train.pixels,
        cfg,
        recipe.autoencoder,
        run.session("autoencoder"),
        crop=recipe.crop,
        kl=recipe.kl,
        dtype=recipe.dtype,
    )
    if not finished:
        return params, False
    params = in_pixel_metric(jax.device_get(params), train.pixels, cfg, run.mesh)
    params = jax.device_put(params, replicated(run.mesh))
    save_state(path, params, facts_of(recipe.autoencoder, len(train)))
    return params, True


def _decoder(run: Run, recipe: Recipe, train: Pictures, held_out: HostArray, vae: Params) -> tuple[Params, bool]:
    """The autoencoder with its decoder trained on whole pictures; likewise."""
    cfg, path = recipe.design.vae, run.folder / "decoder.safetensors"
    if path.is_file():
        check_same(path, recipe.decoder, len(train))
        return load_state(path, vae), True
    before = _shown(vae, held_out, run, recipe)
    params, finished = train_decoder(vae, train.pixels, cfg, recipe.decoder, run.session("decoder"), dtype=recipe.dtype)
    if not finished:
        return params, False
    run.say(f"decoder: {_shown(params, held_out, run, recipe)} dB on held-out drawings, {before} before")
    save_state(path, params, facts_of(recipe.decoder, len(train)))
    return params, True


def _shown(vae: Params, held_out: HostArray, run: Run, recipe: Recipe) -> str:
    """Mean PSNR of the autoencoder on drawings that it has not seen."""
    return f"{reconstruction_psnr(vae, held_out, recipe.design.vae, run.mesh).mean():.2f}" if len(held_out) else "?"


def _diffusion(run: Run, recipe: Recipe, train: Pictures, vae: Params, start: Params | None) -> tuple[Params, bool]:
    """Text encoder and UNet, on small drawings and variations of them."""
    design = recipe.design
    pipe = open_skeleton(_skeleton(run, recipe), run.mesh)
    (tokenizer,) = pipe.model.tokenizers.values()
    samples = _samples(run, recipe, train, vae, tokenizer)
    if samples is None:
        return {}, False
    count = len(train)
    samples = {name: np.concatenate([*[rows[:count]] * recipe.repeats, rows[count:]]) for name, rows in samples.items()}
    data = {"latents": samples["latents"], "captions": {FIRST: samples["ids"]}}
    shared = {"empty": {FIRST: tokenizer([""], length=LENGTH)[0]}}

    def preview(step: int, params: Params) -> None:
        options = Options(progress=False)
        result = pipe(list(PREVIEW), seed=list(range(len(PREVIEW))), params={**params, "vae": vae}, options=options)
        rows = [np.concatenate(list(half), axis=1) for half in np.split(result.pixels, 2)]
        grid = Image.fromarray((255 * np.concatenate(rows, axis=0) + 0.5).astype(np.uint8))
        (run.folder / "previews").mkdir(exist_ok=True)
        grid.save(run.folder / "previews" / f"{step:07d}.png")

    loss = denoising_loss(
        clip_encoders(design.text), design.unet, design.schedule, focus=recipe.focus, dtype=recipe.dtype
    )
    if start is None:
        begin = new_denoiser(design.text, design.unet, recipe.diffusion.seed)
    else:
        begin = {name: start[name] for name in (FIRST, "unet")}
    session = run.session("diffusion", preview=preview)
    return fit(begin, loss, data, len(data["latents"]), recipe.diffusion, session, shared)


def learnt_captions(recipe: Recipe, captions: Sequence[Sequence[str]]) -> list[list[str]]:
    """The captions that training draws from, of each drawing."""
    return [[*of_one[: recipe.forms], *list(of_one[PLAIN]) * recipe.plain] for of_one in captions]


def _samples(
    run: Run, recipe: Recipe, train: Pictures, vae: Params, tokenizer: ClipTokenizer
) -> dict[str, HostArray] | None:
    """Of each drawing, then of each variation: latents [N, 1, h, w, C] float16, and ids of captions [N, M, T].

    None if the deadline came first.
    """
    path, parts = run.folder / "samples.safetensors", run.folder / "latents"
    facts = _facts(run, {name: vae[name] for name in ("encoder", "quant_conv")})
    if (kept := _kept(path, facts)) is not None:
        return kept
    latents, captions = _latents(run, parts, recipe, train, vae, facts)
    if latents is None:
        return None
    count = len(train)
    texts = learnt_captions(recipe, captions[:count]) + [list(of_one[: recipe.forms]) for of_one in captions[count:]]
    samples = {"latents": latents, "ids": read_captions(tokenizer, texts, LENGTH)}
    save_state(path, samples, facts)
    shutil.rmtree(parts)
    return samples


def _latents(
    run: Run, folder: Path, recipe: Recipe, train: Pictures, vae: Params, facts: Mapping[str, Any]
) -> tuple[HostArray | None, list[Sequence[str]]]:
    """Latents and captions; no latents if the deadline came first, and those that were made are in ``folder``."""
    run.say("encoding drawings and variations, but those whose latents are there")
    captions: list[Sequence[str]] = []
    parts = []
    for number, (pixels, texts) in enumerate(_groups(train, recipe.variations)):
        captions += texts
        path = folder / f"{number:03d}.safetensors"
        part = _kept(path, facts)
        if part is None and run.deadline is not None and time.monotonic() > run.deadline:
            return None, captions
        if part is None:
            latents = encode_pictures(vae, pixels, recipe.design.vae, run.mesh).astype(np.float16)[:, None]
            part = {"latents": latents}
            save_state(path, part, facts)
        parts.append(part["latents"])
    return np.concatenate(parts), captions


def _facts(run: Run, params: Params) -> dict[str, Any]:
    """What arrays are made of: the run's drawings and sizes, its vocabulary, and some parameters."""
    digest = hashlib.sha256()
    for name in ("vocab.json", "merges.txt"):
        digest.update((run.folder / "skeleton" / "tokenizer" / name).read_bytes())
    for leaf in jax.tree.leaves(jax.device_get(params)):
        digest.update(np.ascontiguousarray(leaf).data)
    return {**read_json(run.folder / "run.json"), "made of": digest.hexdigest()}


def _kept(path: Path, facts: Mapping[str, Any]) -> dict[str, HostArray] | None:
    """Arrays that an earlier call wrote, or None if there are none, or they were made of something else."""
    if not path.is_file() or read_facts(path) != facts:
        return None
    return {entry.name: entry.read() for entry in open_safetensors(path)}


def _groups(
    train: Pictures, counts: Mapping[str, int], size: int = 2_000
) -> Iterator[tuple[HostArray, list[Sequence[str]]]]:
    """Pixels and captions of all drawings, then of ``size`` variations at a time: all of them may not fit in memory."""
    yield train.pixels, list(train.captions)
    more = variations(train, counts)
    while group := list(islice(more, size)):
        yield np.stack([v.pixels for v in group]), [v.captions for v in group]


def _enlarged(
    run: Run, recipe: Recipe, train: Pictures, held_out: Pictures, small: Params, denoiser: Params
) -> tuple[Params, bool]:
    """The autoencoder of large pictures, which also sees latents as the denoiser makes them."""
    configs = recipe.small.design.vae, recipe.design.vae
    data = _versions(run, recipe, train, {**denoiser, "vae": small})
    vae, how = enlarged(small, *configs), {"dtype": recipe.dtype}
    for name, plan, new in (("edges", recipe.edges, True), ("pieces", recipe.pieces, False)):
        vae, finished = train_pieces(
            vae, small, *data, configs, plan, run.session(name), crop=recipe.crop, new=new, **how
        )  # fmt: skip
        if not finished:
            return vae, False
    vae, finished = train_whole(vae, *data, configs[1], recipe.whole, run.session("whole"), **how)
    if finished:
        run.say(f"autoencoder: {_shown(vae, held_out.pixels, run, recipe)} dB on held-out drawings")
    return {name: part for name, part in vae.items() if name != "critic"}, finished


def _versions(run: Run, recipe: Recipe, train: Pictures, params: Params) -> tuple[HostArray, HostArray]:
    """Drawings and variations, and their latents, true ones and as the denoiser redraws them: [N, V, h, w, C] float16.

    The file has the pixels of the variations alone.
    """
    path, design, facts = run.folder / "versions.safetensors", recipe.small.design, _facts(run, params)
    if (kept := _kept(path, facts)) is not None:
        return np.concatenate([train.pixels, kept["pixels"]]), kept["latents"]
    parts, texts = zip(*_groups(train, recipe.decoded), strict=True)
    pixels, captions = np.concatenate(parts), [of_one[0] for group in texts for of_one in group]
    run.say(f"redrawing {len(pixels)} pictures")
    small = reduced(pixels, recipe.enlarge)
    pipe = open_skeleton(_skeleton(run, recipe.small), run.mesh)
    versions = [encode_pictures(params["vae"], small, design.vae, run.mesh)]
    for strength in REDRAWN:
        parts = [
            pipe(
                captions[i : i + 32], image=list(small[i : i + 32]), strength=strength, num_inference_steps=STEPS,
                seed=i, params=params, output_type="latent", options=Options(progress=False),
            ).latents
            for i in range(0, len(small), 32)
        ]  # fmt: skip
        versions.append(np.concatenate(parts))
    latents = np.stack(versions, axis=1).astype(np.float16)
    save_state(path, {"pixels": pixels[len(train) :], "latents": latents}, facts)
    return pixels, latents
