"""Communication volume and matmul FLOPs of a training step, read from the text of the partitioned program.

The text is XLA's, right after its SPMD partitioner: the program of one device, with the types of the model. Later
changes by a backend are not in it: merged collectives, overlap with computation, float32 for bfloat16 on CPUs.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from leanformer.programs import hlo


# Bytes that each device of a ring of n devices sends, as a multiple of the result's bytes.
RING = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collective instruction of a device's program.

    Attributes:
        kind: type of the collective, a key of RING: "all-gather", "reduce-scatter", "all-reduce", "all-to-all" or
            "collective-permute".
        group: first of its groups of devices, as positions on the mesh; for a permute one source and its target.
        axes: mesh axes that the group spans.
        size: bytes of the result on a device.
        times: executions per step.
        sliced: True for an all-reduce of which each device keeps a slice; some backends make it a reduce-scatter.
    """

    kind: str
    group: tuple[int, ...]
    axes: tuple[str, ...]
    size: int
    times: int
    sliced: bool

    def moved(self, *, scatter: bool = False) -> float:
        """Return the bytes that a device sends per step, in all executions, if devices communicate in a ring.

        Args:
            scatter: True to count a sliced all-reduce as a reduce-scatter.
        """
        halved = scatter and self.sliced
        return self.times * self.size * RING[self.kind](len(self.group)) / (2 if halved else 1)


@dataclasses.dataclass(frozen=True)
class Loop:
    """Loop of the program, such as the scan over layers, or the code outside all loops (one iteration).

    Attributes:
        name: "forward" or "backward" through layers, another "loop", or "outside".
        turns: iterations per step, those of outer loops included.
        flops: FLOPs of the matmuls and convolutions in one iteration, per device.
        collectives: collectives in the loop; their `times` are per step.
    """

    name: str
    turns: int
    flops: int
    collectives: tuple[Collective, ...]


def read(text: str, mesh: Mapping[str, int]) -> list[Loop]:
    """Return the loops of a partitioned program that have collectives or matmuls.

    The code outside all loops counts as a loop. A computation that a loop calls is an entry of its own, with the name
    of the loop. All branches of a condition count.

    Args:
        text: text of the program from `compilation.compile_and_read`.
        mesh: sizes by axis; devices are numbered with the last axis fastest.

    Raises:
        NotImplementedError: the trip count of such a loop is dynamic, or a collective spans a part of an axis.
    """
    return _Reader(text, mesh).loops()


class _Reader:
    def __init__(self, text: str, mesh: Mapping[str, int]):
        self.mesh = mesh
        self.program = hlo.parse(text)

    def loops(self) -> list[Loop]:
        return list(self._walk(self.program.entry, "outside"))

    def _walk(self, name: str, loop: str) -> Iterator[Loop]:
        """Yield one iteration of the computation `name`, and the loops inside it. All branches of a condition count."""
        body = self.program.computations[name]
        collectives = tuple(collective(x, body, self.mesh) for x in body if x.op.removesuffix("-start") in RING)
        flops = sum(hlo.flops(x, body) for x in body if x.op in ("dot", "convolution"))
        if collectives or flops:
            yield Loop(loop, 1, flops, collectives)
        for x in body:
            if x.op == "while":
                parts = list(self._walk(hlo.called(x, "body"), hlo.pass_name(x)))
                turns = self._trip_count(hlo.called(x, "condition")) if parts else 0
                yield from (_repeat(part, turns) for part in parts)
            elif x.op in ("call", "conditional", "fusion"):
                for inner in hlo.computations(x):
                    yield from self._walk(inner, loop)

    def _trip_count(self, condition: str) -> int:
        """Return the trip count of a loop that counts from 0 to a constant, as scans do."""
        body = self.program.computations[condition]
        limits = [int(x.text.partition(")")[0]) for x in body if x.op == "constant" and x.type.startswith("s32[]")]
        less = [x for x in body if x.op == "compare" and "direction=LT" in x.text]
        if len(limits) != 1 or len(less) != 1:
            raise NotImplementedError(f"The trip count of a loop with collectives or matmuls is dynamic: {body}")
        return limits[0]


def collective(x: hlo.Instruction, body: Sequence[hlo.Instruction], mesh: Mapping[str, int]) -> Collective:
    """Return the kind, devices and size of a collective instruction, with `times` = 1.

    The caller multiplies `times` by the trip counts of the loops that contain the instruction.

    Args:
        x: instruction whose `op` is a key of RING, with or without "-start". Its `type` must be the type of the result;
            for "-start" the caller sets it to that of the matching "-done".
        body: instructions of the computation that contains `x`. An all-reduce is `sliced` if all of them that use its
            result are dynamic-slices.
        mesh: sizes by axis; devices are numbered with the last axis fastest.

    Raises:
        NotImplementedError: the group of devices spans a part of an axis.
    """
    kind = x.op.removesuffix("-start")
    group = hlo.group(x.text, math.prod(mesh.values()))
    places = np.stack(np.unravel_index(group, tuple(mesh.values())), axis=1)
    axes = tuple(axis for axis, place in zip(mesh, places.T, strict=True) if len(np.unique(place)) > 1)
    uses = [y.op for y in body if x.name in y.operands]
    sliced = kind == "all-reduce" and bool(uses) and set(uses) == {"dynamic-slice"}
    return Collective(kind, group, axes, hlo.type_bytes(x.type), 1, sliced)


def _repeat(loop: Loop, turns: int) -> Loop:
    collectives = tuple(dataclasses.replace(x, times=x.times * turns) for x in loop.collectives)
    return dataclasses.replace(loop, turns=loop.turns * turns, collectives=collectives)
