"""The procedure shared by every kind of training from a checkpoint.

A kind of training is a ``TrainingTask``, which defines the trained parameters and how the result is saved. The rest is
here: opening the model, reading and encoding images, the loop, previews, and resuming a stopped run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh

from canvax.call import LOCATION, PARTS, Load
from canvax.errors import HintWarning, InputError, check_utf8, needs
from canvax.families.base import Model
from canvax.images.grid import make_grid
from canvax.models.controlnet import ControlNet
from canvax.parallel.memory import available_bytes, gigabytes
from canvax.parallel.multihost import fail_together, is_main_process, is_spread
from canvax.params import Params
from canvax.pipelines.checks import default_dtype
from canvax.pipelines.loaded import open_model
from canvax.pipelines.options import Options
from canvax.pipelines.pipeline import Pipeline
from canvax.pipelines.request import Call, make_request
from canvax.pipelines.result import make_folder
from canvax.quantize import check_kind
from canvax.samplers.schedule import NoiseSchedule
from canvax.settings import check_all
from canvax.train import settings
from canvax.train.diffusion import Assemble, Reader, denoising_data, denoising_loss, replaced
from canvax.train.encoding import encode_captions, encode_pictures
from canvax.train.log import TensorBoard, check_board
from canvax.train.loop import STATE, Plan, Session, check_same, fit, is_longer
from canvax.train.objectives import check_trainable
from canvax.train.pictures import MASK, MASK_ENDING, Pictures, check_apart, read_pictures
from canvax.train.settings import TrainingRecord
from canvax.train.state import read_facts
from canvax.types import DType, HostArray
from canvax.weights.cast import parse_dtype
from canvax.weights.overrides import Overrides

Captions = Sequence[Sequence[str]]
"""The captions of each image."""

PLAN = Plan(**settings.PLAN)
"""The usual settings for fine-tuning Stable Diffusion: AdamW, constant learning rate 1e-5."""


@dataclass(frozen=True)
class Training(TrainingRecord):
    """The model, the images and the settings of a training.

    Attributes:
        model: a folder in the diffusers layout, a single file, a bundled model or a Hub id. Stable Diffusion 1.x, 2.x
            or XL; for a LoRA also Z-Image, FLUX.2 or Krea 2, which is loaded in ``dtype``.
        pictures: folder or zip file of images, with captions unless the kind of training defines them.
        folder: folder of the run's state and result.
        plan: steps, batch size, learning rate and similar settings.
        size: side of the images in pixels; by default the size the model was trained for.
        caption_column: column of captions in ``metadata.jsonl`` or ``metadata.csv``.
        flip: also train on the mirror image of every image.
        gamma: bound of the min-SNR weights, None for no weights; flow models have none.
        empty: fraction of empty captions.
        unmasked_weight: minimum weight of positions outside a mask, by default 0; with 1 masks are not read.
        remat: recompute activations in the backward pass, which takes less memory but more time.
        dtype: dtype of the computation, not float16; by default bfloat16 on GPU and TPU, float32 on the CPU.
        quantize: "int8" or "float8" to keep the large weights of the frozen denoiser in 8 bits, for a LoRA (QLoRA,
            Dettmers et al. 2023); blocks are then recomputed as with ``remat``.
        prompts: prompts of the images that are generated during training, in the folder ``previews``.
        preview_steps: steps between previews; by default they come every 15 minutes, and always after the last step.
        save_steps: number of steps after which the weights are saved again during training, in the folder of the
            result (``numbered``); None to save only the result.
        tensorboard: folder of curves and previews for TensorBoard; needs tensorboardX.
        loading: further arguments of ``canvax.load``: where files come from, ``prediction_type`` and ``scheduler``.
        times: distribution of the training times: "uniform"; "logit-normal" (Esser et al. 2024, section 3.1); or
            "shifted" as at inference, for flow models whose times depend on the image size.
        fsdp: split the trained parameters and the optimizer's moments over the devices of one process.
    """

    plan: Plan = PLAN

    def __post_init__(self) -> None:
        check_all(self)
        if self.dtype is not None and parse_dtype(self.dtype) == np.float16:
            raise InputError("dtype", "rounds small gradients to 0", cure="take bfloat16 or float32", value="float16")
        check_kind(self.quantize, trained=True)
        for name in self.loading.keys() - {*LOCATION, "prediction_type", "scheduler"}:
            raise InputError("loading", "is not an argument of loading for training", cure="leave it out", value=name)
        self.source()
        if self.tensorboard is not None:
            check_board(self.tensorboard)

    def source(self) -> dict[str, Any]:
        """Return the keywords of ``open_model`` that say where the model is and what its files do not say."""
        load = Load(model=self.model, **self.loading)
        return {**load.keywords(LOCATION), "overrides": Overrides.of(**load.keywords(PARTS))}


@dataclass(frozen=True)
class Subject:
    """The captions of images without captions, and the class images that keep the model from forgetting.

    Attributes:
        captions: captions of every image; () to read captions from files.
        control_column: the column of control images.
        prior: folder of class images.
        prior_caption: caption of the class images, e.g. "a photo of a dog".
        prior_weight: weight of the loss on class images.
    """

    captions: tuple[str, ...] = ()
    control_column: str | None = None
    prior: Path | None = None
    prior_caption: str = ""
    prior_weight: float = 1.0

    def __post_init__(self) -> None:
        for text in (*self.captions, self.prior_caption):
            check_utf8("caption", text)
        if self.prior_weight <= 0:
            raise InputError("prior_weight", "must be more than 0", value=self.prior_weight)
        for name, differs in (("prior_caption", self.prior_caption), ("prior_weight", self.prior_weight != 1)):
            if self.prior is None and differs:
                raise needs(name, "prior", cure="it is the folder of pictures of the class")


FILE_CAPTIONS = Subject()


@dataclass(frozen=True, eq=False)
class InitialState:
    """The initial state of a training.

    Attributes:
        trained: the trained parameters by component, host arrays.
        frozen: the parameters that are used but not trained.
        assemble: makes all parameters from trained and frozen ones.
        control: the ControlNet that is trained, if any.
    """

    trained: Params
    frozen: Params
    assemble: Assemble = replaced
    control: ControlNet | None = None


class TrainingTask(Protocol):
    """A kind of training.

    Attributes:
        name: name in the progress line.
        part: subfolder of the run's state.
        facts: settings that must not change when a run is resumed.
        rates: component -> its learning rate, where it differs.
        for_transformers: whether it also trains models without a UNet.
    """

    @property
    def name(self) -> str: ...

    @property
    def part(self) -> str: ...

    @property
    def facts(self) -> dict[str, Any]: ...

    @property
    def rates(self) -> dict[str, float]: ...

    @property
    def for_transformers(self) -> bool: ...

    def files(self, folder: Path) -> Sequence[Path]:
        """Return the paths of the result; the first one is written last."""
        ...

    def check(self, model: Model, training: Training) -> None:
        """Refuse, before weights are read, a model that this training does not support."""
        ...

    def exact(self, model: Model) -> Collection[str]:
        """Return the components that training or its result begins with, which are read in float32."""
        ...

    def begin(self, model: Model, params: Params, training: Training, dtype: DType) -> InitialState:
        """Return the initial state. Trained parameters may be removed from ``params``, so that there is one copy."""
        ...

    def shown(self, model: Model, params: Params, trained: Params) -> Params:
        """Return the parameters for generating previews."""
        ...

    def save(self, target: Path, model: Model, params: Params, trained: Params, training: Training) -> Path:
        """Write the trained parameters, whole or not at all."""
        ...


Aim, Start = TrainingTask, InitialState  # former names


def train(
    training: Training,
    aim: TrainingTask,
    mesh: Mesh,
    *,
    subject: Subject = FILE_CAPTIONS,
    deadline: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path | None:
    """Train from a checkpoint, or resume the run in ``training.folder``, or make it longer if it is finished.

    Args:
        training: the model, the images and the settings.
        aim: the kind of training.
        mesh: the devices; the batch is split over ``data``.
        subject: captions of images without captions, and class images.
        deadline: ``time.monotonic()`` at which to write the state and stop.
        say: called with messages about the progress.

    Returns:
        The path of the result, or None if the deadline came first.

    Raises:
        InputError: an argument is invalid, the model or an image cannot be used, or the folder contains another run.
        CheckpointError: the model cannot be read.
    """
    if training.fsdp and is_spread(mesh):
        raise InputError("fsdp", "is for the devices of one process", cure="leave it out", value=True)
    target, *others = aim.files(training.folder)
    check_folder(training, aim)
    check_pictures(training, subject)
    inputs: list[tuple[int, Pictures, Pictures | None, bool]] = []

    def check(model: Model) -> None:  # before weights are downloaded
        inputs.append(_read_inputs(training, aim, subject, model))

    dtype = default_dtype(mesh, training=True) if training.dtype is None else training.dtype
    model, *_ = open_model(training.model, dtype="float32", mesh=mesh, check=check, weights=False, **training.source())
    ((size, pictures, prior, masked),) = inputs
    inputs.clear()
    # All class images have one caption.
    sets = [pictures.captions] if prior is None else [pictures.captions, prior.captions[:1]]
    captions = [[[model.concepts.spelled(text) for text in texts] for texts in of_all] for of_all in sets]
    lengths = _text_lengths(model, _texts(captions))
    length = min(lengths)
    plan = replace(training.plan, rates={**training.plan.rates, **aim.rates})
    decisive = {"size": size, "dtype": np.dtype(dtype).name, "pictures": pictures.digest(), **_decisive(training, aim)}
    if prior is not None:
        decisive |= {"prior": prior.digest(), "prior_weight": subject.prior_weight}
    if masked:
        decisive |= {"unmasked_weight": training.unmasked_weight or 0.0}
    if (state := training.folder / aim.part / STATE).is_file():
        check_same(state, plan, len(pictures), decisive)  # before anything is encoded
    say(
        f"{len(pictures)} pictures at {size} x {size}"
        + (f", {pictures.masked} of them masked" if pictures.masked else "")
        + _cropped(pictures)
    )
    make_folder(training.folder)  # fails before an hour's work, not after
    if target.exists() and is_main_process(mesh):  # the result of the run that is made longer
        for path in (*(path for path in others if path.exists()), target):
            path.rename(numbered(path, read_facts(state)["total"]))
    unet, kept = model.networks.denoiser.component == "unet", None
    if not unet:  # the language model leaves the devices before the transformer comes
        kept = _features(model, training, mesh, dtype, captions, lengths)
    # What is frozen would take in float32 the memory that gradients need.
    exact, opened = {"vae", *aim.exact(model)} if unet else set[str](), {"quantize": training.quantize, "mesh": mesh}
    opened |= training.source()
    rest = {part.name for part in model.components} - exact if unet else {model.networks.denoiser.component, "vae"}
    model, programs, params = open_model(
        training.model, dtype="float32" if unet else dtype, weights=exact or rest, **opened
    )
    if exact and rest:
        *_, frozen = open_model(training.model, dtype=dtype, weights=rest, **opened)
        params |= {name: frozen[name] for name in rest}
    start = aim.begin(model, params, training, dtype)  # first, since it may add tokens that captions contain
    readers = model.tokenizers if kept is None else kept.readers
    data, shared = _data(pictures, captions[0], readers, training, model, params, mesh, length, masked=masked)
    if prior is not None:
        shared["prior"], _ = _data(prior, captions[1], readers, training, model, params, mesh, length, masked=masked)
    count, pictures, prior = len(pictures), None, None  # their pixels would stay in memory during the run
    shared["frozen"] = start.frozen
    loss = denoising_loss(
        model.text if kept is None else None,
        model.unet if unet else model.networks.denoiser,
        _schedule(model, size, training.times),
        gamma=training.gamma,
        focus=(0.0, 1.0) if training.times == "logit-normal" else None,
        empty=training.empty,
        dtype=dtype,
        remat=training.remat or training.quantize is not None,  # or all weights would be kept, dequantised
        assemble=start.assemble,
        control=start.control,
        prior=subject.prior_weight,
    )
    board = TensorBoard(training.tensorboard) if training.tensorboard is not None and is_main_process(mesh) else None
    texts = {"prompt": list(training.prompts)} if kept is None else kept.prompts
    pipe = Pipeline(model, programs)
    shown = _preview(training, aim, pipe, params, texts) if training.prompts else None

    def save(path: Path, trained: Params) -> None:
        with fail_together("saving") if is_spread(mesh) else nullcontext():
            if is_main_process(mesh) and not path.exists():  # a resumed run has the same weights at the same step
                aim.save(path, model, params, trained, training)

    session = Session(
        training.folder / aim.part,
        aim.name,
        mesh,
        deadline=deadline,
        about=decisive,
        save=lambda step, trained: save(numbered(target, step), trained),
        save_steps=training.save_steps,
        preview=shown,
        preview_steps=training.preview_steps,
        log=board,
        fsdp=training.fsdp,
    )
    with closing(board) if board else nullcontext():
        trained, finished = fit(start.trained, loss, data, count, plan, session, shared)
    if not finished:
        return None
    save(target, trained)
    return target


def _decisive(training: Training, aim: TrainingTask) -> dict[str, Any]:
    """Return settings that must not change when a run is resumed."""
    same = {name: getattr(training, name) for name in ("flip", "gamma", "empty", "quantize")}
    same |= {"times": training.times} if training.times != "uniform" else {}  # files of earlier versions have none
    same |= {name: value for name, value in training.loading.items() if name in PARTS}
    return {**same, "model": str(training.model), **aim.facts}


def _schedule(model: Model, size: int, times: str) -> NoiseSchedule:
    """Return the schedule of the training times of square images."""
    schedule = model.scheduler.schedule
    if times != "shifted":
        return schedule
    tokens, mu = model.networks.tokens([(size, size)]), model.family.mu
    return schedule.with_mu(mu(tokens, model.defaults.num_inference_steps) if mu else schedule.mu_of(tokens))


def numbered(target: Path, step: int) -> Path:
    """Return the path for the weights of an earlier step: ``a-000500.safetensors`` for ``a.safetensors``."""
    return target.with_name(f"{target.stem}-{step:06d}{target.suffix}")


def check_folder(training: Training, aim: TrainingTask) -> None:
    """Raise InputError if the folder is a file, or contains a finished run that ``training`` does not make longer."""
    folder, target = training.folder, aim.files(training.folder)[0]
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{str(folder)!r} is a file; choose a folder for the run.")
    state = folder / aim.part / STATE
    if target.exists():
        if not (state.is_file() and is_longer(state, training.plan)):
            problem = f"{str(target)!r} exists already: this run is finished"
            cure = "choose another folder, or more {steps} at a constant learning rate"
            raise InputError("", problem, cure=cure)
        if (path := numbered(target, read_facts(state)["total"])).exists():
            raise InputError(f"{str(path)!r} exists already, where {target.name} would be kept; move it away.")
    elif not state.is_file() and (others := list(folder.glob(f"{escape(target.stem)}-{'[0-9]' * 6}{target.suffix}"))):
        raise InputError(f"{str(min(others))!r} is of another run; choose another folder.")


def _check_model(training: Training, aim: TrainingTask, model: Model) -> None:
    """Refuse models that cannot be trained, in general or in this way, and invalid preview prompts."""
    schedule = model.scheduler.schedule
    check_trainable(schedule)
    if training.quantize is not None and not aim.for_transformers:
        problem, cure = (
            f"is for the frozen weights of a LoRA, and {aim.name} has others",
            "leave it out, or train a LoRA",
        )
        raise InputError("quantize", problem, cure=cure, value=training.quantize)
    if training.times == "shifted" and not schedule.size_shift:
        problem = f"is for flow models whose times depend on the image size, and {model.name} is none"
        raise InputError("times", problem, cure="leave it out", value="shifted")
    if training.gamma is not None and schedule.is_flow:
        raise InputError("gamma", f"is not for {model.name}, a flow model", cure="leave it out", value=training.gamma)
    if not aim.for_transformers and model.networks.denoiser.component != "unet":
        problem = f"is a {model.family.name} model, of which a LoRA can be trained and nothing else"
        raise InputError("model", problem, cure="train a LoRA", value=training.model)
    unet = model.networks.unet
    if model.networks.inpaints or (unet and unet.in_channels != model.vae.latent_channels):
        problem = "reads more than the noisy image (an inpainting model), which cannot be trained yet"
        raise InputError("model", problem, cure="take a model without a mask", value=training.model)
    if unet and model.networks.embeds_guidance:
        raise InputError("model", "was distilled to take its guidance scale as an input, which cannot be trained yet")
    aim.check(model, training)
    for text in training.prompts:
        try:
            make_request(model, Call(text))
        except InputError as error:
            raise InputError("prompts", f"cannot be a preview: {error}", value=text) from None


def _preview(
    training: Training,
    aim: TrainingTask,
    pipe: Pipeline,
    params: Params,
    texts: Mapping[str, Any],
) -> Callable[[int, Params], Mapping[str, HostArray]]:
    def preview(step: int, trained: Params) -> Mapping[str, HostArray]:
        options = Options(progress=False)
        seeds = list(range(len(training.prompts)))
        pipe.params = aim.shown(pipe.model, params, trained)  # its own need no weights of what a call does not run
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HintWarning)  # of words that are being taught
            images = pipe(**texts, seed=seeds, options=options).images
        pipe.params = {}
        if not is_main_process(pipe.mesh):  # the images are split over the processes
            return {}
        (training.folder / "previews").mkdir(exist_ok=True)
        grid = make_grid(images)
        grid.save(training.folder / "previews" / f"{step:07d}.png")
        return {"previews": np.asarray(grid.convert("RGB"))}

    return preview


def check_pictures(training: Training, subject: Subject) -> None:
    """Read the table and the first image, before a model is downloaded or anything is generated.

    Raises:
        InputError: the table or the image cannot be read.
    """
    if training.prompts:
        check_apart(training.pictures, training.folder)
    column, control = training.caption_column, subject.control_column
    options = {"captions": subject.captions, "control_column": control, "limit": 1}
    masked = training.unmasked_weight != 1 and control != MASK
    read_pictures(training.pictures, 8, caption_column=column, masked=masked, **options)


def _read_inputs(
    training: Training, aim: TrainingTask, subject: Subject, model: Model
) -> tuple[int, Pictures, Pictures | None, bool]:
    """Check the model; return the side of the images, the images, the class images, and whether there are masks."""
    _check_model(training, aim, model)
    size = size_of(training, model)
    pictures = _read(training.pictures, size, training, subject.captions, subject.control_column)
    prior = None if subject.prior is None else _read(subject.prior, size, training, (subject.prior_caption,), None)
    return size, pictures, prior, _check_masks(training, [pictures] if prior is None else [pictures, prior])


def size_of(training: Training, model: Model) -> int:
    """Return the side of the images; raise InputError if the model does not support it."""
    size = training.size or model.native_size[0]
    step = 2 * model.vae.factor if model.networks.denoiser.component == "unet" else model.networks.size_step
    if size % step:
        raise InputError("size", f"must be divisible by {step}", value=size)
    return size


def _read(
    source: str | Path, size: int, training: Training, captions: Sequence[str], control_column: str | None
) -> Pictures:
    pictures = read_pictures(
        source,
        size,
        caption_column=training.caption_column,
        captions=captions,
        control_column=control_column,
        masked=training.unmasked_weight != 1 and control_column != MASK,
    ).split("train")
    if not len(pictures):
        raise InputError("pictures", "has no picture of the split 'train'", value=source)
    return pictures


def _cropped(pictures: Pictures) -> str:
    """Return a clause on the images that lose a hundredth or more when they are cropped to a square."""
    sides = pictures.frames[:, :2]
    lost = 1 - sides.min(1) / sides.max(1)
    count = int((lost >= 0.01).sum())
    return f", {count} of them cropped by up to {lost.max():.0%}" if count else ""


def _check_masks(training: Training, sets: Sequence[Pictures]) -> bool:
    """Return whether there are masks.

    Raises:
        InputError: a mask excludes a whole image, or ``unmasked_weight`` is set without masks.
    """
    weight = training.unmasked_weight
    for pictures in sets:
        if pictures.masks is None or weight:
            continue
        black = np.flatnonzero(pictures.masks.max((1, 2)) == 0)
        if len(black):
            raise InputError(
                f"the mask of {pictures.rows[black[0]]['file_name']} is black all over what is kept of it, so that "
                "nothing is learned of it; paint white what counts, leave it out, or give an unmasked weight of 0.1"
            )
    masked = any(pictures.masks is not None for pictures in sets)
    if weight is not None and weight != 1 and not masked:
        raise InputError(
            "unmasked_weight",
            "has no effect: no picture has a mask",
            cure=f"name their files in the column {MASK!r} of the table, or call the mask of a.png a{MASK_ENDING}",
            value=weight,
        )
    return masked


def _mask(pictures: Pictures, factor: int, least: float) -> HostArray:
    """Return weights of the latents' positions [N, h, w] float32: means of the mask's pixels, at least ``least``.

    Without masks all weights are 1.
    """
    count, *shape = pictures.pixels.shape[:3]
    masks = np.full((count, *shape), 255, np.uint8) if pictures.masks is None else pictures.masks
    cells = masks.reshape(count, shape[0] // factor, factor, shape[1] // factor, factor)
    return np.maximum(cells.mean((2, 4), dtype=np.float32) / 255, np.float32(least))


def _texts(sets: Iterable[Captions], *further: str) -> list[str]:
    """Return all captions of sets of images, and ``further``."""
    return [*(text for captions in sets for texts in captions for text in texts), *further]


def _text_lengths(model: Model, texts: Sequence[str]) -> tuple[int, ...]:
    """Return how many tokens texts are padded to, for each text encoder: the shortest length for a UNet.

    Raises:
        InputError: a caption has more tokens than an encoder reads.
    """
    text, tokenizers = model.text, model.tokenizers
    if model.networks.unet is not None:
        return text.shortest
    needed = set()
    for caption in dict.fromkeys(texts):
        try:
            words = [encoder.words(tokenizers[encoder.component], [(caption, 1.0)], {}) for encoder in text.encoders]
        except InputError as error:
            raise InputError("caption", error.problem, cure=error.cure, value=caption[:60]) from None
        needed.add(tuple(prompt.length for prompt in text.even(words)))
    return text.fit(needed)


@dataclass(frozen=True)
class _Features:
    """Texts of a run, encoded for a transformer, on the host.

    Attributes:
        readers: a reader of captions for each feature, see ``denoising_data``.
        prompts: the prompts of the previews, as arguments of a pipeline.
    """

    readers: Mapping[str, Reader]
    prompts: Mapping[str, Any]


def _features(
    model: Model, training: Training, mesh: Mesh, dtype: DType, sets: Sequence[Captions], lengths: Sequence[int]
) -> _Features:
    """Encode each text of a run once, with a language model that is on the devices only during this call.

    Raises:
        InputError: the features do not fit into the memory of the host.
    """
    distinct = list(dict.fromkeys(_texts(sets, "")))
    rows = sum(len(captions) * max(map(len, captions)) for captions in sets) + len(distinct)
    needed = rows * model.text.rows(lengths) * model.text.width * np.dtype(dtype).itemsize
    available = available_bytes()
    if available is not None and needed > available:
        problem = f"has captions whose features need {gigabytes(needed)} of the host's memory"
        cure = f"take fewer images or shorter captions: {gigabytes(available)} are free"
        raise InputError("pictures", problem, cure=cure, value=training.pictures)
    model, _, params = open_model(training.model, dtype=dtype, mesh=mesh, weights=model.text.names, **training.source())

    def encoded(texts: Sequence[str], lengths: Sequence[int]) -> dict[str, HostArray]:
        inputs = {
            encoder.component: encoder.read(model.tokenizers[encoder.component], texts, length)
            for encoder, length in zip(model.text.encoders, lengths, strict=True)
        }
        return encode_captions({name: params[name] for name in inputs}, inputs, model.text, mesh)

    def reader(feature: HostArray) -> Reader:
        row = {text: index for index, text in enumerate(distinct)}
        return lambda texts, *, length: feature[[row[text] for text in texts]]

    readers = {name: reader(feature) for name, feature in encoded(distinct, lengths).items()}
    prompts: dict[str, Any] = {}
    if training.prompts:
        lengths = _text_lengths(model, [*training.prompts, ""])
        prompts["prompt"] = encoded(training.prompts, lengths)
        if model.family.guides(model.networks, model.defaults.guidance_scale):
            prompts["negative_prompt"] = encoded([""] * len(training.prompts), lengths)
    return _Features(readers, prompts)


def _data(
    pictures: Pictures,
    captions: Captions,
    readers: Mapping[str, Reader],
    training: Training,
    model: Model,
    params: Params,
    mesh: Mesh,
    length: int,
    *,
    masked: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Encode all images, and return the samples and shared data of ``denoising_data``."""
    forms = [slice(None), slice(None, None, -1)][: 1 + training.flip]
    latents = [encode_pictures(params["vae"], pictures.pixels[:, :, form], model.vae, mesh, batch=4) for form in forms]
    control = None
    if pictures.control is not None:
        control = np.stack([pictures.control[:, :, form] for form in forms], axis=1)
    mask = None
    if masked:
        weights = _mask(pictures, model.vae.factor, training.unmasked_weight or 0.0)
        mask = np.stack([weights[:, :, form] for form in forms], axis=1)
    time_ids = None
    if model.networks.size_numbers:
        size = pictures.pixels.shape[1:3]
        time_ids = np.stack([_size_conditions(model, size, frame) for frame in pictures.frames])
    return denoising_data(
        readers,
        np.stack(latents, axis=1),
        captions,
        length,
        time_ids=time_ids,
        control=control,
        mask=mask,
    )


def _size_conditions(model: Model, size: tuple[int, ...], frame: np.ndarray) -> np.ndarray:
    """Return SDXL's size conditions of an image: original size, corner of the crop, target size."""
    height, width, top, left = map(int, frame)
    options = {"original_size": (height, width), "crops_coords_top_left": (top, left), "target_size": size}
    return model.size_conditions(size[0], size[1], options)[0]["time_ids"]
