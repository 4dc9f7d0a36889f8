"""The result of a pipeline, and its progress: bars on the terminal, previews for callbacks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from canvax.compile.aot import Build
from canvax.errors import CanvaxError, CheckpointError, InputError, to_stderr
from canvax.files import named_path
from canvax.images.convert import to_pil
from canvax.images.formats import GeneratedImage, names_file
from canvax.images.grid import make_grid
from canvax.images.metadata import save_image, save_numbered
from canvax.kernels.target import jitted
from canvax.models.configs import TinyConfig
from canvax.models.tiny import tiny_decode, tiny_spec
from canvax.params import Params
from canvax.types import Array, HostArray
from canvax.weights.load import Component, load_components
from canvax.weights.location import Location
from canvax.weights.open import open_network

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Images = TypeVar("Images", default=list[Image.Image])
else:
    Images = TypeVar("Images")


@dataclass(frozen=True, eq=False)
class Result(Generic[Images]):
    """Images with metadata and timings. It can be used as the list of its images, and a notebook shows them.

    If several processes generate together, each has only the images of its devices; ``indices`` are their numbers.

    Attributes:
        images: a list of PIL images, which write their metadata when they are saved as PNG, JPEG or WebP; none if the
            run was stopped by ``denoising_end``. With an ``output_type``, ``pixels`` or ``latents``, as in diffusers:
            then the type is ``Result[np.ndarray]``.
        pixels: the same as an array [B, H, W, C] float32 in 0..1, before rounding to 8 bits; C is 4 for a model of
            images with alpha, else 3. B is 0 with ``output_type="latent"`` and after ``denoising_end``, which need no
            decoder. With ``output_type="jax"`` it is a JAX array on the devices, and so is ``latents``.
        latents: the decoder's input [B, h, w, C] float32; ``latents`` arguments have this layout too. After
            ``denoising_end`` they are noisy, in the variance-preserving frame, to continue with ``denoising_start``.
        metadata: for each image, everything needed to generate it again.
        timings: seconds of each stage: ``compile`` (or loading programs), ``encode``, ``denoise``, ``step``
            (one evaluation), ``decode``, and ``total``, the whole call; ``first_step`` is from the call to the end of
            its first step, which the command counts from the start of its process.
        compilations: programs that JAX compiled for this call; 0 after the first image of a size and batch, and in a
            process that finds them in the cache.
        indices: numbers of these images in the call, from 0.
    """

    images: Images
    pixels: np.ndarray = field(repr=False)
    latents: np.ndarray = field(repr=False)
    metadata: list[dict[str, Any]] = field(repr=False)
    timings: dict[str, float]
    compilations: int
    indices: list[int] = field(repr=False)

    def __len__(self) -> int:
        return len(self._listed)

    @overload
    def __iter__(self: Result[list[Image.Image]]) -> Iterator[Image.Image]: ...
    @overload
    def __iter__(self) -> Iterator[Any]: ...
    def __iter__(self) -> Iterator[Any]:
        return iter(self._listed)

    @overload
    def __getitem__(self: Result[list[Image.Image]], index: int) -> Image.Image: ...
    @overload
    def __getitem__(self, index: Any) -> Any: ...
    def __getitem__(self, index: Any) -> Any:
        return self._listed[index]

    @property
    def _listed(self) -> Any:
        return self.images

    def _repr_png_(self) -> bytes | None:
        """Return one image of all images, which a notebook shows."""
        if not len(self.pixels):
            return None
        buffer = BytesIO()
        make_grid(to_pil(self.pixels)).save(buffer, "PNG")
        return buffer.getvalue()

    def _check_finished(self) -> None:
        if not len(self.pixels) and self.metadata:
            raise InputError(
                "there are no images: denoising_end or output_type='latent' left the decoder out; go on from "
                "result.latents"
            )

    def grid(self, rows: int | None = None, cols: int | None = None) -> Image.Image:
        """Join all images in one, near square unless ``rows`` or ``cols`` are given, with the metadata of each."""
        self._check_finished()
        return GeneratedImage.of(make_grid(to_pil(self.pixels), rows, cols), {"grid": self.metadata})

    def save(self, path: str | Path, *, overwrite: bool = False) -> list[Path]:
        """Write each image with its metadata; return the paths.

        Args:
            path: a folder, where each image gets a free name; or the name of one image, ``NAME.png``, ``.jpg`` or
                ``.webp``.
            overwrite: replace a file of this name, as when a cell of a notebook runs again.

        Raises:
            InputError: there is no image, the file exists already, or one name was given for several images.
        """
        self._check_finished()
        path, images = named_path("path", path), to_pil(self.pixels)
        if names_file(path):
            if len(images) != 1:
                raise InputError("path", f"is one file for {len(images)} images", cure="give a folder", value=path)
            make_folder(path.parent)
            return [save_image(path, images[0], self.metadata[0], overwrite=overwrite)]
        if path.exists() and not path.is_dir():
            raise InputError("path", "is a file", cure="give a folder, or a name that ends in .png", value=path)
        make_folder(path)
        return [
            save_numbered(path, image, meta, meta["seed"]) for image, meta in zip(images, self.metadata, strict=True)
        ]


def make_folder(path: Path) -> None:
    """Make the folder ``path`` unless it exists.

    Raises:
        CanvaxError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise CanvaxError(f"{path}: the folder cannot be made ({getattr(error, 'strerror', None) or error})") from None


