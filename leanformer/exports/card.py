"""Model card of a folder, `README.md`: a description of the model, and the lines that load it from inside the folder.

The lines are tested as they stand.
"""

from collections.abc import Mapping
from typing import Any

from leanformer.exports.description import Description


PIPELINES = {
    "image-classification": 'classify = pipeline("image-classification", model=folder)  # classify("image.jpg")',
    "text-generation": 'generate = pipeline("text-generation", model=folder)  # generate("It is")',
    "fill-mask": 'fill = pipeline("fill-mask", model=folder)  # fill("It is a [MASK].")',
    "text-classification": 'classify = pipeline("text-classification", model=folder)  # classify("It is good.")',
    "feature-extraction": 'embed = pipeline("feature-extraction", model=folder)  # embed("It is a text.")',
}
LEAN = """
class Lean(Attention):  # heads of dimension {head_dim}; timm's own are width / num_heads
    def __init__(self, dim, num_heads=8, **options):
        super().__init__(dim, num_heads, attn_head_dim={head_dim}, **options)

"""
SIZES = ("width", "depth", "num_heads", "head_dim", "mlp_dim")


def loading(description: Description, *, prepared: bool = True) -> str:
    """Return the Python lines that load the folder in which they run.

    Args:
        description: model in the other library.
        prepared: True if the folder has a tokenizer or the preprocessing of images.
    """
    if description.library == "timm":
        lean = description.head_dim is not None
        lines = ["import timm"] + (["from timm.layers import Attention"] if lean else [])
        head = LEAN.format(head_dim=description.head_dim) if lean else ""
        options = ", attn_layer=Lean" if lean else ""
        lines += [head, 'folder = "."  # this folder']
        lines += [f'model = timm.create_model(f"local-dir:{{folder}}", pretrained=True{options}).eval()']
        return "\n".join(line for line in lines if line)
    auto, use = description.auto, PIPELINES.get(description.pipeline or "") if prepared else None
    lines = [f"from transformers import {auto}" + (", pipeline" if use else ""), "", 'folder = "."  # this folder']
    return "\n".join([*lines, f"model = {auto}.from_pretrained(folder)", *([use] if use else [])])


def text(description: Description, model: Mapping[str, Any], facts: Mapping[str, Any], *, prepared: bool) -> str:
    """Return the model card.

    Args:
        description: model in the other library.
        model: section config.model.
        facts: further rows of the table, such as data and score.
        prepared: as in `loading`.
    """
    meta = [f"library_name: {description.library}", "tags: [leanformer]"]
    task = description.pipeline or ("image-classification" if description.library == "timm" else None)
    meta += [f"pipeline_tag: {task}"] if task else []
    rows = {"architecture": f"{model['name']}, in {description.library} `{description.architecture}`"}
    rows |= (
        {"images": "RGB; the model was trained on grey images, and weighs the channels to grey"}
        if description.grey
        else {}
    )
    rows |= {f"`{key}`": model[key] for key in SIZES} | facts
    needs = f" It needs {description.library} {description.needs} or newer." if description.needs else ""
    return "\n".join(
        [
            *("---", *meta, "---", "", "# Model card", ""),
            "Weights in float32, written by leanformer.",
            *("", "| | |", "|---|---|"),
            *(f"| {key} | {_cell(value)} |" for key, value in rows.items()),
            *(
                "",
                f"Run inside this folder.{needs}",
                "",
                "```python",
                loading(description, prepared=prepared),
                "```",
                "",
            ),
        ]
    )


def _cell(value: Any) -> str:
    return (f"{value:.4g}" if isinstance(value, float) else str(value)).replace("|", "\\|").replace("\n", " ")
