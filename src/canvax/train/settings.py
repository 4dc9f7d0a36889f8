"""The settings of training, each declared once: the records of plans, images and kinds of training; no JAX.

Flags of ``canvax train``, their help and defaults, and the checks of the Python classes are read off these records
(``canvax.settings``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from canvax.call import MAX_SIDE, MOST_IMAGES, MOST_VECTORS, Quantize, read_pairs
from canvax.errors import InputError
from canvax.settings import EntryPoint, setting

LOADING = ("revision", "variant", "cache_dir", "local_files_only", "prediction_type", "scheduler")
"""Arguments of ``canvax.load`` that are flags of training; ``--token`` and ``--text-encoder`` mean other things."""

Layers = Literal["attention", "transformer", "all"]
Names = Literal["peft", "kohya"]
Optimizer = Literal["adamw", "adafactor", "lion", "prodigy", "schedule-free"]
Times = Literal["uniform", "logit-normal", "shifted"]
Learn = Literal["object", "style", "word"]

_MOST_STEPS = 10**8
_NO_FLAG: Mapping[EntryPoint, str] = {"command": "for Python"}


@dataclass(frozen=True)
class PlanRecord:
    """The fields of ``canvax.train.loop.Plan``."""

    steps: int = setting(
        help="training steps", low=1, high=_MOST_STEPS, metavar="N", flags=("--steps", "--max-train-steps"),
    )  # fmt: skip
    batch: int = setting(
        help="images of a batch", low=1, high=MOST_IMAGES, metavar="N",
        flags=("-b", "--batch-size", "--train-batch-size"),
    )  # fmt: skip
    learning_rate: float = setting(
        1e-3, "the highest learning rate", low=0, high=1000, above=True, cure="1e-4 is usual", metavar="RATE",
        flags=("--learning-rate", "--lr"),
    )  # fmt: skip
    warmup: int = setting(
        None, "steps of linear warm-up", low=0, high=_MOST_STEPS,
        unset="a tenth of the steps, at most 500", metavar="N", flags=("--warmup", "--lr-warmup-steps"),
    )  # fmt: skip
    final: float = setting(
        0.01, "share of the learning rate that a cosine ends at; 1: constant", low=0, high=1, metavar="SHARE",
        flags=("--final-lr",),
    )  # fmt: skip
    b2: float = setting(0.99, "decay of Adam's second moment", low=0, high=1, below=True, closed=_NO_FLAG)
    weight_decay: float = setting(
        0.01, "weight decay of matrices and convolutions", low=0, high=1000, cure="0.01 is usual",
    )  # fmt: skip
    clip: float = setting(1.0, "bound on the norm of the gradient", low=0, above=True, closed=_NO_FLAG)
    average: float = setting(
        0.999, "decay of a moving average of the weights, such as 0.999", low=0, high=1, below=True,
        cure="0.999 is usual", metavar="DECAY", flags=("--ema",),
    )  # fmt: skip
    seed: int = setting(
        0, "seed of all random choices", low=0, high=2**32 - 1, metavar="SEED", flags=("-s", "--seed"),
    )  # fmt: skip
    chunk: int = setting(50, "steps per call of the program", low=1, closed=_NO_FLAG)
    accumulate: int = setting(
        1, "batches of a training step", low=1, high=10**6, metavar="N",
        flags=("--accumulate", "--gradient-accumulation-steps"),
    )  # fmt: skip
    rates: Mapping[str, float] = field(default_factory=dict)
    minutes: float | None = setting(None, "minutes that ``steps`` should take", low=0, above=True, closed=_NO_FLAG)
    optimizer: Optimizer = setting(
        "adamw",
        "adamw, adafactor, lion, schedule-free, or prodigy, whose learning rate is a factor: 1",
        metavar="NAME",
    )  # fmt: skip


@dataclass(frozen=True)
class TrainingRecord:
    """The fields of ``canvax.train.task.Training``."""

    model: Any
    pictures: Any
    folder: Any
    plan: Any = None
    size: int | None = setting(
        None, "side of the square images", low=1, high=MAX_SIDE, unset="that of the model's training",
        metavar="PIXELS", flags=("--size", "--resolution"),
    )  # fmt: skip
    caption_column: str = setting("text", "column of the captions", metavar="NAME")
    flip: bool = setting(False, "also train on mirrored images", flags=("--flip", "--random-flip"))
    gamma: float | None = setting(
        None, "gamma of min-SNR weighting; 5 is usual", low=0, high=10**6, above=True, cure="5 is usual",
        unset="none", metavar="GAMMA", flags=("--min-snr", "--snr-gamma"),
    )  # fmt: skip
    empty: float = setting(
        0.1, "share of captions that are left out", low=0, high=1, below=True, cure="0.1 is usual", metavar="SHARE",
        flags=("--empty-captions", "--proportion-empty-prompts", "--caption-dropout-rate"),
    )  # fmt: skip
    unmasked_weight: float | None = setting(
        None, "smallest weight outside of masks; 1 ignores masks", low=0, high=1, cure="0.1 is usual",
        unset="0", metavar="WEIGHT",
    )  # fmt: skip
    remat: bool | None = setting(
        None, "recompute activations: less memory, more time", unset="if a step needs more than a GPU or TPU has",
        flags=("--remat", "--gradient-checkpointing"),
    )  # fmt: skip
    dtype: Any = setting(
        None, "dtype of the computation", unset="bfloat16 on GPU and TPU, float32 on the CPU", metavar="DTYPE",
    )  # fmt: skip
    quantize: Quantize | None = setting(
        None, "int8 or float8: keep the frozen weights in 8 bits; implies --remat", metavar="KIND",
    )  # fmt: skip
    prompts: Sequence[str] = setting(
        (), "generate this prompt during training", repeats=True, metavar="PROMPT",
        flags=("--preview", "--validation-prompt"),
    )  # fmt: skip
    preview_steps: int | None = setting(
        None, "steps between previews and validation losses", low=1, high=_MOST_STEPS, unset="every 15 minutes",
        metavar="N",
        flags=("--preview-every", "--validation-steps", "--sample-every-n-steps"),
    )  # fmt: skip
    save_steps: int | None = setting(
        None, "save the weights of every Nth step", low=1, high=_MOST_STEPS, unset="the last ones only",
        metavar="N", flags=("--save-every", "--checkpointing-steps", "--save-every-n-steps", "--save-steps"),
    )  # fmt: skip
    tensorboard: Any = setting(
        None, "folder for TensorBoard", metavar="FOLDER",
        flags=("--tensorboard", "--logging-dir"),
    )  # fmt: skip
    loading: Mapping[str, Any] = field(default_factory=dict)
    times: Times | None = setting(
        None, "training times: uniform, logit-normal (more in the middle), or shifted by image size",
        unset="the model family's", metavar="NAME", flags=("--times", "--timestep-sampling"),
    )  # fmt: skip
    fsdp: bool = setting(False, "split trained weights and moments over devices")
    buckets: bool = setting(
        False, "train at sizes of the same area, instead of cropping to squares",
        flags=("--buckets", "--enable-bucket"),
    )  # fmt: skip
    bucket_step: int = setting(
        64, "divisor of the sides of buckets", low=8, high=MAX_SIDE, error_without="buckets=True", metavar="PIXELS",
        flags=("--bucket-step", "--bucket-reso-steps"),
    )  # fmt: skip
    bucket_min: int | None = setting(
        None, "shortest side of a bucket", low=8, high=MAX_SIDE, error_without="buckets=True", unset="half of --size",
        metavar="PIXELS", flags=("--bucket-min", "--min-bucket-reso"),
    )  # fmt: skip
    bucket_max: int | None = setting(
        None, "longest side of a bucket", low=8, high=MAX_SIDE, error_without="buckets=True", unset="twice --size",
        metavar="PIXELS", flags=("--bucket-max", "--max-bucket-reso"),
    )  # fmt: skip
    validation: Any = setting(
        None, "held-out images: a folder, a share such as 0.1, or a split, test or validation",
        metavar="IMAGES", flags=("--validation", "--validation-split"),
    )  # fmt: skip
    references: Any = setting(
        None, "folder of reference images of the same names, for a model that edits", metavar="FOLDER",
        unset="those of the table's column reference",
    )  # fmt: skip
    encoded: Any = setting(
        None, "folder of encoded images and texts, for several runs", metavar="FOLDER",
        unset="encoded in the folder of the run",
    )  # fmt: skip
    shuffle_captions: bool = setting(
        False, "shuffle comma-separated tags of captions",
        flags=("--shuffle-captions", "--shuffle-caption"),
    )  # fmt: skip
    keep_tokens: int = setting(
        0, "first tags that stay where they are", low=0, high=10**4, metavar="N",
    )  # fmt: skip
    tag_dropout: float = setting(
        0.0, "share of a caption's tags left out in each step", low=0, high=1, cure="0.1 is usual", metavar="SHARE",
        flags=("--tag-dropout", "--caption-tag-dropout-rate"),
    )  # fmt: skip
    noise_offset: float = setting(
        0.0, "share of noise that is constant in a channel; 0.05 is usual", low=0,
        high=1, cure="0.05 is usual", metavar="SHARE",
    )  # fmt: skip
    regularisation: Any = setting(
        None, "folder of captioned images of the class (prior preservation)",
        metavar="FOLDER", flags=("--regularisation", "--reg-data-dir"),
    )  # fmt: skip
    regularisation_weight: float = setting(
        1.0, "weight of the loss on images of the class", low=0, high=10**6, above=True, cure="1 is usual",
        error_without="regularisation='class'", flags=("--regularisation-weight", "--prior-loss-weight"),
    )  # fmt: skip


TAGS = ("shuffle_captions", "tag_dropout", "keep_tokens")
"""Settings that change the captions in each step."""

MOST_RANK = 1024


def read_ranks(name: str, value: Any) -> tuple[str, ...]:
    """Read ranks by parts of layers' names, as ``part=rank`` texts."""
    pairs = read_pairs(name, value)
    for pair in pairs:
        part, _, rank = pair.rpartition("=")
        if not part.strip(".") or not rank.isdecimal() or not 1 <= int(rank) <= MOST_RANK:
            problem = f"has no part of a layer's name with a rank of 1..{MOST_RANK}"
            raise InputError(name, problem, cure="for example mid_block=8", value=pair)
    return pairs


