"""The safety checker of the Flax API: it checks the images of a call, and makes refused images black.

The computation is that of ``canvax.pipelines.safety``, on the first device and always in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import CheckpointError, HintWarning, InputError, warn
from canvax.familiar import FLAX_LOAD, FLAX_PAGE, accepts
from canvax.flax_api.devices import host_device, on_host, unreplicate
from canvax.flax_api.inputs import check_weights, weights_of
from canvax.flax_api.output import by_name_or_index
from canvax.images.inputs import clip_square
from canvax.models.clip_vision import MEAN, STD
from canvax.params import Params
from canvax.pipelines.safety import COMPONENT, SafetyChecker, read_safety_checker, safety_spec, vision_config
from canvax.pipelines.translate import loader
from canvax.weights.location import Location

if TYPE_CHECKING:
    from PIL.Image import Image

_FROM_PRETRAINED = (
    "pretrained_model_name_or_path",
    "subfolder",
    "from_pt",
    "revision",
    "variant",
    "token",
    "cache_dir",
)


class FlaxImages(NamedTuple):
    """Output of the feature extractor: ``pixel_values`` [B, 3, S, S] float32, normalised by CLIP's mean and std."""

    pixel_values: np.ndarray

    __getitem__ = by_name_or_index


@dataclass(frozen=True)
class ImageProcessor:
    """``pipeline.feature_extractor``: converts images to CLIP's input, squares of ``size`` pixels."""

    size: int

    def __call__(self, images: Image | Sequence[Image], return_tensors: str = "np") -> FlaxImages:
        """Return the ``pixel_values`` of PIL images."""
        if return_tensors not in ("np", "jax"):
            raise InputError(f"return_tensors={return_tensors!r}: pixel values are NumPy arrays; write 'np'")
        several = list(images) if isinstance(images, Sequence) else [images]
        squares = np.stack([clip_square(image, self.size) for image in several])
        return FlaxImages(np.moveaxis((squares - MEAN) / STD, -1, 1).astype(np.float32))


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionSafetyChecker:
    """The safety checker of Stable Diffusion 1.x with the interface of diffusers' class of the same name.

    Attributes:
        config: the parsed ``config.json``.
    """

    config: Mapping[str, Any]
    _used: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    @accepts(loader(FLAX_LOAD, _FROM_PRETRAINED, "an argument of from_pretrained", FLAX_PAGE), table=FLAX_LOAD)
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        subfolder: str = "",
        from_pt: bool = False,
        revision: str | None = None,
        variant: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        progress: bool = True,
    ) -> tuple[Self, Params]:
        """Load a checker; return it and its float32 parameters in host memory, for ``params["safety_checker"]``.

        Args:
            pretrained_model_name_or_path: a Hub id or a folder.
            subfolder: folder of the checker in it: "safety_checker" for a model.
            from_pt: ignored: PyTorch's safetensors and Flax's msgpack can both be loaded.
            revision: branch, tag or commit on the Hub.
            variant: which of several sets of weights to load, e.g. "fp16".
            token: Hub token.
            cache_dir: folder of the Hub's files.
            local_files_only: never connect to the Hub.
            progress: show downloads on stderr.

        Raises:
            CheckpointError: the checker is missing, damaged or not supported.
            HubError: the Hub cannot be reached or does not have the checker.
        """
        del from_pt
        source = Location(
            pretrained_model_name_or_path, revision=revision, variant=variant, token=token, cache_dir=cache_dir,
            local_files_only=local_files_only, progress=progress,
        )  # fmt: skip
        config, params = read_safety_checker(source, host_device(), subfolder.strip("/"))
        return cls(config), on_host(params)

    @property
    def feature_extractor(self) -> ImageProcessor:
        """The image processor for calls of the checker."""
        return ImageProcessor(vision_config(self.config).image_size)

    def __call__(self, clip_input: Any, params: Params) -> np.ndarray:
        """Return for each image whether to refuse it, bool [B]; ``clip_input`` comes from ``feature_extractor``."""
        values = np.asarray(clip_input, np.float32)
        side = vision_config(self.config).image_size
        if values.ndim != 4 or values.shape[1:] != (3, side, side):
            raise InputError(
                f"clip_input has shape {values.shape}; give pixel_values of feature_extractor [B, 3, {side}, {side}]"
            )
        self.check({COMPONENT: params})
        seen = np.moveaxis(values, 1, -1) * np.asarray(STD, np.float32) + np.asarray(MEAN, np.float32)
        return np.asarray(self._with(params).judge(seen))

    def check(self, params: Any, *, stacked: bool = False) -> None:
        """Raise InputError if a pipeline's parameters lack those of this checker; ``stacked``: with a device axis."""
        specs = {COMPONENT: safety_spec(vision_config(self.config))}
        try:
            check_weights(specs, weights_of(params, specs), stacked=stacked)
        except InputError as error:
            raise InputError(
                f"{error}; or with FlaxStableDiffusionSafetyChecker.from_pretrained; from_pretrained(..., "
                "safety_checker=None) checks nothing"
            ) from None

    def look(self, images: np.ndarray, params: Params, *, stacked: bool) -> tuple[np.ndarray, list[bool]]:
        """Make refused images black; return images in 0..1 [(D,) B, H, W, 3], and for each whether it was refused."""
        flat = images.reshape(-1, *images.shape[-3:])
        pixels, flags = self._with(params[COMPONENT], stacked=stacked).blacken(flat)
        if any(flags):
            warn(
                f"the safety checker refused {sum(flags)} of {len(flags)} images, which are black now; try another "
                "prompt or key, or load the pipeline with safety_checker=None",
                HintWarning,
            )
        return pixels.reshape(images.shape), flags

    def _with(self, params: Params, *, stacked: bool = False) -> SafetyChecker:
        """Return the checker with these parameters on the first device; cached, as calls usually repeat them."""
        if self._used.get("params") is not params:
            weights = unreplicate(params) if stacked else params
            device = jax.local_devices()[0]
            weights = jax.tree.map(lambda leaf: jax.device_put(jnp.asarray(leaf, jnp.float32), device), weights)
            self._used.update(params=params, checker=SafetyChecker.of(vision_config(self.config), weights))
        return self._used["checker"]


def check_checker(value: Any) -> None:
    """Raise InputError for an invalid ``safety_checker`` argument of ``from_pretrained``."""
    if not (value is None or isinstance(value, FlaxStableDiffusionSafetyChecker) or str(value) == "own"):
        raise InputError(
            f"safety_checker={value!r:.80} is neither None, for none, nor a FlaxStableDiffusionSafetyChecker of "
            "canvax.flax_api; leave it out for the checkpoint's own"
        )


def load_checker(model: str | Path, hub: Mapping[str, Any]) -> tuple[FlaxStableDiffusionSafetyChecker, Params] | None:
    """Load the checker of a model whose index names one; return None if its folder does not contain the checker."""
    folder = Location(model).local()
    if folder is not None and not (folder / COMPONENT / "config.json").is_file():
        warn(
            f"{model}: its model_index.json names a safety checker, but the folder has none: images are not looked at; "
            "safety_checker=None says that this is meant",
            HintWarning,
        )
        return None
    try:
        return FlaxStableDiffusionSafetyChecker.from_pretrained(model, subfolder=COMPONENT, **hub)
    except CheckpointError as error:
        raise CheckpointError(f"{error} (safety_checker=None leaves it out)") from error
