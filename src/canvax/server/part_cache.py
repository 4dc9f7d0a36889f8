"""The VAEs and ControlNets of a server: files of the folder of models that requests name.

Their weights are put among the model's parameters. A file with the same config as the model's part needs no other
programs. Programs for another config are compiled when a request first names a file that has it. The files that were
used last stay on the devices.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from canvax.compile.programs import Programs
from canvax.errors import CanvaxError, CheckpointError, InputError, nearest
from canvax.families.base import Model
from canvax.families.controls import component_name
from canvax.families.read import read_networks
from canvax.parallel.place import on_devices
from canvax.parallel.rules import place
from canvax.params import Params
from canvax.pipelines.networks import Opened, open_controls, with_controls
from canvax.server.jobs import Rejected
from canvax.weights.cast import parse_dtype
from canvax.weights.data_folder import stem_of
from canvax.weights.files import ModelFiles
from canvax.weights.load import load_components
from canvax.weights.location import Location
from canvax.weights.overrides import Overrides

KEPT = 2
"""Files of each kind that stay on the devices, unless one image names more."""

VAE, CONTROLNET = "vae", "controlnet"


class Variant(NamedTuple):
    """Files, by their names in requests, that need other programs than the model's.

    Attributes:
        vae: an autoencoder of another config than the model's; "" for all others.
        controlnets: networks that read control images, in the order of the request.
    """

    vae: str = ""
    controlnets: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join((*filter(None, [self.vae]), *self.controlnets))


PLAIN = Variant()
"""The model as it was loaded."""


class PartCache:
    """The files of one kind for one model.

    ``weights``, ``drop`` and ``take_off`` are the engine's thread's; the rest may be called in any.

    Args:
        argument: what requests call it.
        paths: the files by their names in requests.
        opened: reads from a file's headers what decides programs.
        loaded: reads the weights of a file; gets the model's parameters as well.
        has_programs: whether the server's programs are those of a file that was opened.
        on_demand: whether other programs may be compiled.
        dropped: called with each file whose weights leave the devices.

    Attributes:
        names: those of the files, with the reason where one cannot be used with the model, else "".
        networks: what was opened of the files that can be used.
        held: weights on the devices.
        used: when the weights of a file were used last, on the engine's clock.
    """

    def __init__(
        self,
        argument: str,
        paths: Mapping[str, Path],
        opened: Callable[[Path], Any],
        loaded: Callable[[Path, Params], Params],
        has_programs: Callable[[Any], bool],
        *,
        on_demand: bool,
        dropped: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._argument, self._paths, self._loaded, self._dropped = argument, paths, loaded, dropped
        self.names: dict[str, str] = {}
        self.networks: dict[str, Any] = {}
        self.held: dict[str, Params] = {}
        self.used: dict[str, float] = {}
        for name, path in paths.items():
            try:
                with warnings.catch_warnings(action="ignore"):  # such as of another scaling factor
                    network = opened(path)
            except (CanvaxError, OSError) as fault:
                self.names[name] = str(fault).replace(str(path), path.name)  # the folders are the operator's business
            else:
                fits = on_demand or has_programs(network)
                cure = f"start the server with --{argument} {name}, or with --compile-on-demand"
                self.names[name] = "" if fits else f"{path.name} needs other programs than the server has; {cure}"
                self.networks |= {name: network} if fits else {}

    @property
    def bytes(self) -> int:
        """Bytes of the weights on each device."""
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(list(self.held.values())))

    def find(self, name: str) -> str:
        """Return the name of a usable file, for a name in any case, with the file's extension or without.

        Raises:
            Rejected: there is no such file, or it cannot be used.
        """
        argument, wanted = self._argument, stem_of(name.strip()).lower()
        for known, fault in self.names.items():
            if wanted in (stem_of(known).lower(), stem_of(self._paths[known].name).lower()):
                if fault:
                    raise Rejected(400, f"{argument}_unusable", f"{argument}={name!r:.100}: {fault}", param=argument)
                return known
        there = nearest(name[:100], list(self.networks)) if self.networks else "leave it out: there is none"
        raise Rejected(404, f"{argument}_not_found", f"{argument}={name!r:.100} is not there; {there}", param=argument)

    # What follows is the engine's.

    def weights(self, name: str, params: Params, stays: Collection[str] = ()) -> Params:
        """Return the parameters of a file on the devices. Other files may leave for it, except those in ``stays``.

        Raises:
            InputError: the file was changed, and cannot be read.
        """
        if name not in self.held:
            idle = sorted(self.held.keys() - set(stays), key=self.used.__getitem__)
            for other in idle[: max(0, len(self.held) + 1 - max(KEPT, len(stays)))]:
                self.drop(other)
            try:
                self.held[name] = self._loaded(self._paths[name], params)
            except (CanvaxError, OSError) as fault:
                raise InputError(self._argument, f"cannot be read: {fault}", cure="name another", value=name) from None
        self.used[name] = time.monotonic()
        return self.held[name]

    def drop(self, name: str) -> None:
        """Free the devices' memory of a file."""
        del self.held[name]
        self._dropped(name)

    def take_off(self) -> None:
        """Free all that it holds on the devices."""
        for name in list(self.held):
            self.drop(name)


def vae_cache(model: Model, mesh: Mesh, paths: Mapping[str, Path], *, on_demand: bool = False) -> PartCache:
    """Return the cache of autoencoder files for a model."""

    def files(path: Path) -> ModelFiles:
        return Overrides(vae=str(path)).apply(model.files)

    def opened(path: Path) -> Any:
        vae = read_networks(files(path)).vae
        if (vae.factor, vae.latent_channels) != (model.vae.factor, model.vae.latent_channels):
            raise CheckpointError(f"{path}: is a VAE of other latents than the model's")
        return vae

    def loaded(path: Path, params: Params) -> Params:
        del params
        return load_components(
            files(path),
            [part for part in with_vae(model, opened(path)).components if part.name == VAE],
            dtype=parse_dtype(model.dtype),
            place=lambda param, array: place(param, array, mesh, None),
            finite=(VAE,),
        )[VAE]

    return PartCache(VAE, paths, opened, loaded, lambda vae: vae == model.vae, on_demand=on_demand)


def with_vae(model: Model, vae: Any) -> Model:
    """Return a model with another autoencoder; ``vae`` is its config."""
    return dataclasses.replace(model, networks=dataclasses.replace(model.networks, vae=vae))


def control_cache(
    model: Model,
    programs: Programs,
    paths: Mapping[str, Path],
    dropped: Callable[[str], None] = lambda name: None,
    *,
    on_demand: bool = False,
) -> PartCache:
    """Return the cache of control network files for a model."""

    def opened(path: Path) -> Opened:
        return open_controls(model, [Location(str(path))])[0]

    def loaded(path: Path, params: Params) -> Params:
        return on_devices(with_controls(model, programs, params, [opened(path)])[2][component_name(0)])

    def has_programs(network: Opened) -> bool:
        return model.networks.controls == ((component_name(0), network.net),)

    return PartCache(CONTROLNET, paths, opened, loaded, has_programs, on_demand=on_demand, dropped=dropped)