_TEXT: dict[str, Any] = {
    "default": False, "help": "train text encoders too", "flags": ("--text-encoder", "--train-text-encoder"),
}  # fmt: skip
_TEXT_RATE: dict[str, Any] = {
    "default": None, "help": "learning rate of the text encoders", "low": 0, "high": 1000, "above": True,
    "cure": "1e-5 is usual", "unset": "the same", "error_without": "text=True", "metavar": "RATE",
    "flags": ("--text-lr", "--text-encoder-lr"),
}  # fmt: skip
_SAVE_DTYPE: dict[str, Any] = {"default": "float32", "help": "dtype of the saved weights", "metavar": "DTYPE"}


@dataclass(frozen=True)
class WholeRecord:
    """The fields of ``canvax.train.finetune.FullFinetune``."""

    text: bool = setting(**_TEXT)
    text_rate: float | None = setting(**_TEXT_RATE)
    save_dtype: Any = setting(**_SAVE_DTYPE)


@dataclass(frozen=True)
class LoraRecord:
    """The fields of ``canvax.train.lora.Lora``."""

    rank: int = setting(4, "rank of the factors", low=1, high=MOST_RANK, metavar="N", flags=("--rank", "--network-dim"))
    alpha: float | None = setting(
        None, "factor of the change, divided by the rank", low=0, high=10**6, above=True, cure="the rank is usual",
        unset="the rank", flags=("--alpha", "--network-alpha"),
    )  # fmt: skip
    layers: Layers = setting("attention", "attention, transformer (with feed-forward), or all", metavar="KIND")
    text: bool = setting(**_TEXT)
    text_rate: float | None = setting(**_TEXT_RATE)
    names: Names = setting("peft", "names in the file: peft (diffusers) or kohya", metavar="NAME", flags=("--format",))
    trigger: str = setting("", "trigger words for the file's metadata", metavar="WORDS")
    title: str = setting(
        "", "title for the file's metadata instead of the folder's name", metavar="TEXT",
    )  # fmt: skip
    start: Any = setting(
        None, "begin with this LoRA, of the same rank and layers", metavar="LORA",
        flags=("--from", "--network-weights"),
    )  # fmt: skip
    save_dtype: Any = setting(**_SAVE_DTYPE)
    dora: bool = setting(False, "train a DoRA: also the norms of the weights", flags=("--dora", "--use-dora"))
    conv_rank: int | None = setting(
        None, "rank of 3 x 3 convolutions (LoCon)", low=1, high=MOST_RANK, unset="that of the others", metavar="N",
        error_without="layers='all'", flags=("--conv-rank", "--conv-dim"),
    )  # fmt: skip
    ranks: Mapping[str, int] | Sequence[str] = setting(
        (), "rank of layers with this part in their name: mid_block=8", repeats=True,
        metavar="PART=RANK", read=read_ranks,
    )  # fmt: skip
    lokr: int | None = setting(
        None, "train a LoKr (LyCORIS), with a first factor of at most N x N", low=2, high=MOST_RANK,
        unset="a LoRA", cure="8 is usual", metavar="N", error_without="names='kohya'", flags=("--lokr", "--factor"),
    )  # fmt: skip


