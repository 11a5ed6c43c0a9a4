"""Training steps of every architecture at full size, as shares of the machine's matrix-product rate: CPU, float32.

    python benchmarks/zoo.py [--batch=2] [--rounds=7] [--all] [--only=NAME,...] [--json]

The lean configs of Leaner Transformers' Table 4, with --all the originals too. Each step is timed in turn with ViT's
and with matrix products, so that all see the same machine; the least of the rounds counts. On a busy machine CPU
seconds, those of all threads of this process, say more than wall seconds. For a GPU: benchmarks/gpu.py.
"""

import argparse

import timing


VIT = "vit_b_7x16"
LEAN = (VIT, "xcit_m_12x16", "tnt_b_8x16", "volo_d3_lean", "davit_b_lean")
ORIGINAL = ("vit_b_12x12", "xcit_m_24x8", "tnt_b_12x10", "volo_d3_original", "davit_b_original")


def measure(name: str, vit: timing.Member, rates: timing.Rate, batch: int, rounds: int) -> dict:
    """Return the row of a config."""
    member = vit if name == VIT else timing.Member(name, batch)
    for turn in range(rounds + 1):
        rates.measure()
        vit.train()
        if member is not vit:
            member.train()
        if not turn:  # warm-up
            vit.least, member.least = timing.Least(), timing.Least()
    rate, cpu_rate = rates.found()
    (share, cpu_share), beside = member.shares(rate, cpu_rate), vit.shares(rate, cpu_rate)
    return {
        "config": name,
        "GFLOP": round(member.flops / 1e9, 1),
        "step s": round(member.least.wall, 3),
        "CPU s": round(member.least.cpu, 3),
        "rate GFLOP/s": round(rate / 1e9, 1),
        "share": round(share, 3),
        "to ViT's": round(share / beside[0], 2),
        "CPU share": round(cpu_share, 3),
        "CPU, to ViT's": round(cpu_share / beside[1], 2),
        "compile s": round(member.compilation.wall, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--all", action="store_true", help="the originals too")
    parser.add_argument("--only", help="names of configs, by commas")
    parser.add_argument("--json", action="store_true")
    f = parser.parse_args()
    names = f.only.split(",") if f.only else [*LEAN, *(ORIGINAL if f.all else ())]
    vit, rates = timing.Member(VIT, f.batch), timing.Rate()
    timing.show([measure(name, vit, rates, f.batch, f.rounds) for name in names], as_json=f.json)


if __name__ == "__main__":
    main()