SELDOM = 30.0
"""Seconds between two lines about the same work in a log, where no user watches."""

_IN_A_LOG = "{desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed} so far, {remaining} left"
_LINES = {"loading": "loading the programs:", "compiling": "compiling (once for each size and batch):"}


def summary(pipe: Any, name: str = "Pipeline") -> str:
    """Return a line about a pipeline for ``repr``: its weights and tables would fill pages."""
    model = pipe.model
    height, width = model.native_size
    parts = [repr(str(model.files)), f"{width}x{height}", model.scheduler.spec.label]
    if leaves := jax.tree.leaves(getattr(pipe, "params", None)):
        parts += [f"{sum(leaf.size for leaf in leaves) / 1e6:.1f}M parameters", leaves[0].dtype.name]
    return f"{name}({', '.join(parts)})"


def _can_draw_bars() -> bool:
    """Return True on a terminal or in a notebook: in a log each state of a bar is a line."""
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def in_notebook() -> bool:
    """Return True in a Jupyter kernel."""
    return "ipykernel" in sys.modules


def progress_bar(total: int, *, description: str, unit: str, shown: bool) -> Any:
    """Return tqdm's bar on stderr; in a notebook its bar for these, if installed; in a log a line now and then."""
    if in_notebook() and find_spec("ipywidgets"):
        from tqdm.auto import tqdm
    else:
        from tqdm import tqdm  # late: importing canvax stays quick
    where: dict[str, Any] = {"file": sys.stderr}
    if not _can_draw_bars():
        where = {"file": _Log(), "delay": SELDOM, "mininterval": SELDOM, "miniters": 1}
        where |= {"bar_format": _IN_A_LOG, "leave": False}
    return tqdm(total=total, desc=description, unit=unit, disable=not shown, **where)


class _Log:
    """A file for tqdm where each state of a bar is a line."""

    def write(self, text: str) -> None:
        if line := text.strip():
            to_stderr(f"{line}\n")

    def flush(self) -> None:
        pass


class Display:
    """Progress on stderr, or nothing. Also records what was compiled or loaded.

    Args:
        shown: False for nothing; "programs" for the programs that are compiled or loaded, without a bar.
    """

    def __init__(self, *, shown: bool | str) -> None:
        # A process without a terminal may have no stderr at all.
        self.shown = bool(shown) and sys.stderr is not None
        self._with_bar = self.shown and shown is True
        self.builds: list[Build] = []
        self.compile_seconds = 0.0
        """Time that compiling and loading programs took, in seconds."""
        self.first_step = 0.0
        self._lock = threading.Lock()
        self._since = 0.0
        self._running: set[int] = set()
        self._line = ""

    def announce(self, build: Build) -> None:
        """Show the programs that are being compiled or loaded; without this the first image looks like a hang.

        Programs come from several threads, each busy with one at a time, and share a line. The line says "compiling" as
        soon as one is compiled; loaded programs are then marked.
        """
        with self._lock:
            kind = "loading" if build.cached else "compiling"
            if build.seconds is None:
                if not self._running:
                    self._since = time.perf_counter()
                self._running.add(threading.get_ident())
                if not self._line or (self._line, kind) == ("loading", "compiling"):
                    self._write(("\n" if self._line else "") + _LINES[kind])
                    self._line = kind
                return
            self.builds.append(build)
            self._running.discard(threading.get_ident())
            also = "" if kind == self._line else f" ({'loaded' if build.cached else 'compiled'})"
            self._write(f" {build.program} {build.seconds:.1f} s{also}" + ("," if self._running else "\n"))
            if not self._running:
                self.compile_seconds += time.perf_counter() - self._since
                self._line = ""

    def stepped(self) -> None:
        """Record the time of the first step."""
        self.first_step = self.first_step or time.perf_counter()

    def bar(self, total: int) -> Bar:
        """Return a progress bar over ``total`` evaluations."""
        return Bar(total, shown=self._with_bar)

    def _write(self, text: str) -> None:
        if self.shown:
            to_stderr(text)