@dataclass(frozen=True)
class InstanceRecord:
    """The fields of ``canvax.train.dreambooth.Instance``."""

    prompt: str = setting(
        help='prompt of the images: "a photo of sks dog"', metavar="PROMPT", flags=("-p", "--instance-prompt"),
    )  # fmt: skip
    class_prompt: str | None = setting(
        None, '"a photo of a dog"; with it, prior preservation', metavar="PROMPT",
    )  # fmt: skip
    class_pictures: Any = setting(
        None, "images of the class, generated if missing", error_without="class_prompt='a photo of a dog'",
        unset="class in the folder of the run", metavar="FOLDER", flags=("--class-images", "--class-data-dir"),
    )  # fmt: skip
    count: int = setting(
        100, "images of the class", low=1, high=MOST_IMAGES, error_without="class_prompt='a photo of a dog'",
        metavar="N", flags=("--num-class-images",),
    )  # fmt: skip
    weight: float = setting(
        1.0, "weight of the loss on images of the class", low=0, high=10**6, above=True, cure="1 is usual",
        error_without="class_prompt='a photo of a dog'", flags=("--prior-weight", "--prior-loss-weight"),
    )  # fmt: skip
    batch: int = setting(4, "class images generated at once", low=1, high=MOST_IMAGES, closed=_NO_FLAG)


