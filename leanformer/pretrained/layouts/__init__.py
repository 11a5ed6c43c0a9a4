"""Layouts: maps between our parameters and those of published checkpoints, by library and architecture."""

from collections.abc import Mapping
from typing import Any

from leanformer.config.common import listed_per_layer
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

    `arguments` are those of the model, with the `name` of its architecture. Raises ConfigError if the library has no
    such model.
    """
    name = arguments["name"]
    if name not in PUBLISHED[source]:
        available = ", ".join(key for key, layouts in PUBLISHED.items() if name in layouts) or "none"
        raise ConfigError(f'No layout between "{source}" and the architecture {name}. Available: {available}.')
    if active := [key for key in INTERVENTIONS if arguments.get(key)]:
        raise ConfigError(
            f'model.{active[0]}={arguments[active[0]]}: the layout "{source}" has no such option, so its model would '
            "compute something else with these weights. Leave the option out, or use our own layout."
        )
    if uneven := listed_per_layer(arguments):
        key, sizes = next(iter(uneven.items()))
        raise ConfigError(
            f'model.{key}={sizes}: models of the layout "{source}" have one number for all layers. Set one number, or '
            "use our own layout."
        )
    return PUBLISHED[source][name](**arguments)
