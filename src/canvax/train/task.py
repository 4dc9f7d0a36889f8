"""The procedure shared by every kind of training from a checkpoint.

A kind of training is a ``TrainingTask``, which defines the trained parameters and how the result is saved. The rest is
here: opening the model, reading and encoding images, the loop, previews, and resuming a stopped run.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from glob import escape
from pathlib import Path
from shutil import disk_usage
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from canvax.call import LOCATION, PARTS, Load
from canvax.errors import HintWarning, InputError, check_function, check_utf8, conflict, needs
from canvax.families.base import Model
from canvax.files import check_writable, first_there, named_path
from canvax.images.grid import make_grid
from canvax.models.controlnet import ControlNet
from canvax.parallel.memory import gigabytes
from canvax.parallel.mesh import replicated
from canvax.parallel.multihost import fail_together, is_main_process, is_spread
from canvax.parallel.place import off_devices
from canvax.params import Params
from canvax.pipelines.checks import default_dtype
from canvax.pipelines.loaded import open_model
from canvax.pipelines.options import Options
from canvax.pipelines.pipeline import Pipeline
from canvax.pipelines.references import reference_sizes
from canvax.pipelines.request import Call, make_request
from canvax.pipelines.result import make_folder
from canvax.quantize import check_kind
from canvax.samplers.schedule import NoiseSchedule
from canvax.settings import check_all, declared
from canvax.train import settings
from canvax.train.buckets import bucket_sizes, describe_buckets, nearest_bucket
from canvax.train.dataset import Dataset
from canvax.train.diffusion import Assemble, Reader, denoising_loss, replaced, validation_errors
from canvax.train.encoding import encode_captions
from canvax.train.inputs import (
    Caption,
    Encoder,
    Item,
    SeenCaption,
    alike,
    by_size,
    check_masks,
    cropped,
    digest,
    evened,
    held_out,
    items_of,
    keep,
    sees_references,
    varied,
    varying,
)
from canvax.train.kept import Store, fingerprint, in_batches, name_of
from canvax.train.kohya import facts_of_images
from canvax.train.log import VALIDATION, Log, TensorBoard, check_board
from canvax.train.loop import STATE, Plan, Session, check_same, fit, is_longer, require_optax
from canvax.train.objectives import cast, check_trainable
from canvax.train.pictures import MASK, REFERENCE, SPLITS, PictureFolder, Size, check_apart, open_pictures
from canvax.train.settings import TAGS, PlanRecord, TrainingRecord
from canvax.train.state import read_facts
from canvax.train.validation import Validation
from canvax.types import DType, HostArray
from canvax.weights.cast import parse_dtype
from canvax.weights.lora import RECORD
from canvax.weights.overrides import Overrides

Captions = Sequence[Sequence[Caption]]
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
        remat: recompute activations in the backward pass, which takes less memory but more time; by default if a step
            does not fit into the devices' memory, as its compiler reports it. A CPU and several processes do not.
        dtype: dtype of the computation, not float16; by default bfloat16 on GPU and TPU, float32 on the CPU.
        quantize: "int8" or "float8" to keep the large weights of the frozen denoiser in 8 bits, for a LoRA (QLoRA,
            Dettmers et al. 2023); blocks are then recomputed as with ``remat``.
        prompts: prompts of the images that are generated during training, in the folder ``previews``.
        preview_steps: steps between previews; by default they come every 15 minutes, and always after the last step.
        save_steps: number of steps after which the weights are saved again during training, in the folder of the
            result (``numbered``); None to save only the result.
        tensorboard: folder of curves and previews for TensorBoard; needs tensorboardX.
        loading: further arguments of ``canvax.load``: where files come from, ``prediction_type`` and ``scheduler``.
        times: distribution of the training times: "uniform", of the scheduler's; "logit-normal" (Esser et al. 2024,
            section 3.1); or "shifted" as at inference, for flow models whose times depend on the image size. By default
            that of the model's family: "shifted" for those models, "uniform" for others.
        fsdp: split the trained parameters and the optimizer's moments over the devices.
        buckets: train an image at the size of about ``size`` x ``size`` pixels that is nearest to its shape; all images
            of an update have the same size.
        bucket_step: divisor of the sides of buckets.
        bucket_min: shortest side of a bucket, by default half of ``size``.
        bucket_max: longest side of a bucket, by default twice ``size``.
        shuffle_captions: shuffle the comma-separated tags of captions in each step; not for models whose captions are
            encoded before.
        keep_tokens: tags at the beginning of a caption that stay where they are.
        tag_dropout: share of the other tags that are left out, drawn in each step.
        noise_offset: strength of noise that is the same all over a channel (Guttenberg 2023); not for flow models.
        validation: held-out images, whose loss at fixed times and noise is logged as "validation_loss" when previews
            are due: a folder or zip file, the share of the images that is left out of training, or the split "test"
            or "validation" of ``pictures``.
        regularisation: folder of captioned class images, which keep the model from forgetting (prior preservation).
            They come as often as the other images, as in kohya's trainers.
        regularisation_weight: weight of the loss on class images.
        references: folder or zip file of reference images with the names of the images, for a LoRA of a model that
            edits by instruction; by default those in the column ``reference`` of the table, if there is one.
        encoded: folder of encoded images and texts, which are read again by the next run; by default ``encoded`` in
            ``folder``.
        facts: metadata of the result about the images, which ``train`` adds.
    """

    plan: Plan = PLAN
    facts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_all(self)
        if self.dtype is not None and parse_dtype(self.dtype) == np.float16:
            raise InputError("dtype", "rounds small gradients to 0", cure="take bfloat16 or float32", value="float16")
        check_kind(self.quantize, trained=True)
        for name in self.loading.keys() - {*LOCATION, "prediction_type", "scheduler"}:
            raise InputError("loading", "is not an argument of loading for training", cure="leave it out", value=name)
        self.source()
        object.__setattr__(self, "folder", named_path("folder", self.folder))
        if self.tensorboard is not None:
            object.__setattr__(self, "tensorboard", named_path("tensorboard", self.tensorboard))
            check_board(self.tensorboard)
        if self.preview_steps is not None and not self.prompts and self.validation is None:
            raise needs("preview_steps", "prompts='a cat'", "validation=0.1", value=self.preview_steps)
        if self.keep_tokens and not (self.shuffle_captions or self.tag_dropout):
            raise needs("keep_tokens", "shuffle_captions=True", "tag_dropout=0.1", value=self.keep_tokens)
        if self.validation is not None:
            object.__setattr__(self, "validation", _validation(self.validation))
        if self.encoded is not None:
            check_writable("encoded", named_path("encoded", self.encoded))

    def source(self) -> dict[str, Any]:
        """Return the keywords of ``open_model`` that say where the model is and what its files do not say."""
        load = Load(model=self.model, **self.loading)
        return {**load.keywords(LOCATION), "overrides": Overrides.of(**load.keywords(PARTS))}


