"""Does my shape want more heads, or wider ones? `python -m leanformer.regime --tokens=197 --width=768 --heads=12
--head_dim=64 [--value_dim=64] [--out=DIR]`

Compares a shape of attention with rivals of the same parameters, cut into more or fewer heads: what each learns of
three tasks on which one theory each must show (rank of heads, number of heads, width of all together), trained here at
reduced size; and, at full size before any training, the conditioning of attention with its entropy, and Neural
Spectral Capacity. Minutes on a CPU. The table says what was measured, the sentences what it supports; with --out also
regime.json and regime.png, and the same command goes on where it was stopped.
"""

import functools
import time
from pathlib import Path

import numpy as np

from experiments import regime_poles as regime
from experiments import regime_report as reports
from experiments.regime_poles import POLES, Kept, Shape, Trained
from leanformer import cli
from leanformer.errors import ConfigError
from leanformer.runtime import files


@cli.command(
    cli.Flag("tokens", "Tokens of a sequence.", int, required=True),
    cli.Flag("width", "Channels of a token.", int, required=True),
    cli.Flag("heads", "Heads of attention.", int, required=True),
    cli.Flag("head_dim", "Channels of queries and keys of a head: its rank.", int, required=True),
    cli.Flag("value_dim", "Channels of values of a head; head_dim if not given.", int),
    cli.Flag("steps", "Of training, on each task.", int, default=1000),
    cli.Flag("seeds", "Trained of each shape on each task.", int, default=3),
    cli.Flag("out", "Folder for regime.json and regime.png.", writes=True),
)
def main(f: cli.Values) -> None:
    shape = Shape(f.heads, f.head_dim, f.head_dim if f.value_dim is None else f.value_dim)
    regime.check(shape, f.tokens, f.width, f.seeds, f.steps)
    ratio = regime.WIDTH / f.width
    shapes = regime.rivals(shape, ratio)
    asked = shapes.index(shape)
    if len(shapes) == 1:
        raise ConfigError(
            f"{shape} has no rival: no other cut of it has its parameters, at --width={f.width} and at {regime.WIDTH} "
            "channels too, which are trained. Take other --heads, --head_dim or --width."
        )
    if others := [each for each in regime.rivals(shape) if each not in shapes]:
        said = ", ".join(f"{each} as {each.scaled(ratio)}" for each in others)
        print(f"Left out, since at {regime.WIDTH} channels they are not of {shape.scaled(ratio)}'s parameters: {said}.")
    print(f"Shapes of the same parameters: {', '.join(map(str, shapes))}, at {f.tokens} tokens of {f.width} channels.")
    print(
        f"Trained at {regime.WIDTH} channels, as many heads, their widths times {ratio:.3g} and 1 at least: "
        f"{', '.join(f'{each} as {each.scaled(ratio)}' for each in shapes)}; {f.steps} steps of 128 examples, "
        f"{f.seeds} seeds.",
        flush=True,
    )
    out = None if f.out is None else Path(f.out).expanduser()
    settings = {name: getattr(f, name) for name in ("width", "steps", "seeds")} | {"asked": str(shape)}
    kept = Kept(None if out is None else out / "trained.json", settings)
    start = [regime.at_start(each, f.tokens, f.width, f.seeds) for each in shapes]
    trained, clock = [], time.monotonic()
    for pole in POLES:
        rows = []
        for each in shapes:
            train = functools.partial(regime.trained, pole, each, shape, f.width, total=f.steps, seeds=f.seeds)
            rows.append(kept.errors(pole, each, train))
            middle = np.exp(np.log(rows[-1]).mean())
            print(f"  {pole}, {each}: {middle:.3g} ({time.monotonic() - clock:.0f} s)", flush=True)
        trained.append(Trained(pole, shapes, np.stack(rows)))
    print()
    print(reports.table(shapes, trained, start))
    print()
    print(reports.sentences(shapes, asked, trained, start))
    if out is not None:
        settings["tokens"] = f.tokens
        files.write_json(out / "regime.json", reports.as_numbers(shapes, trained, start, settings))
        reports.draw(shapes, asked, trained, start).savefig(out / "regime.png")


if __name__ == "__main__":
    cli.run(main)
