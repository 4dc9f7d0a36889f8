"""The autoencoders of a server: files of the folder of models that requests may name in place of a model's own.

Their weights take the place of the model's among the parameters, in the same programs: so only those with the model's
config can be named, and nothing is compiled. The last used stay on the devices.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from jax.sharding import Mesh

from canvax.errors import CanvaxError, InputError, nearest
from canvax.families.base import Model
from canvax.families.read import read_networks
from canvax.parallel.rules import place
from canvax.params import Params
from canvax.server.jobs import Rejected
from canvax.weights.cast import parse_dtype
from canvax.weights.data_folder import stem_of
from canvax.weights.files import ModelFiles
from canvax.weights.load import load_components
from canvax.weights.overrides import Overrides

KEPT = 2
"""Autoencoders that stay on the devices beside the model's own."""

_PART = "vae"


class VaeCache:
    """The autoencoders for one model.

    ``weights`` and ``take_off`` are the engine's thread's; the rest may be called in any.

    Args:
        model: the model.
        mesh: its devices.
        paths: the files by their names in requests.

    Attributes:
        names: those of the files, with the reason where one cannot be used with the model, else "".
    """

    def __init__(self, model: Model, mesh: Mesh, paths: Mapping[str, Path]) -> None:
        self._model, self._mesh, self._paths = model, mesh, paths
        self._held: OrderedDict[str, Params] = OrderedDict()  # the last used last
        self.names = {name: self._fault(path) for name, path in paths.items()}

    def _fault(self, path: Path) -> str:
        try:
            with warnings.catch_warnings(action="ignore"):  # of another scaling factor, which is another config
                other = read_networks(self._opened(path)).vae
        except (CanvaxError, OSError) as fault:
            return str(fault).replace(str(path), path.name)  # the folders above it are the operator's business
        same = other == self._model.vae
        return "" if same else f"{path.name} is another kind of VAE than the model's; the server is started with --vae"

    def _opened(self, path: Path) -> ModelFiles:
        """The files of the model with this autoencoder."""
        return Overrides(vae=str(path)).apply(self._model.files)

    def find(self, name: str) -> str:
        """The name of an autoencoder that can be used, for a name in any case, with the file's ending or without.

        Raises:
            Rejected: there is none.
        """
        wanted = stem_of(name.strip()).lower()
        for known, fault in self.names.items():
            if wanted in (stem_of(known).lower(), stem_of(self._paths[known].name).lower()):
                if fault:
                    raise Rejected(400, "vae_unusable", f"vae={name!r:.100}: {fault}", param=_PART)
                return known
        usable = [known for known, fault in self.names.items() if not fault]
        there = nearest(name[:100], usable) if usable else "leave it out: this server has none for the model"
        raise Rejected(404, "vae_not_found", f"vae={name!r:.100} is not there; {there}", param=_PART)

    # What follows is the engine's.

    def weights(self, name: str) -> Params:
        """Its parameters on the devices.

        Raises:
            InputError: the file was changed, and cannot be read.
        """
        if name not in self._held:
            while len(self._held) >= KEPT:
                self._held.popitem(last=False)
            parts = [part for part in self._model.components if part.name == _PART]
            try:
                loaded = load_components(
                    self._opened(self._paths[name]),
                    parts,
                    dtype=parse_dtype(self._model.dtype),
                    place=lambda param, array: place(param, array, self._mesh, None),
                    finite=(_PART,),
                )
            except (CanvaxError, OSError) as fault:
                raise InputError(_PART, f"cannot be read: {fault}", cure="name another", value=name) from None
            self._held[name] = loaded[_PART]
        self._held.move_to_end(name)
        return self._held[name]

    def take_off(self) -> None:
        """Free what it holds on the devices."""
        self._held.clear()