def _validation(value: Any) -> Any:
    """Return the share as a number, or the name of a folder or split.

    Raises:
        InputError: it is a number that is not a share.
    """
    try:
        share = float(value)
    except (TypeError, ValueError):
        return value if value in SPLITS else str(named_path("validation", value))
    if not 0 < share < 1:
        raise InputError("validation", "is not a share", cure="0.1 holds out a tenth of the images", value=value)
    return share


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
        trained: the trained parameters by component, host arrays. If no text encoder is among them, captions are
            encoded before the first step.
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
    log: Log | None = None,
) -> Path | None:
    """Train from a checkpoint, or resume the run in ``training.folder``, or make it longer if it is finished.

    Args:
        training: the model, the images and the settings.
        aim: the kind of training.
        mesh: the devices; the batch is split over ``data``.
        subject: captions of images without captions, and class images.
        deadline: ``time.monotonic()`` at which to write the state and stop.
        say: called with messages about the progress.
        log: called with the step, values and images, as ``Session.log``; images are the previews.

    Returns:
        The path of the result, or None if the deadline came first.

    Raises:
        InputError: an argument is invalid, the model or an image cannot be used, or the folder contains another run.
        CheckpointError: the model cannot be read.
    """
    if log is not None:
        check_function("log", log, 3, "(step, values, images)")
    require_optax()
    target, *others = aim.files(training.folder)
    check_folder(training, aim)
    check_pictures(training, subject)
    inputs: list[Inputs] = []

    def check(model: Model) -> None:  # before weights are downloaded
        inputs.append(_read_inputs(training, aim, subject, model))

    dtype = default_dtype(mesh, training=True) if training.dtype is None else training.dtype
    model, *_ = open_model(training.model, dtype="float32", mesh=mesh, check=check, weights=False, **training.source())
    (given,) = inputs
    # All class images have one caption.
    sets = [_spelled(model, items) for items in (given.items, given.prior[:1], given.held_out) if items]
    lengths = _text_lengths(model, _texts(sets))
    length = min(lengths)
    plan = replace(training.plan, rates={**training.plan.rates, **aim.rates})
    decisive = {"size": given.size, "dtype": np.dtype(dtype).name, "pictures": digest(given.items)}
    schedule = model.scheduler.schedule
    times = training.times or ("shifted" if schedule.size_shift else "uniform")
    decisive |= {**_decisive(training, aim), "times": times}
    if given.prior:
        decisive |= {"prior": digest(given.prior), "prior_weight": subject.prior_weight}
    decisive |= {"validation": digest(given.held_out) if given.held_out else None}
    if given.masked:
        decisive |= {"unmasked_weight": training.unmasked_weight or 0.0}
    count = sum(item.repeats for item in given.items)
    if (state := training.folder / aim.part / STATE).is_file():
        check_same(state, plan, count, decisive)  # before anything is encoded
    say(given.described())
    make_folder(training.folder)  # fails before an hour's work, not after
    if target.exists() and is_main_process(mesh):  # the result of the run that is made longer
        for path in (*(path for path in others if path.exists()), target):
            path.rename(numbered(path, read_facts(state)["total"]))
    store = Store(named_path("encoded", training.encoded or training.folder / "encoded"))
    unet, kept = model.networks.denoiser.component == "unet", None
    if not unet:  # the language model leaves the devices before the transformer comes
        kept = _features(model, training, mesh, dtype, sets, lengths, store, say)
    # What is frozen would take in float32 the memory that gradients need.
    exact, opened = {"vae", *aim.exact(model)} if unet else set[str](), {"quantize": training.quantize, "mesh": mesh}
    opened |= training.source()
    rest = {part.name for part in model.components} - exact if unet else {model.networks.denoiser.component, "vae"}
    model, programs, params = open_model(
        training.model, dtype="float32" if unet else dtype, weights=exact or rest, **opened
    )
    if exact and rest:
        *_, read = open_model(training.model, dtype=dtype, weights=rest, **opened)
        params |= {name: read.pop(name) for name in rest}
    start = aim.begin(model, params, training, dtype)  # first, since it may add tokens that captions contain
    encoders = model.text.names if unet else ()
    if unet and not (start.trained.keys() & encoders or training.shuffle_captions or training.tag_dropout):
        kept = _features(model, training, mesh, dtype, sets, lengths, store, say, params)
        start = replace(start, frozen={name: start.frozen[name] for name in start.frozen.keys() - encoders})
    readers = model.tokenizers if kept is None else kept.readers
    data, shared, validated = _data(given, sets, readers, length, training, model, params, mesh, plan, store, say)
    shared["frozen"] = start.frozen
    for name in {"vae", *encoders} & params.keys() - start.frozen.keys():  # for previews, and for the result
        params[name] = off_devices(params[name])
    network: Any = model.unet if unet else model.networks.denoiser
    of_model = (model.text if kept is None else None, network, _schedule(model, given.size, times))
    computed: dict[str, Any] = {"dtype": dtype, "assemble": start.assemble, "control": start.control}
    recompute = bool(training.remat) or training.quantize is not None  # or all weights would be kept, dequantised
    loss_of = partial(
        denoising_loss,
        *of_model,
        **computed,
        gamma=training.gamma,
        focus=(0.0, 1.0) if times == "logit-normal" else None,
        empty=training.empty,
        prior=subject.prior_weight,
        noise_offset=training.noise_offset,
    )
    losses = {remat: loss_of(remat=remat) for remat in (False, True)}

    def loss(*arguments: Any) -> Any:
        return losses[recompute](*arguments)

    def lighter() -> None:
        nonlocal recompute
        recompute = True

    chosen = recompute or training.remat is not None or not _has_ladder(mesh)
    board = TensorBoard(training.tensorboard) if training.tensorboard is not None and is_main_process(mesh) else None
    listeners = [each for each in (board, log) if each is not None]
    texts = {"prompt": list(training.prompts)} if kept is None else kept.prompts
    pipe = Pipeline(model, programs)
    if training.prompts and given.items[0].references:  # one set of references for all previews
        texts = {**texts, "image": given.previewed.folder.reference(given.previewed.index)}
    if training.prompts:
        steps, minutes = training.preview_steps, Session.preview_every / 60
        often = f"{steps} steps" if steps else f"{minutes:.0f} minutes"
        say(f"previews come every {often} and at the end, in {training.folder / 'previews'}")
    shown = _preview(training, aim, pipe, params, texts) if training.prompts else None
    if validated:
        errors = validation_errors(*of_model, **computed)
        shown = _validated(Validation(errors, validated, {"frozen": start.frozen}, mesh, plan.batch), shown)

    facts = facts_of_images(given.items, given.size, plan)

    def save(path: Path, trained: Params) -> None:
        with fail_together("saving") if is_spread(mesh) else nullcontext():
            if is_main_process(mesh) and not path.exists():  # a resumed run has the same weights at the same step
                steps = {"ss_steps": str(read_facts(state).get("done", plan.steps))}
                aim.save(path, model, params, trained, replace(training, facts={**facts, **steps}))

    def log_to_all(step: int, values: Mapping[str, float], images: Mapping[str, HostArray]) -> None:
        for listener in listeners:
            listener(step, values, images)

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
        log=log_to_all if listeners else None,
        fsdp=training.fsdp,
        lighter=None if chosen else lighter,
    )
    with closing(board) if board else nullcontext():
        trained, finished = fit(start.trained, loss, data, count, plan, session, shared)
    if not finished:
        return None
    save(target, trained)
    return target


