"""What a training step sends between devices: collectives and products read from the partitioned program's text.

The text is XLA's, right after its SPMD partitioner: one device's program with the model's own types. What a backend
does later (merging collectives, running them beside products, float32 for bfloat16 on CPUs) is not in it.
"""

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from leanformer.costs import hlo


# Bytes that a ring of n devices moves through each of them, as a multiple of the result's bytes.
RING = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
# The program is never run: machine code is made with as little work as possible.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
AFTER = "spmd-partitioning"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a device's program."""

    kind: str  # a key of RING
    group: tuple[int, ...]  # one of the groups that it runs in: positions of devices on the mesh
    axes: tuple[str, ...]  # of the mesh, that the group extends over
    size: int  # bytes of the result on a device
    times: int  # a step
    sliced: bool  # an all-reduce of which each device keeps a slice: a reduce-scatter where the backend makes one

    def moved(self, *, scatter: bool = False) -> float:
        """Bytes through a device in a step; with `scatter`, sliced all-reduces are taken as reduce-scatters."""
        halved = scatter and self.sliced
        return self.times * self.size * RING[self.kind](len(self.group)) / (2 if halved else 1)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of the program, such as the scan over layers, or what is outside of all loops (1 turn)."""

    name: str  # "forward" or "backward" through layers, another "loop", or "outside"
    turns: int  # a step
    flops: int  # of the products in one turn on a device
    collectives: tuple[Collective, ...]  # `times` counts whole steps


def compile_and_read(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """The compiled program, for its memory, and the text of a device's part. Compile on CPU devices.

    Raises:
        NotImplementedError: this XLA leaves no such text.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": f"^{AFTER}$"}
        with uncached():
            compiled = lowered.compile(wanted | QUICK)
        found = list(Path(folder).glob(f"*after_{AFTER}*.txt"))
        if not found and len(jax.tree.leaves(compiled.input_shardings)[0].device_set) == 1:
            found = list(Path(folder).glob("*before_optimizations.txt"))  # nothing to partition
        if len(found) != 1:
            raise NotImplementedError(f"This XLA ({jax.__version__=}) writes no program after {AFTER}.")
        return compiled, found[0].read_text()


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Compiles for real. What is dumped is no part of the key of JAX's persistent cache, and a program that comes from
    there leaves no text; one for devices that are not here cannot be read back. Whether there is a cache JAX decides
    once a process, hence the resets."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def read(text: str, mesh: Mapping[str, int]) -> list[Loop]:
    """The loops of a partitioned program that hold collectives or products, and what is outside of them.

    Args:
        text: from `compile_and_read`.
        mesh: sizes by axis; devices are numbered with the last axis fastest.

    Raises:
        NotImplementedError: such a loop has an unknown number of turns.
    """
    return _Reader(text, mesh).loops()


class _Reader:
    def __init__(self, text: str, mesh: Mapping[str, int]):
        self.mesh = mesh
        self.program = hlo.parse(text)

    def loops(self) -> list[Loop]:
        return list(self._walk(self.program.entry, "outside"))

    def _walk(self, name: str, loop: str) -> Iterator[Loop]:
        """One turn of the computation `name`, and the loops inside it. Of a condition, all branches count."""
        body = self.program.computations[name]
        collectives = tuple(collective(x, body, self.mesh) for x in body if x.op.removesuffix("-start") in RING)
        flops = sum(hlo.flops(x, body) for x in body if x.op in ("dot", "convolution"))
        if collectives or flops:
            yield Loop(loop, 1, flops, collectives)
        for x in body:
            if x.op == "while":
                turned = list(self._walk(hlo.called(x, "body"), hlo.way(x)))
                turns = self._turns(hlo.called(x, "condition")) if turned else 0
                yield from (_repeated(part, turns) for part in turned)
            elif x.op in ("call", "conditional", "fusion"):
                for inner in hlo.computations(x):
                    yield from self._walk(inner, loop)

    def _turns(self, condition: str) -> int:
        """Of a loop that counts from 0 to a constant, as scans do."""
        body = self.program.computations[condition]
        limits = [int(x.text.partition(")")[0]) for x in body if x.op == "constant" and x.type.startswith("s32[]")]
        less = [x for x in body if x.op == "compare" and "direction=LT" in x.text]
        if len(limits) != 1 or len(less) != 1:
            raise NotImplementedError(f"A loop with collectives or products: its number of turns is unknown: {body}")
        return limits[0]


def collective(x: hlo.Instruction, body: Sequence[hlo.Instruction], mesh: Mapping[str, int]) -> Collective:
    """What an instruction of `body` sends once; its type is that of the result."""
    kind = x.op.removesuffix("-start")
    group = hlo.group(x.text, math.prod(mesh.values()))
    places = np.stack(np.unravel_index(group, tuple(mesh.values())), axis=1)
    axes = tuple(axis for axis, place in zip(mesh, places.T, strict=True) if len(set(place)) > 1)
    uses = [y.op for y in body if x.name in y.operands]
    sliced = kind == "all-reduce" and bool(uses) and set(uses) == {"dynamic-slice"}
    return Collective(kind, group, axes, hlo.size(x.type), 1, sliced)


def _repeated(loop: Loop, turns: int) -> Loop:
    collectives = tuple(dataclasses.replace(x, times=x.times * turns) for x in loop.collectives)
    return dataclasses.replace(loop, turns=loop.turns * turns, collectives=collectives)
