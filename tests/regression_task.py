"""Example of a user-defined task: regression of vectors on endless data, scored by error, with a rank correlation."""

import jax.numpy as jnp
import numpy as np
import scipy.stats

from leanformer import tasks
from leanformer.tasks import Score


OUTPUTS = 5


class Points:
    """Endless examples: a grid of noise and linear functions of it. Example i is seeded by i, so runs agree."""

    def __init__(self, split):
        self.split = split
        self._maps = np.random.default_rng(0).normal(size=(OUTPUTS, 14 * 14)) / 14

    def __getitem__(self, index):
        grid = np.random.default_rng((len(self.split), index)).normal(size=(14, 14, 1))
        return {"grid": grid, "values": self._maps @ grid.reshape(-1)}

    def name(self, index):
        return f"{self.split} point {index}"


class FinitePoints(Points):
    """A split with 37 examples."""

    def __len__(self):
        return 37


class RegressionData(tasks.DataModule):
    def open(self, split, classes=None):
        return Points(split) if split == "train" else FinitePoints(split)

    def make_prepare(self, source, *, train):
        return self._arrays

    def _arrays(self, index, example, draws):
        return {name: np.asarray(array, np.float32) for name, array in example.items()}

    def input_specs(self):
        return {"grid": ((14, 14, 1), np.float32)}

    def target_specs(self, *, train):
        return {"values": ((OUTPUTS,), np.float32)}

    def prepare(self, example):
        return self._arrays(0, example, None)

    def notes(self):
        return {"targets": f"{OUTPUTS} numbers"}


class Regression(tasks.Objective):
    score = Score("error", higher=False)
    divergence_loss = 1e6

    def inputs(self, batch):
        return (batch["grid"],)

    def loss(self, model, part, batch_aux, key):
        result, _ = model(*self.inputs(part), key=key)
        return jnp.square(result.astype(jnp.float32) - part["values"]).sum()

    def statistics(self, model, batch, *, detail=False):
        result, _ = model(*self.inputs(batch))
        errors = jnp.square(result.astype(jnp.float32) - batch["values"])
        errors = jnp.where(batch["mask"][:, None], errors, 0).sum(axis=0)
        first_output = {"predictions": result[:, 0].astype(jnp.float32), "labels": batch["values"][:, 0]}
        return {"errors": errors, "examples": jnp.sum(batch["mask"]), "per_example": first_output}

    def metrics(self, totals):
        by_output = totals["errors"] / totals["examples"]
        ranks = scipy.stats.spearmanr(totals["per_example"]["predictions"], totals["per_example"]["labels"]).statistic
        return {"error": float(by_output.sum()), "by_output": by_output.tolist(), "rank_correlation": float(ranks)}


tasks.KINDS["regression"] = lambda c: tasks.Task(RegressionData(), Regression())