def _has_ladder(mesh: Mesh) -> bool:
    """Return True if activations are recomputed where a step does not fit: on one process's accelerators."""
    return mesh.devices.flat[0].platform != "cpu" and not is_spread(mesh)


def _decisive(training: Training, aim: TrainingTask) -> dict[str, Any]:
    """Return settings that must not change when a run is resumed."""
    names = ("flip", "gamma", "empty", "quantize", "noise_offset", "buckets", *TAGS)
    same = {name: getattr(training, name) for name in (*names, "bucket_step", "bucket_min", "bucket_max")}
    same |= {name: value for name, value in training.loading.items() if name in PARTS}
    return {**same, "model": str(training.model), **aim.facts}


def recorded(training: Training, overrides: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the settings of a run for the metadata of its result: the plan, what differs from the defaults, and more.

    ``overrides`` are those of the model (``Model.overrides``). Under ``scheduler`` is what they change of the base's
    schedule and prediction type; what they leave is that of whichever base the result is used with.
    """
    values = {name: getattr(training.plan, name) for name in declared(PlanRecord)}
    for name, setting in declared(TrainingRecord).items():
        value = getattr(training, name)
        if name not in ("dtype", "encoded", "tensorboard", "fsdp", "prompts", "preview_steps", "save_steps") and (
            value != setting.default
        ):
            values[name] = Path(str(value)).name if name in ("regularisation", "validation", "references") else value
    changed = {**overrides.get("scheduler", {})}
    changed |= {name: value for name, value in overrides.items() if name == "prediction_type"}
    if fields := {name: value for name, value in changed.items() if not name.startswith("_")}:
        values["scheduler"] = fields
    return {RECORD: json.dumps({**values, **(more or {})}, default=str, sort_keys=True)}


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
            cure = "choose another folder, or more steps at a constant learning rate"
            raise InputError(f"{str(target)!r} exists already: this run is finished; {cure}")
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
    if training.noise_offset and schedule.is_flow:
        problem = f"is not for {model.name}, a flow model"
        raise InputError("noise_offset", problem, cure="leave it out", value=training.noise_offset)
    changed = next((name for name in TAGS if getattr(training, name)), None)
    if changed and model.networks.denoiser.component != "unet":
        problem, cure = f"is not for {model.name}, whose captions are encoded before", "give images several captions"
        raise InputError(changed, problem, cure=cure, value=getattr(training, changed))
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


def _validated(
    validation: Validation, preview: Callable[[int, Params], Mapping[str, Any]] | None
) -> Callable[[int, Params], Mapping[str, Any]]:
    def shown(step: int, trained: Params) -> Mapping[str, Any]:
        return {VALIDATION: validation(trained), **(preview(step, trained) if preview else {})}

    return shown


def check_pictures(training: Training, subject: Subject) -> None:
    """Read the table and the first image, before a model is downloaded or anything is generated.

    Raises:
        InputError: the table or the image cannot be read.
    """
    if training.prompts:
        check_apart(training.pictures, training.folder)
    column, control = training.caption_column, subject.control_column
    options = {"captions": subject.captions, "control_column": control, "limit": 1, "references": training.references}
    masked = training.unmasked_weight != 1 and control != MASK
    open_pictures(training.pictures, caption_column=column, masked=masked, **options).read(8)
    if training.regularisation is not None:
        _read(training.regularisation, training, (), None, "regularisation")


@dataclass(frozen=True)
class Inputs:
    """The images of a training.

    Attributes:
        size: side of a square image.
        items: the images, with those of ``regularisation`` at the end.
        prior: the class images of ``Subject``.
        masked: whether there are masks.
        left_out: number of images of ``regularisation`` that are not used.
        held_out: the images of ``validation``.
    """

    size: int
    items: Sequence[Item]
    prior: Sequence[Item]
    masked: bool
    left_out: int = 0
    held_out: Sequence[Item] = ()

    @property
    def previewed(self) -> Item:
        """The image whose references previews have: a held-out one, if there is one."""
        return [*self.held_out, *self.items][0]

    def described(self) -> str:
        """Return the line about the images before a run."""
        (first, *others), groups = list({item.folder: None for item in self.items}), by_size(self.items)
        text = f"{sum(item.folder is first for item in self.items)} pictures at {self.size} x {self.size}"
        text += (f", {first.masks} of them masked" if first.masks else "") + cropped(self.items)
        text += "".join(f", {name} {repeats} times" for name, repeats in first.repeated.items())
        if counts := sorted({len(item.references) for item in self.items if item.references}):
            several = " to ".join(map(str, counts[:1] + counts[1:][-1:]))
            text += f", with {several} reference image{'s' * (counts != [1])} each"
        for _ in others:
            more = [item for item in self.items if item.folder is not first]
            counts = sorted({item.repeats for item in more})
            text += f"; {len(more)} of the class, {' to '.join(map(str, counts[:1] + counts[1:][-1:]))} times each"
            text += f", without {self.left_out} more, which would be too many" if self.left_out else ""
        text += f"; {len(self.held_out)} held out, for the validation loss" if self.held_out else ""
        if groups.keys() != {(self.size, self.size)}:
            text += f"; {describe_buckets(list(groups), [len(items) for items in groups.values()])}"
            text += "; each has a program, which is compiled when its first batch comes"
        return text


def _read_inputs(training: Training, aim: TrainingTask, subject: Subject, model: Model) -> Inputs:
    """Check the model; read headers and masks of the images."""
    _check_model(training, aim, model)
    if subject.prior is not None and training.buckets:
        raise conflict("prior", "buckets", why="images of the class are square")
    size = size_of(training, model)
    square, fitted = (size, size), _buckets(training, size, model)
    read = partial(
        _read, training=training, captions=subject.captions, control=subject.control_column,
        paired=aim.for_transformers or training.references is not None,
    )  # fmt: skip
    sizes_read = partial(_reference_sizes, model=model)
    items, left_out, validation = items_of(read(training.pictures), fitted, read=sizes_read), 0, list[Item]()
    if isinstance(training.validation, float):
        items, validation = held_out(items, training.validation)
        if not items:
            problem, cure = "leaves no image to train on", "take a smaller share, or more images"
            raise InputError("validation", problem, cure=cure, value=training.validation)
    elif training.validation is not None:
        inside = training.validation in SPLITS
        source = read(
            training.pictures if inside else training.validation,
            name="validation",
            split=(training.validation if inside else "train"),
        )
        validation = items_of(source, fitted, read=sizes_read)
    if items[0].references:
        _check_pairs(training, subject, model, validation)
    if training.regularisation is not None:
        if subject.control_column is not None or subject.prior is not None:
            name = "control_column" if subject.prior is None else "prior"
            raise conflict("regularisation", name)
        count, weight = sum(item.repeats for item in items), training.regularisation_weight
        of_class = items_of(_read(training.regularisation, training, (), None, "regularisation"), fitted, weight=weight)
        items, left_out = [*items, *(used := evened(of_class, count))], len(of_class) - len(used)
    prior = []
    if subject.prior is not None:
        prior = items_of(_read(subject.prior, training, (subject.prior_caption,), None), lambda _: square)
    masked = check_masks([*items, *prior, *validation], training.unmasked_weight)
    return Inputs(size, items, prior, masked, left_out, validation)


def _reference_sizes(sizes: Sequence[Size], model: Model) -> Sequence[Size]:
    """Return the sizes in which the model reads references.

    Raises:
        InputError: it reads none, or one is too small.
    """
    if not model.networks.denoiser.facts.edits:
        problem = f"are for models that edit, and {model.name} is none"
        cure = f"take another model, or leave out the folder or the column {REFERENCE!r}"
        raise InputError("references", problem, cure=cure)
    return reference_sizes(list(sizes), model.native_size, model.networks)


def _check_pairs(training: Training, subject: Subject, model: Model, validation: Sequence[Item]) -> None:
    """Refuse what is not there for images with references."""
    if training.regularisation is not None or subject.prior is not None:
        name = "prior" if training.regularisation is None else "regularisation"
        raise conflict("references", name, why="images of the class have none")
    if validation and not validation[0].references:
        problem, cure = "has images without references", "give them some, or take a share of the others"
        raise InputError("validation", problem, cure=cure, value=training.validation)
    if sees_references(model.text):
        why = f"the text encoder of {model.name} sees the references with each prompt"
        for name in ("flip", "prompts"):
            if getattr(training, name):
                raise conflict("references", name, why=why)


def _buckets(training: Training, size: int, model: Model) -> Callable[[Size], Size]:
    """Return the function that chooses the size of an image by its sides."""
    if not training.buckets:
        return lambda _: (size, size)
    if training.bucket_step % (step := _size_step(model)):
        raise InputError("bucket_step", f"must be divisible by {step}", value=training.bucket_step)
    sizes = bucket_sizes(size, training.bucket_step, training.bucket_min, training.bucket_max)
    return partial(nearest_bucket, sizes=sizes)


def size_of(training: Training, model: Model) -> int:
    """Return the side of the images; raise InputError if the model does not support it."""
    size = training.size or model.native_size[0]
    if size % (step := _size_step(model)):
        raise InputError("size", f"must be divisible by {step}", value=size)
    return size


def _size_step(model: Model) -> int:
    """Return the divisor of the sides of images."""
    return 2 * model.vae.factor if model.networks.denoiser.component == "unet" else model.networks.size_step


def _read(
    source: str | Path,
    training: Training,
    captions: Sequence[str],
    control: str | None,
    name: str = "pictures",
    split: str = "train",
    *,
    paired: bool = False,
) -> PictureFolder:
    column, masked = training.caption_column, training.unmasked_weight != 1 and control != MASK
    options: dict[str, Any] = {"captions": captions, "control_column": control, "masked": masked}
    if paired:
        options |= {"reference_column": REFERENCE, "references": training.references}
    try:
        pictures = open_pictures(source, caption_column=column, **options)
    except InputError as error:
        raise (error.about(name) if error.argument == "pictures" else error) from None
    if not len(pictures := pictures.split(split)):
        raise InputError(name, f"has no picture of the split {split!r}", value=source)
    return pictures


def _spelled(model: Model, items: Iterable[Item]) -> Captions:
    """Return the captions of images with the model's concepts spelled out, as its text encoders read them."""
    sees = sees_references(model.text)

    def read(text: str, item: Item) -> Caption:
        return SeenCaption(text, replace(item, repeats=1)) if sees and item.references else text

    return [[read(model.concepts.spelled(text), item) for text in item.captions] for item in items]


def _texts(sets: Iterable[Captions], *further: str) -> list[Caption]:
    """Return all captions of sets of images, and ``further``."""
    return [*(text for captions in sets for texts in captions for text in texts), *further]


def _text_lengths(model: Model, texts: Sequence[Caption]) -> tuple[int, ...]:
    """Return how many tokens texts are padded to, for each text encoder: the shortest length for a UNet.

    Raises:
        InputError: a caption has more tokens than an encoder reads.
    """
    text, tokenizers = model.text, model.tokenizers
    if model.networks.unet is not None:
        return text.shortest
    needed = set()
    for caption in dict.fromkeys(texts):
        words_of, seen = (caption, ()) if isinstance(caption, str) else (caption.text, caption.item.references)
        try:
            words = [
                encoder.words(tokenizers[encoder.component], [(words_of, 1.0)], {}, seen) for encoder in text.encoders
            ]
        except InputError as error:
            raise InputError("caption", error.problem, cure=error.cure, value=words_of[:60]) from None
        needed.add(tuple(prompt.length for prompt in text.even(words)))
    return text.fit(needed)


@dataclass(frozen=True)
class _Features:
    """Texts of a run, encoded, on the host.

    Attributes:
        readers: a reader of captions for each feature, see ``denoising_data``.
        prompts: the prompts of the previews, as arguments of a pipeline.
    """

    readers: Mapping[str, Reader]
    prompts: Mapping[str, Any]


def _features(
    model: Model,
    training: Training,
    mesh: Mesh,
    dtype: DType,
    sets: Sequence[Captions],
    lengths: Sequence[int],
    store: Store,
    say: Callable[[str], None],
    params: Params | None = None,
) -> _Features:
    """Encode the texts that the store lacks, with the text encoders of ``params``.

    By default ``model`` has a language model, which is on the devices only during this call.

    Raises:
        InputError: the features do not fit on the disk.
    """
    distinct = list(dict.fromkeys(_texts(sets, "")))
    if seen := [caption for caption in distinct if isinstance(caption, SeenCaption)]:
        dropped = [caption._replace(text="") for caption in seen] if training.empty else []
        distinct = list(dict.fromkeys([*seen, *dropped]))
    wanted = [(text, tuple(lengths)) for text in distinct]
    shown = list(dict.fromkeys([*training.prompts, ""])) if training.prompts and params is None else []
    long = _text_lengths(model, shown) if shown else ()
    wanted += [(text, long) for text in shown]
    opened = {"dtype": dtype, "mesh": mesh, **training.source()}
    files = model
    if params is None:
        files, *_ = open_model(training.model, weights={"vae"}, **opened)  # the others are fetched, too
    kind = [] if params is None or training.quantize is None else [training.quantize]
    network = ["text", fingerprint(files, files.text.names), np.dtype(dtype).name, *kind]

    def inputs(text: Caption, lengths: Sequence[int], views: Sequence[Any] = ()) -> dict[str, dict[str, HostArray]]:
        each, words = zip(files.text.encoders, lengths, strict=True), text if isinstance(text, str) else text.text
        more = {"images": [views]} if views else {}
        return {
            encoder.component: encoder.read(files.tokenizers[encoder.component], [words], length, **more)
            for encoder, length in each
        }

    def views(text: Caption) -> Sequence[Any]:
        return () if isinstance(text, str) else text.item.read_references(files).of(0)

    read = [inputs(*text) for text in wanted]
    names = [
        name_of(
            network,
            *(array for _, arrays in sorted(part.items()) for _, array in sorted(arrays.items())),
            *([] if isinstance(text, str) else ["references", text.item.references]),
        )
        for part, (text, _) in zip(read, wanted, strict=True)
    ]
    missing = store.missing(names)
    seeing = {
        i: files.text.seeing([(view.height, view.width) for view in views(wanted[i][0])])
        for i in missing if not isinstance(wanted[i][0], str)
    }  # fmt: skip
    rows_of = [seeing.get(i, model.text).rows(wanted[i][1]) for i in missing]
    needed = sum(rows_of) * model.text.width * np.dtype(dtype).itemsize
    available = disk_usage(first_there(store.folder)).free
    if needed > available:
        problem = f"has captions whose features need {gigabytes(needed)} of disk"
        cure = f"take fewer images, or a folder for {{encoded}} on another disk: {gigabytes(available)} are free"
        raise InputError("pictures", problem, cure=cure, value=training.pictures)
    say(store.progress(missing, names, "texts"))
    if missing:
        if params is None:
            _, _, read_now = open_model(training.model, weights=files.text.names, **opened)
        else:
            read_now = cast({name: params[name] for name in files.text.names}, dtype)
        weights = jax.device_put({name: read_now[name] for name in files.text.names}, replicated(mesh))

        def form(i: int) -> Hashable:
            return (*(leaf.shape for leaf in jax.tree.leaves(read[i])), seeing.get(i))

        for part in in_batches(missing, form):
            whole = [inputs(*wanted[i], views(wanted[i][0])) if i in seeing else read[i] for i in part]
            stacked = jax.tree.map(lambda *arrays: np.concatenate(arrays), *whole)
            features = encode_captions(weights, stacked, seeing.get(part[0], files.text), mesh)
            rows = [{key: array[i] for key, array in features.items()} for i in range(len(part))]
            keep(store, [names[i] for i in part], rows, mesh)
    name = dict(zip(wanted, names, strict=True))

    def reader(key: str) -> Reader:
        return lambda texts, *, length: store.rows(np.array([name[text, wanted[0][1]] for text in texts], object), key)

    def previewed(texts: Sequence[str]) -> dict[str, HostArray]:
        of_all = [store.read(name[text, long]) for text in texts]
        return {key: np.stack([arrays[key] for arrays in of_all]) for key in of_all[0]}

    readers = {key: reader(key) for key in store.read(names[0])}
    prompts: dict[str, Any] = {"prompt": list(training.prompts)}
    if shown:
        prompts["prompt"] = previewed(training.prompts)
        if model.family.guides(model.networks, model.defaults.guidance_scale):
            prompts["negative_prompt"] = previewed([""] * len(training.prompts))
    return _Features(readers, prompts)


def _data(
    given: Inputs,
    sets: Sequence[Captions],
    readers: Mapping[str, Reader],
    length: int,
    training: Training,
    model: Model,
    params: Params,
    mesh: Mesh,
    plan: Plan,
    store: Store,
    say: Callable[[str], None],
) -> tuple[Any, dict[str, Any], list[Any]]:
    """Encode all images; return the samples or a ``Dataset`` of them, the shared data, and held-out samples by size."""
    least = (training.unmasked_weight or 0.0) if given.masked else None
    weighted = training.regularisation is not None
    encoder = Encoder.of(model, params, mesh, store, 1 + training.flip, least, weighted, training.empty > 0, say)
    encoder.encode([*given.items, *given.prior, *given.held_out])
    groups = alike(given.items)
    parts = [encoder.samples(items, readers, _spelled(model, items), length) for items in groups]
    data, shared = parts[0]
    repeats = [[item.repeats for item in items] for items in groups]
    changed = None
    if training.shuffle_captions or training.tag_dropout:
        captions: Any = [_spelled(model, items) for items in groups]
        vary = partial(
            varied, keep=training.keep_tokens, shuffle=training.shuffle_captions, dropout=training.tag_dropout
        )
        changed = varying(captions, readers, length, vary)
    if changed or len(groups) > 1 or max(max(of_each) for of_each in repeats) > 1:
        data = Dataset([samples for samples, _ in parts], plan.batches, mesh, plan.seed, repeats, changed)
    if given.prior:
        prior, _ = encoder.samples(given.prior, readers, sets[1], length)
        shared["prior"] = jax.tree.map(lambda leaf: leaf[:], prior)
    others = alike(given.held_out)
    held_out = [encoder.samples(items, readers, _spelled(model, items), length)[0] for items in others]
    return data, shared, held_out
