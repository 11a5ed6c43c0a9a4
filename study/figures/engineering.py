"""Figures on speed on a GPU: records of measurements that only the same machine repeats."""

from collections.abc import Mapping
from typing import Any

from study import tables
from study.figures.passages import GPUS, Passage


def on_gpu() -> Mapping[str, Any]:
    """Return what was measured on an H200, by case, and ranges and ratios of it."""
    values = {row["case"]: float(row["value"]) for row in tables.read("engineering") if row["what"] == "H200"}
    ours, gpt = values["vit_b_7x16 beside PyTorch"], values["gpt2_tinystories_4x16 beside PyTorch"]
    errors = {
        f"{backend} {dtype}": sorted(
            x for case, x in values.items() if case.startswith("attention") and case.endswith(f"{dtype} {backend}")
        )
        for dtype, backend in (("bfloat16", "cudnn"), ("bfloat16", "xla"), ("float32", "xla"))
    }
    matmuls = sorted(x for case, x in values.items() if case.startswith("matmul"))
    return {
        "values": values,
        "errors": errors,
        "matmuls": matmuls,
        "ours": round(ours, -2),
        "eager": ours / values["vit_b_7x16 PyTorch eager"],
        "compiled": ours / values["vit_b_7x16 PyTorch compiled"],
        "gpt_eager": gpt / values["gpt2_tinystories_4x16 PyTorch eager"],
        "gpt_compiled": gpt / values["gpt2_tinystories_4x16 PyTorch compiled"],
        "lean": values["vit_b_7x16"] / values["vit_b_12x12"],
        "loop": 100 * (1 - values["vit_b_7x16 with loop"] / values["vit_b_7x16"]),
        "loop_memory": values["vit_b_7x16 with loop memory"] - values["vit_b_7x16 memory"],
        "mfu": {name: 100 * values[f"{name} MFU"] for name in values if f"{name} MFU" in values},
        "tokens": {n: round(values[f"gpt2_tinystories_{n} tokens"], -3) for n in ("4x16", "12x12")},
        "watch": {n: f"{values[f'watch of {n} against CPU']:.1e}".replace("e-0", "e-") for n in ("GPT-2", "ViT-S")},
        "loss": f"{max(x for case, x in values.items() if case.startswith('loss')):.1e}".replace("e-0", "e-"),
        "float32": f"{errors['xla float32'][-1]:.1e}".replace("e-0", "e-"),
    }


PASSAGES = [
    Passage(
        on_gpu,
        {
            GPUS: [
                *(
                    f"{{values[{name}]:,.0f}} images | {{mfu[{name}]:.0f}} % | {{values[{name} memory]:.2f}} | "
                    f"{{values[{name} compilation]:.0f}} |"
                    for name in ("vit_b_7x16", "vit_b_7x16 with loop", "vit_b_12x12")
                ),
                *(
                    f"{{tokens[{name}]:,.0f}} tokens | {{mfu[gpt2_tinystories_{name}]:.0f}} % | "
                    f"{{values[gpt2_tinystories_{name} memory]:.2f}} | "
                    f"{{values[gpt2_tinystories_{name} compilation]:.0f}} |"
                    for name in ("4x16", "12x12")
                ),
                "reach {matmuls[0]:.0f} to {matmuls[3]:.0f} TFLOP/s",
                "{values[vit_b_7x16 PyTorch eager]:,.0f} | {values[vit_b_7x16 PyTorch compiled]:,.0f} | "
                "{values[vit_b_7x16 beside PyTorch]:,.0f}: {eager:.2f} and {compiled:.2f} times",
                "{values[gpt2_tinystories_4x16 PyTorch eager]:,.0f} | "
                "{values[gpt2_tinystories_4x16 PyTorch compiled]:,.0f} | "
                "{values[gpt2_tinystories_4x16 beside PyTorch]:,.0f}: {gpt_eager:.2f} and {gpt_compiled:.2f} times",
                "by at most {watch[GPT-2]} (GPT-2) and {watch[ViT-S]} (ViT-S)",
                "took {values[first record of the fastest of eight runs]:.0f} to "
                "{values[first record of the slowest of eight runs]:.0f} s until the first training loss",
                "took {values[first record of the fastest of six runs without tuning]:.0f} to "
                "{values[first record of the slowest of six runs without tuning]:.0f} s",
                "is {lean:.2f} times as fast",
                "| {errors[cudnn bfloat16][0]:.4f} to {errors[cudnn bfloat16][5]:.4f} with cuDNN "
                "and {errors[xla bfloat16][0]:.4f} to {errors[xla bfloat16][5]:.4f} with XLA in bfloat16; at most "
                "{float32}",
                "by at most {loss} of the loss",
            ],
        },
    ),
]
