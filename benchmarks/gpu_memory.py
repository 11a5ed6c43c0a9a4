"""Memory of every row of Tables 4 and 5 on GPUs that need not be here, beside the paper's:

    python benchmarks/gpu_memory.py --devices=h100,a100 --out=DIR [--batch=128] [--rows=ViT-B,DeiT-B]

The training step of each config is compiled for one device (the extra `gpu-compile`); 30 to 200 s each on two cores.
Each row is written to DIR when it is done and is not compiled again, so the command may be cut off and repeated. The
print is of all eight devices and presumably of float32 PyTorch; ratios of lean to original are what can be compared.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax

from experiments import paper_tables as audit
from experiments.paper import ROWS, Row
from leanformer.runtime import files
from leanformer.training import compiled


def examine(row: Row, device: str, batch: int, path: Path) -> dict[str, Any]:
    """The figures of a row, from DIR if they are there."""
    if path.is_file():
        return json.loads(path.read_text())
    c = audit.load(row.config)
    c.unlock()
    c.update(batch_size=batch)
    c.probe.every = 0
    c.mesh.update(data=1, fsdp=1, tensor=1)
    began = time.perf_counter()
    found = compiled.figures(c, device) | {"seconds": round(time.perf_counter() - began, 1), "config": row.config}
    files.write_json(path, found)
    return found


def table(device: str, found: dict[str, dict[str, Any]]) -> str:
    """Originals beside their lean models, as far as both are there."""
    lines = [
        f"| on {device} | attention | original GB | lean GB | lean : original | printed | launches, original | lean |",
        "|---|---|---|---|---|---|---|---|",
    ]
    models = dict.fromkeys(row.model for row in ROWS if row.memory_gb)
    for model in models:
        both = [row for row in ROWS if row.model == model and row.memory_gb]
        original, lean = (next(row for row in both if row.variant == kind) for kind in ("original", "lean"))
        if not {original.config, lean.config} <= found.keys():
            continue
        figures = [found[row.config] for row in (original, lean)]
        peaks = [f["bytes_a_device"]["all"] / 1e9 for f in figures]
        cells = [model, figures[1]["attention"], *(f"{peak:.2f}" for peak in peaks), f"{peaks[1] / peaks[0]:.3f}"]
        cells += [f"{lean.memory_gb / original.memory_gb:.3f}", *(f"{f['launches']:,}" for f in figures)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="h100,a100")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=128, help="examples on a device")
    parser.add_argument("--rows", help="models as the paper calls them, comma between; all if not given")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = args.rows.split(",") if args.rows else [row.model for row in ROWS]
    for device in args.devices.split(","):
        found = {}
        for row in ROWS:
            path = args.out / f"{device}_{row.config}_{args.batch}.json"
            if row.memory_gb and (row.model in wanted or path.is_file()):
                found[row.config] = examine(row, device, args.batch, path)
                peak = found[row.config]["bytes_a_device"]["all"] / 1e9
                print(f"{device} {row.config}: {peak:.2f} GB, {found[row.config]['seconds']} s", flush=True)
        print(f"\nBatch {args.batch} on one device, by jax {jax.__version__}\n\n{table(device, found)}\n", flush=True)


if __name__ == "__main__":
    main()
