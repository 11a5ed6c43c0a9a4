"""Training-step utilisation of every architecture at full size: the share of peak matmul throughput (CPU, float32).

    python benchmarks/zoo.py [--batch=2] [--rounds=7] [--all] [--only=NAME,...] [--json]

The configs are the lean ones of Leaner Transformers' Table 4, with --all also the originals. Each step alternates with
ViT's and with matmuls, so that all see the same load on the machine; the fastest round counts. On a busy machine CPU
seconds, those of all threads of this process, are more reliable than wall seconds. For a GPU: benchmarks/gpu.py.
"""

import argparse

import timing


VIT = "vit_b_7x16"
LEAN = (VIT, "xcit_m_12x16", "tnt_b_8x16", "volo_d3_lean", "davit_b_lean")
ORIGINAL = ("vit_b_12x12", "xcit_m_24x8", "tnt_b_12x10", "volo_d3_original", "davit_b_original")


def measure(name: str, vit: timing.TimedStep, throughput: timing.MatmulThroughput, batch: int, rounds: int) -> dict:
    """Return the row of a config."""
    step = vit if name == VIT else timing.TimedStep(name, batch)
    for i in range(rounds + 1):
        throughput.measure()
        vit.train()
        if step is not vit:
            step.train()
        if not i:  # warm-up
            vit.fastest, step.fastest = timing.MinTime(), timing.MinTime()
    rate, cpu_rate = throughput.peak()
    (share, cpu_share), vit_shares = step.utilisation(rate, cpu_rate), vit.utilisation(rate, cpu_rate)
    return {
        "config": name,
        "GFLOP": round(step.flops / 1e9, 1),
        "step s": round(step.fastest.wall, 3),
        "CPU s": round(step.fastest.cpu, 3),
        "rate GFLOP/s": round(rate / 1e9, 1),
        "share": round(share, 3),
        "to ViT's": round(share / vit_shares[0], 2),
        "CPU share": round(cpu_share, 3),
        "CPU, to ViT's": round(cpu_share / vit_shares[1], 2),
        "compile s": round(step.compilation.wall, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--all", action="store_true", help="also the original models")
    parser.add_argument("--only", help="config names, separated by commas")
    parser.add_argument("--json", action="store_true")
    f = parser.parse_args()
    names = f.only.split(",") if f.only else [*LEAN, *(ORIGINAL if f.all else ())]
    vit, throughput = timing.TimedStep(VIT, f.batch), timing.MatmulThroughput()
    timing.show([measure(name, vit, throughput, f.batch, f.rounds) for name in names], as_json=f.json)


if __name__ == "__main__":
    main()