@dataclass(frozen=True)
class InversionRecord:
    """The fields of ``canvax.train.textual_inversion.Inversion``."""

    token: str = setting(help='new word, such as "<cat-toy>"', metavar="WORD", flags=("--token", "--placeholder-token"))
    initializer: str = setting(
        help="a known word to begin with: toy", metavar="WORD", flags=("--initializer", "--initializer-token"),
    )  # fmt: skip
    vectors: int = setting(
        1, "tokens of the word", low=1, high=MOST_VECTORS, metavar="N", flags=("--vectors", "--num-vectors"),
    )  # fmt: skip


@dataclass(frozen=True)
class WithLora:
    """Options of ``canvax train dreambooth``."""

    lora: bool = setting(False, "train a LoRA, not the whole UNet")


@dataclass(frozen=True)
class WordCaptions:
    """An argument of ``canvax.train.textual_inversion.train_inversion``."""

    learn: Learn = setting(
        "object", "object, style, or word: no sentences", metavar="KIND", flags=("--learn", "--learnable-property"),
    )  # fmt: skip


@dataclass(frozen=True)
class ControlRecord:
    """The fields of ``canvax.train.controlnet.ControlNetTask``, and the column of its images."""

    widths: Sequence[int] | None = setting(
        None, "channels of the network that reads the image", low=1, high=4096, unset="16,32,96,256", metavar="N,N",
        flags=("--hint-channels",),
    )  # fmt: skip
    save_dtype: Any = setting(**_SAVE_DTYPE)


