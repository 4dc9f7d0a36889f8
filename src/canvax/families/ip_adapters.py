"""IP-Adapters: reads them and checks that they were trained for the model's kind."""

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
    """Return the key in ``params`` of the adapter with this index."""
    return f"ip_adapter_{index}" if index else "ip_adapter"


def ip_adapter_of(files: NetworkFiles, model: Model) -> IPAdapter:
    """Return the adapter of these files, for a model.

    Raises:
        CheckpointError: it was made for another kind of model.
    """
    adapter = read_ip_adapter(files, model.unet)
    wanted, layers = model.unet.cross_attention_dim, count_layers(files.shapes)
    made, kind = BASES.get(adapter.width, "another kind of model"), BASES.get(wanted, "another kind")
    if adapter.width != wanted:
        raise CheckpointError(
            f"{files}: is an IP-Adapter for {made}, and {model.name} is {kind if kind != made else 'not that'} (tokens "
            f"of width {adapter.width} instead of {wanted}). Take an adapter for this kind of model."
        )
    if layers != len(adapter.attentions):
        raise CheckpointError(
            f"{files}: is an IP-Adapter for another kind of model than {model.name}: it has keys for {layers} "
            f"attentions, the UNet has {len(adapter.attentions)}"
        )
    return adapter


def with_encoder(adapter: IPAdapter, cfg: ClipVisionConfig | None) -> IPAdapter:
    """Return the adapter for an encoder, whose number of patches is the number of tokens of the kind that reads all."""
    if adapter.kind != "full":
        return adapter
    return replace(adapter, tokens=cfg.tokens if cfg else FULL_TOKENS)
