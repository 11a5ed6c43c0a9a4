"""Layouts: maps between our parameters and published checkpoints, by library and architecture."""

from collections.abc import Mapping
from typing import Any

from leanformer.config.architectures import listed_per_layer
from leanformer.errors import ConfigError
from leanformer.pretrained.layouts import huggingface, timm
from leanformer.pretrained.layouts.entries import Entry


PUBLISHED = {
    "timm": {"vit": timm.vit, "xcit": timm.xcit, "volo": timm.volo, "tnt": timm.tnt, "davit": timm.davit},
    "huggingface": {"vit": huggingface.vit, "bert": huggingface.bert, "gpt": huggingface.gpt},
}
LAYOUTS = ("own", *PUBLISHED)  # our own, which every architecture has, and published ones
# Interventions that change the forward pass: published weights then compute other outputs.
INTERVENTIONS = ("spectral", "sigma_reparam", "mlp_sigma_reparam", "graying")


def layout(source: str, arguments: Mapping[str, Any]) -> list[Entry]:
    """Return the entries that map the names of tensors in a published library, a key of PUBLISHED, to ours.

    `arguments` is the section config.model. Raises ConfigError if the library has no such model.
    """
    name = arguments["name"]
    if name not in PUBLISHED[source]:
        available = ", ".join(key for key, layouts in PUBLISHED.items() if name in layouts) or "none"
        raise ConfigError(f'No layout between "{source}" and the architecture {name}. Available: {available}.')
    if active := [key for key in INTERVENTIONS if arguments.get(key)]:
        option = f"model.{active[0]}={arguments[active[0]]}"
        raise ConfigError(f'{option}: the layout "{source}" has no such option. Leave it out, or use the layout "own".')
    if uneven := listed_per_layer(arguments):
        key, sizes = next(iter(uneven.items()))
        raise ConfigError(f'model.{key}={sizes}: the layout "{source}" has equal layers. Use the layout "own".')
    return PUBLISHED[source][name](**arguments)