class Bar:
    """Progress over the steps, which decides how many steps one call of the program does between updates."""

    INTERVAL, UNSEEN = 0.2, 1.0
    """Seconds between two updates: seldom enough to cost nothing, often enough to look alive. Without a bar, only
    Ctrl-C waits for the end of a call."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._bar = progress_bar(total, description="denoising", unit="evaluation", shown=shown)
        self._interval = self.INTERVAL if shown and _can_draw_bars() else self.UNSEEN
        self._steps_per_second: float | None = None
        self._began = time.perf_counter()

    def chunk(self, left: int) -> int:
        """Return the number of steps to do before the next update."""
        if self._steps_per_second is None:
            return 1
        return max(1, min(left, int(self._steps_per_second * self._interval)))

    def advance(self, steps: int) -> None:
        """Count further steps as done."""
        self._bar.update(steps)
        now = time.perf_counter()
        self._steps_per_second = steps / max(now - self._began, 1e-6)
        self._began = now

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


class Clock:
    """Seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage = ""
        self._began = 0.0

    def __call__(self, stage: str) -> Self:
        self._stage = stage
        return self

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self._stage] = time.perf_counter() - self._began


@dataclass(frozen=True, eq=False)
class Preview:
    """A tiny decoder on the first device, in float32.

    Attributes:
        cfg: its config.
        params: its parameters, those of ``canvax.models.tiny.tiny_spec``.
    """

    cfg: TinyConfig
    params: Params = field(repr=False)

    def pixels(self, latents: HostArray) -> HostArray:
        """Decode latents [B, h, w, C], such as ``step.denoised``, to images [B, f h, f w, 3] float32 in 0..1.

        It compiles once for each shape.

        Raises:
            InputError: the latents are those of another model.
        """
        latents = np.asarray(latents, np.float32)
        if latents.ndim != 4 or latents.shape[-1] != self.cfg.latent_channels:
            raise InputError(
                "latents", f"are {latents.shape}", cure=f"this decoder takes [B, h, w, {self.cfg.latent_channels}]"
            )
        return jax.device_get(_pixels(self.params, jax.device_put(latents), cfg=self.cfg))

    def images(self, latents: HostArray) -> list[Image.Image]:
        """Decode latents to images of Pillow."""
        return to_pil(self.pixels(latents))


def load_preview(
    model: str | Path,
    *,
    revision: str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    progress: bool = True,
) -> Preview:
    """Load an ``AutoencoderTiny``, such as madebyollin/taesd for Stable Diffusion 1.x and 2.x or madebyollin/taesdxl.

    Args:
        model: a folder with ``config.json`` and its weights, or the Hub id of one.
        revision: branch, tag or commit of a Hub id.
        variant: name of a set of weights.
        token: Hub token; by default HF_TOKEN or the stored login.
        cache_dir: folder for the Hub's files.
        local_files_only: never ask the Hub.
        progress: show downloads on stderr.

    Raises:
        InputError, CheckpointError, HubError: as ``canvax.load``.
    """

    def accept(config: Mapping[str, Any]) -> None:
        kind = config.get("_class_name")
        if kind != "AutoencoderTiny":
            raise CheckpointError(
                f"{model}: is {kind!r}; a preview needs an 'AutoencoderTiny', such as madebyollin/taesd"
            )
        try:
            TinyConfig.from_dict(config)
        except CheckpointError as error:
            raise CheckpointError(f"{model}: {error}") from None

    source = Location(model, revision, variant, token, cache_dir, local_files_only, progress)
    files = open_network(source, accept=accept)
    cfg = TinyConfig.from_dict(files.config)
    device = jax.local_devices()[0]
    loaded = load_components(
        files,
        [Component("", tiny_spec(cfg), "diffusers")],
        dtype=np.float32,
        place=lambda param, array: jax.device_put(array, device),
        finite=("",),
    )
    return Preview(cfg, loaded[""])


@partial(jitted, static_argnames="cfg")
def _pixels(p: Params, latents: Array, *, cfg: TinyConfig) -> Array:
    return jnp.clip(tiny_decode(p, latents, cfg), 0.0, 1.0)
