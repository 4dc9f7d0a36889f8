"""IP-Adapters beside a model: what they are, and whether they were made for its kind."""

from __future__ import annotations

from dataclasses import replace

from canvax.errors import CheckpointError
from canvax.families.base import Model
from canvax.models.configs import ClipVisionConfig
from canvax.models.ip_adapter import IPAdapter
from canvax.weights.files import NetworkFiles
from canvax.weights.identify import BASES
from canvax.weights.ip_adapter import FULL_TOKENS, count_layers, read_ip_adapter


def component_name(index: int) -> str:
    """The key in ``params`` of the adapter of this index."""
    return f"ip_adapter_{index}" if index else "ip_adapter"


def ip_adapter_of(files: NetworkFiles, model: Model) -> IPAdapter:
    """The adapter of some files, for a model.

    Raises:
        CheckpointError: it was made for another kind of model.
    """
    adapter = read_ip_adapter(files, model.unet)
    wanted, layers = model.unet.cross_attention_dim, count_layers(files.shapes)
    made, kind = BASES.get(adapter.width, "another kind of model"), BASES.get(wanted, "another kind")
    if adapter.width != wanted:
        raise CheckpointError(
            f"{files}: is an IP-Adapter for {made}, and {model.name} is {kind if kind != made else 'not that'} (tokens "
            f"of width {adapter.width} in place of {wanted}). Take an adapter for this kind of model."
        )
    if layers != len(adapter.attentions):
        raise CheckpointError(
            f"{files}: is an IP-Adapter for another kind of model than {model.name}: it has keys for {layers} "
            f"attentions, the UNet has {len(adapter.attentions)}"
        )
    return adapter


def with_encoder(adapter: IPAdapter, cfg: ClipVisionConfig | None) -> IPAdapter:
    """The adapter beside an encoder, whose patches are the tokens of the kind that reads all of them."""
    if adapter.kind != "full":
        return adapter
    return replace(adapter, tokens=cfg.tokens if cfg else FULL_TOKENS)