@dataclass(frozen=True)
class Pairs:
    """An argument of ``canvax.train.controlnet.train_controlnet``."""

    control_column: str = setting(
        "conditioning_image", "column of the files of control images", metavar="NAME",
        flags=("--control-column", "--conditioning-image-column"),
    )  # fmt: skip


class Task(NamedTuple):
    """A command of ``canvax train``.

    Attributes:
        summary: its line in the list of commands.
        description: text of its --help.
        images: contents of the folder or zip file.
        writes: clause about the result.
        records: the records whose settings are flags, besides those of all tasks.
        plan: the fields of the plan that differ from ``PLAN``.
        empty: share of captions that are left out, by default.
        captioned: True if captions are read.
        without: settings that have no effect here.
    """

    summary: str
    description: str
    images: str
    writes: str
    records: tuple[type, ...]
    plan: Mapping[str, Any]
    empty: float = 0.0
    captioned: bool = True
    without: tuple[str, ...] = ("quantize", "references")

    @property
    def usual(self) -> dict[str, Any]:
        """The defaults that differ from those of the records."""
        return {**PLAN, **self.plan, "empty": self.empty}


PLAN: Mapping[str, Any] = {
    "steps": 1000, "batch": 1, "learning_rate": 1e-5, "warmup": 0, "final": 1.0, "b2": 0.999, "average": 0.0,
    "chunk": 10,
}  # fmt: skip
"""The usual plan for Stable Diffusion: AdamW with a constant learning rate."""
_OF_LORA = {"learning_rate": 1e-4}
_CLASS = ("regularisation", "regularisation_weight")
_SETS = ("references", *_CLASS)

TASKS: Mapping[str, Task] = {
    "finetune": Task(
        "train a checkpoint further on your own images",
        "Train the UNet of a Stable Diffusion checkpoint (1.x, 2.x, XL) on captioned images.",
        "captioned images", "the model is written to model/", (WholeRecord,), {}, empty=0.1,
    ),
    "lora": Task(
        "train a LoRA on your own images",
        "Train low-rank factors beside the weights of a checkpoint (Stable Diffusion 1.x, 2.x and XL, Z-Image, FLUX.2 "
        "klein, Krea 2) on captioned images. The file loads in canvax, in PyTorch diffusers, and with --format kohya "
        "in A1111 and its relatives.",
        "captioned images", "the LoRA is pytorch_lora_weights.safetensors", (LoraRecord,), _OF_LORA, without=(),
    ),
    "dreambooth": Task(
        "teach a model one thing, from a few images of it",
        "Train on a few images of one thing, with a rare word for it, and on images that the model generates of its "
        "class. Trains the whole UNet, or with --lora a LoRA, by default at its learning rate, 1e-4.",
        "images of the thing; captions are not read", "the model is written to model/, or the LoRA to the folder",
        (InstanceRecord, WithLora, LoraRecord), {"steps": 400, "learning_rate": 5e-6}, captioned=False, without=_SETS,
    ),
    "textual-inversion": Task(
        "teach a model a new word",
        "Train only the vectors of a new word, on a few images of its meaning.",
        "images of the word's meaning; captions are not read", "the word is learned_embeds.safetensors",
        (InversionRecord, WordCaptions), {"steps": 5000, "learning_rate": 5e-4}, captioned=False,
        without=("quantize", *_SETS),
    ),
    "controlnet": Task(
        "train a ControlNet on pairs of images",
        "Train a copy of the UNet's down blocks to read control images. Rows of the table of captions name a "
        "control image for each image.",
        "images, control images and captions", "the network is written to controlnet/",
        (ControlRecord, Pairs), {"steps": 5000}, without=("quantize", "prompts", *_SETS),
    ),
}  # fmt: skip
"""The kinds of training by the name of their command."""
