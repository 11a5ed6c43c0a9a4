"""Does conditioning carry the effect of heads on accuracy? Levers that move it, heads left alone, at equal entropy.

    python -m experiments.mediation --out=DIR [--seeds=5] [--steps=250] [--rates=1e-3,3e-3,9e-3] [--essential]

Arms are {few, many heads} x levers of a small ViT on bundled Fashion-MNIST (28 x 28 in patches of 7, 17 tokens), drawn
by the ordinary pipeline. All seeds and rates of an arm are one program (`training.together`). The rate of a seed is the
one at which the *other* seeds of that arm score best; beside the verdict stands that with one rate for all of them. A
lever that changes entropy has an arm without it whose logits are scaled to the same entropy at initialisation; training
moves both. An orthogonal start is the negative control, an MLP with the parameters of the added heads another. The rule
of the verdict: `leanformer.analysis.mediation.RULE`.

Finished arms are kept in DIR, so the same command goes on where it stopped; other settings want another DIR. Writes
mediation.json, mediation.md and mediation.png.
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import mediation_report as reports
from experiments import mediation_verdict as mediation
from experiments.mediation_verdict import MLP, Key
from leanformer import config
from leanformer.costs import count
from leanformer.runtime.mesh import make_mesh
from leanformer.training import experiment, report, schedules, step, streams, together


HEADS = {"few": 2, "many": 8}
SHAPE = {"width": 32, "depth": 2, "head_dim": 16, "mlp_dim": 64}
BATCH, PROBED, EXAMPLES = 32, 64, 10_000
LEVERS: dict[str, dict[str, Any]] = {
    "base": {},
    "qk_norm": {"qk_norm": "rmsnorm"},
    "lambda": {"spectral": 1.0},
    "svd": {"qkv_init": "spectral"},
    "sigma": {"sigma_reparam": True},
    "graying": {"graying": 0.5, "graying_by": "svd"},
    "orthogonal": {"qkv_init": "orthogonal"},
}
MATCHED = {name: f"as {name}" for name in ("qk_norm", "lambda", "svd")}  # arms of equal entropy, by a logit scale
TESTED = MATCHED | {"sigma": "base", "graying": "base"}
MEASURES = ("attention_output", "tokens", "relative_attention_entropy", "self_weight", "largest_logit")
ESSENTIAL: tuple[Key, ...] = (("base", "few"), ("base", "many"), ("orthogonal", "few"), MLP)
ESSENTIAL += tuple((arm, "few") for name, other in MATCHED.items() for arm in (name, other))
ESSENTIAL += (("sigma", "few"), ("graying", "few"))
ARMS: tuple[Key, ...] = ESSENTIAL + tuple((name, "many") for name in LEVERS if name != "base")


def mlp_instead() -> int:
    """The hidden width at which few heads have the parameters of many."""
    heads = HEADS["many"] - HEADS["few"]
    added = heads * SHAPE["head_dim"] * (4 * SHAPE["width"] + 3)  # query, key, value with biases, out
    return SHAPE["mlp_dim"] + round(added / (2 * SHAPE["width"] + 1))


def settings(lever: str, heads: str, scale: float | None = None) -> config.ConfigDict:
    """The config of an arm, its seed and rate not set; `scale` of the logits in units of 1/√H."""
    c = config.load("quickstart").unlock()
    c.update(batch_size=BATCH, total_epochs=0.0, total_steps=300)
    c.model.update(**SHAPE, num_heads=HEADS[heads])
    c.model.update(LEVERS.get(lever, {}))
    if lever == "mlp":
        c.model.mlp_dim = mlp_instead()
    if scale is not None:
        c.model.logit_scale = float(scale / math.sqrt(SHAPE["head_dim"]))
    c.optim.update(warmup_epochs=0.0, warmup_steps=30)
    c.probe.update(examples=PROBED, measures=MEASURES)
    c.eval.batch_size = 500
    return c


def built(c: config.ConfigDict) -> experiment.Experiment:
    config.check(c)
    return experiment.build(c, examples=EXAMPLES, mesh=make_mesh(devices=jax.devices()[:1]))


def parameters(lever: str, heads: str) -> int:
    return count.parameters(built(settings(lever, heads)).like.params)


def member(run: experiment.Experiment, seed: int, rate: float) -> experiment.Experiment:
    c = run.config.copy_and_resolve_references().unlock()
    c.seed, c.optim.lr = seed, rate
    _, schedule = schedules.make(c.optim, batch_size=c.batch_size, examples=run.examples, total=run.total)
    return dataclasses.replace(run, config=c, schedule=schedule)


class Data:
    """What all arms are trained, evaluated and probed on, read once."""

    def __init__(self, seeds: Sequence[int], steps: int):
        run, self.seeds = built(settings("base", "few")), seeds
        source, held_out = (run.task.open(split) for split in ("train", "t10k"))
        self.names, self.batches = tuple(run.abstract_batch()), {}
        for seed in seeds:
            drawn = streams.train_batches(member(run, seed, 1e-3), source)
            self.batches[seed] = [{name: drawn[i][name] for name in self.names} for i in range(steps)]
        self.evaluated, self.probed = list(streams.evaluation(run, held_out)), streams.probe(run, held_out)


def first_states(run: experiment.Experiment, seeds: Sequence[int]) -> Any:
    """Stacked, as `initial_state` makes them one by one, each compiled anew."""
    made = jax.vmap(lambda key: run.make_state(run.make_weights(key)))
    return jax.jit(made)(jax.numpy.stack([jax.random.key(seed) for seed in seeds]))


def look(probe_step: Callable[..., Any], weights: Any, batch: Any) -> dict[str, float]:
    """Of one model: means over layers of medians over images, or over images and heads; of κ the log10."""
    found, said = jax.device_get(probe_step(weights, batch)), {}
    for name, value in found.items():
        if hasattr(value, "condition_number"):
            said[f"{name}.log10_condition"] = float(np.median(value.log10_condition, axis=1).mean())
            said[f"{name}.stable_rank"] = float(np.median(value.stable_rank, axis=1).mean())
        else:
            layers = value.value.reshape(len(value.value), -1)
            said[name] = float(layers.max() if name == "largest_logit" else layers.mean())
    return said


def matching_scale(entropy: float, heads: str, data: Data) -> float:
    """In units of 1/√H, at which base has this entropy at initialisation, mean over seeds; by bisection."""
    c = settings("base", heads)
    c.model.temperature = True
    run = built(c)
    probe_step, states = jax.jit(run.probe_step), first_states(run, data.seeds)
    weights = [together.of(i, states).weights for i in range(len(data.seeds))]

    def at(scale: float) -> float:
        found = []
        for params, statistics_ in weights:
            own = params["blocks"]["layers"]["attention"]["temperature"]
            params["blocks"]["layers"]["attention"]["temperature"] = np.full_like(own, scale)
            found.append(look(probe_step, (params, statistics_), data.probed)["relative_attention_entropy"])
        return float(np.mean(found))

    low, high = 1e-2, 1e4
    for _ in range(14):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if at(middle) > entropy else (low, middle)
    return math.sqrt(low * high)


def train(c: config.ConfigDict, rates: Sequence[float], data: Data) -> dict[str, Any]:
    """All seeds and rates of an arm as one program: what came out, a run each."""
    began, first = time.perf_counter(), built(c)
    runs = [member(first, seed, rate) for rate in rates for seed in data.seeds]
    states = first_states(first, [run.config.seed for run in runs])
    keys = together.stacked(run.run_key() for run in runs)
    probe_step, eval_step = jax.jit(first.probe_step), jax.jit(first.eval_step)
    starts = [look(probe_step, together.of(i, states).weights, data.probed) for i in range(len(data.seeds))]
    update = jax.jit(together.make_step(runs), donate_argnums=0)
    for number in range(first.total):
        hosts = [data.batches[run.config.seed][number] for run in runs]
        states, metrics = update(states, together.batch(hosts, data.names), keys)
    shown, found = jax.device_get(metrics), []
    for i, run in enumerate(runs):
        weights = together.of(i, states).weights
        values = step.evaluate(eval_step, run.task.metrics, {"": weights}, data.evaluated)
        said = {"seed": run.config.seed, "rate": run.config.optim.lr, "top1": values["top1"], "loss": values["loss"]}
        said |= {"train_loss": float(shown["loss"][i]), "skipped": int(shown["skipped"][i])}
        found.append(said | {"before": starts[i % len(starts)], "after": look(probe_step, weights, data.probed)})
    about = {"parameters": count.parameters(first.like.params), "logit_scale": c.model.logit_scale}
    seconds = round(time.perf_counter() - began, 1)
    return {"model": c.model.to_dict(), **about, "seconds": seconds, "runs": found}


def file_of(out: Path, arm: Key) -> Path:
    return out / "arms" / f"{'_'.join(arm)}.json".replace(" ", "_")


def run_arms(
    out: Path, arms: Sequence[Key], rates: Sequence[float], data: Data, steps: int, only: Sequence[str]
) -> dict[str, Any]:
    """The arms, from its file where it is finished. Raises SystemExit where that is of other settings."""
    about = {"rates": list(rates), "seeds": list(data.seeds), "steps": steps}
    (out / "arms").mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for lever, heads in arms:
        name, path = f"{lever}, {heads}", file_of(out, (lever, heads))
        if only and path.stem not in only and not path.is_file():
            continue
        if not path.is_file():
            scale = None
            if lever.startswith("as "):
                wanted = [run["before"]["relative_attention_entropy"] for run in found[f"{lever[3:]}, {heads}"]["runs"]]
                scale = matching_scale(float(np.mean(wanted)), heads, data)
            c = settings(lever, heads, scale)
            c.total_steps = steps
            report.write_json(path, {**about, **train(c, rates, data)})
        found[name] = json.loads(path.read_text())
        if any(found[name][key] != value for key, value in about.items()):
            raise SystemExit(f"{path} holds an arm of other settings. Take another --out.")
        scores = mediation.arm(found[name]).score
        print(f"{name:<22} top-1 {reports.spread(scores)}, {found[name]['seconds']:.0f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--rates", default="1e-3,3e-3,9e-3")
    parser.add_argument("--only", default="", help="arms such as base_few, to share the work out; without a verdict")
    parser.add_argument("--essential", action="store_true", help="of many heads under a lever only what DIR has")
    f = parser.parse_args()
    rates, only = [float(rate) for rate in f.rates.split(",")], [name for name in f.only.split(",") if name]
    data = Data(range(f.seeds), f.steps)
    wanted = [arm for arm in ARMS if not f.essential or arm in ESSENTIAL or file_of(f.out, arm).is_file()]
    arms = run_arms(f.out, wanted, rates, data, f.steps, only)
    if only:
        return
    found = mediation.judge(arms, TESTED)
    other = mediation.judge(arms, TESTED, mediation.at_one_rate)
    heads = mediation.shown(other.effects["heads, score"])
    text = reports.table(arms, found, MEASURES[2:])
    text += f"\n\nWith one rate for all seeds of an arm, the best, heads change the score by {heads}. {other.sentence}"
    verdicts = {"verdict": reports.as_numbers(found), "at_one_rate": reports.as_numbers(other)}
    report.write_json(f.out / "mediation.json", {**verdicts, "arms": arms, **report.provenance()})
    (f.out / "mediation.md").write_text(text + "\n")
    reports.chart(arms, found, HEADS).savefig(f.out / "mediation.png")
    print(text)


if __name__ == "__main__":
    main()
