"""Figures on speed and robustness: records of measurements that only the same machine repeats."""

from collections.abc import Mapping
from typing import Any

from experiments import tables
from experiments.figures.passages import RESULTS, Passage


def records() -> Mapping[str, Any]:
    """Return the values of the table by subject and case."""
    result: dict[str, dict[str, Any]] = {}
    for row in tables.read("engineering"):
        result.setdefault(row["what"].replace(" ", "_"), {})[row["case"]] = float(row["value"])
    images = result["images"]
    cached = [images[f"from the cache {n}"] / images[f"per core {n}"] for n in (1, 2)]
    return result | {"cached": sum(cached) / 2}


PASSAGES = [
    Passage(
        records,
        {
            RESULTS: [
                "{step[vit_b_7x16 least]:.1f} to {step[vit_b_7x16 most]:.0f} % in three runs",
                "{singular_values[relative to NumPy]:.2f}, {singular_values[relative to PyTorch]:.2f} |",
                "{images[relative to Pillow 1]:.2f} and {images[relative to Pillow 2]:.2f}; "
                "{images[from the cache 1]:.0f} and {images[from the cache 2]:.0f} images/s per core from a cache with "
                "short side 288, {cached:.1f} times",
                "{Nyström[1024 tokens]:.2f}, {Nyström[2048 tokens]:.2f}, {Nyström[4096 tokens]:.2f}, "
                "{Nyström[8192 tokens]:.2f} |",
                "{Pathfinder[contour 14]:,.0f}, {Pathfinder[relative to a plain sampler]:.0f} times a plain sampler",
                "{timm[TNT-B lean batch 2]:.2f}, {timm[DaViT-B lean batch 2]:.2f}, {timm[VOLO-d3 lean batch 2]:.2f}; "
                "{timm[TNT-B lean batch 8]:.2f}, {timm[DaViT-B lean batch 8]:.2f}, {timm[VOLO-d3 lean batch 8]:.2f} |",
                "{kills[SIGTERM]:.0f} random kills of each of",
            ],
        },
    ),
]
