"""Kernels, matmuls, cuDNN calls, loops and overlap of collectives in a step, from the program compiled for a GPU.

The text of the program is read in its scheduled order; nothing is run. A program compiled without its GPU has GEMM
autotuning off: the compiler chooses library and tiles of a matmul by rule, but would measure several on the GPU.
"""

import collections
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from leanformer.programs import communication, hlo


# Instructions without device work: they name, order or finish the work of others.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id"),
    *("replica-id", "while", "call", "conditional", "add-dependency", "domain"),
}
# Instructions of a fusion that only moves memory.
MOVES = {*FREE, "dynamic-slice", "dynamic-update-slice", "slice", "copy", "add", "compare", "select", "subtract"}
# Makes XLA check calls with cuDNN without a GPU; off by default. benchmarks/ask_cudnn.sh installs the requirements.
ASK_CUDNN = "--xla_gpu_cudnn_deviceless_compilation_mode=CUDNN_DEVICELESS_COMPILATION_ALWAYS"
GROUPS = ("product", "cuDNN", "fusion", "copy", "collective", "other")
PRODUCTS, CUDNN, FUSIONS, COPIES, COLLECTIVES, OTHER = GROUPS


@dataclasses.dataclass(frozen=True)
class Launch:
    """Launch of a kernel or a copy by one instruction.

    Attributes:
        group: type of work, one of GROUPS: "product" (matmul or convolution), "cuDNN", "fusion", "copy", "collective"
            or "other".
        name: library, instruction or custom call, such as "cuBLASLt" or "all-reduce".
    """

    group: str
    name: str


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Collective, with the device work between its start and its end (overlap).

    Attributes:
        kind: type of the collective, a key of communication.RING.
        axes: mesh axes that its group of devices spans.
        size: bytes of the result on a device.
        loop: name of the loop that contains it, or "outside".
        times: executions per step; None in a loop with dynamic trip count.
        between: number of launches between start and end in one execution, by group of GROUPS; empty if not overlapped.
    """

    kind: str
    axes: tuple[str, ...]
    size: int
    loop: str
    times: int | None
    between: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Loop:
    """Loop of the program, or the code outside all loops, with its launches. Inner loops are loops of their own.

    Attributes:
        name: "forward" or "backward" through layers, another "loop", or "outside".
        operation: name of the loop in the traced program; empty if it has none.
        turns: iterations per step, those of outer loops included; None if a trip count is dynamic.
        launches: number of each launch per iteration, without those of inner loops.
        collectives: collectives of the loop, without those of inner loops.
    """

    name: str
    operation: str
    turns: int | None
    launches: Mapping[Launch, int]
    collectives: tuple[Overlap, ...]


def describe(compiled: jax.stages.Compiled, mesh: Mapping[str, int]) -> dict[str, Any]:
    """Return the launches of a program by group, its loops and its collectives, as plain values for JSON.

    The keys are launches, by_group, products, cudnn, cudnn_asked, loops and collectives; `programs.read_kernels`
    explains them.

    Args:
        compiled: program compiled for GPUs.
        mesh: sizes by axis; devices are numbered with the last axis fastest.
    """
    loops = read(compiled.as_text() or "", mesh)
    return {
        "launches": total(loops),
        "by_group": {group: total(loops, group) for group in GROUPS},
        "products": by_name(loops, PRODUCTS),
        "cudnn": by_name(loops, CUDNN),
        "cudnn_asked": ASK_CUDNN in os.environ.get("XLA_FLAGS", ""),
        "loops": [_describe(loop) for loop in loops],
        "collectives": [dataclasses.asdict(x) for loop in loops for x in loop.collectives],
    }


def _describe(loop: Loop) -> dict[str, Any]:
    by = {f"{launch.group} {launch.name}": number for launch, number in loop.launches.items()}
    record = {"name": loop.name, "operation": loop.operation, "turns": loop.turns}
    return record | {"launches_per_iteration": sum(by.values()), "by": by}


def total(loops: list[Loop], *groups: str) -> int:
    """Return the number of launches per step, without those in loops with dynamic trip count.

    Args:
        loops: loops of the program, from `read`.
        groups: groups to count, of GROUPS; all if none is given.
    """
    return sum(number for launch, number in _per_step(loops) if not groups or launch.group in groups)


def by_name(loops: list[Loop], group: str) -> dict[str, int]:
    """Return the number of launches per step of one type of work, by name, such as {"cuBLASLt": 24} for matmuls.

    Launches in loops with dynamic trip count are not counted.

    Args:
        loops: loops of the program, from `read`.
        group: type of work, one of GROUPS.
    """
    numbers: collections.Counter[str] = collections.Counter()
    for launch, number in _per_step(loops):
        if launch.group == group:
            numbers[launch.name] += number
    return dict(numbers)


def _per_step(loops: list[Loop]) -> Iterator[tuple[Launch, int]]:
    for loop in loops:
        if loop.turns is not None:
            yield from ((launch, loop.turns * number) for launch, number in loop.launches.items())


def read(text: str, mesh: Mapping[str, int]) -> list[Loop]:
    """Return kernel launches and collectives per loop: first those outside loops, then each loop after its outer loop.

    Called computations, and all branches of conditions, belong to the loop that contains the call.

    Args:
        text: text of a program compiled for a GPU, `compiled.as_text()`.
        mesh: sizes by axis; devices are numbered with the last axis fastest.

    Raises:
        NotImplementedError: this version of XLA writes another format, or a collective spans a part of an axis.
    """
    return list(_Reader(hlo.parse(text), mesh).walk("outside", "", 1))


class _Reader:
    def __init__(self, program: hlo.Program, mesh: Mapping[str, int]):
        self.program, self.mesh = program, mesh

    def walk(self, name: str, operation: str, turns: int | None, body: str = "") -> Iterator[Loop]:
        """Yield the loop `name` and the loops inside it."""
        lines = list(self._lines(body or self.program.entry))
        launched = [launch for line in lines if (launch := self.launch(line))]
        overlaps = tuple(self._overlaps(lines, name, turns))
        yield Loop(name, operation, turns, collections.Counter(launched), overlaps)
        for line in lines:
            if line.op == "while":
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line.text)
                within = turns * int(trips[1]) if turns and trips else None
                yield from self.walk(hlo.pass_name(line), hlo.operation(line), within, hlo.called(line, "body"))

    def _lines(self, name: str) -> Iterator[hlo.Instruction]:
        """Yield the instructions of a computation. Calls and all branches of conditions are inlined."""
        for line in self.program.computations[name]:
            if line.op in ("call", "conditional", "async-start"):
                for inner in hlo.computations(line):
                    yield from self._lines(inner)
            else:
                yield line

    def launch(self, line: hlo.Instruction) -> Launch | None:
        """Return the device work of an instruction, None if there is none."""
        op = line.op.removesuffix("-start")
        if line.op in FREE or line.op.endswith("-done"):
            return None
        if inner := self._collective(line):
            return Launch(COLLECTIVES, inner.op.removesuffix("-start"))
        if op == "fusion":
            return self._fusion(line)
        if op == "custom-call":
            return _custom(hlo.find(r'custom_call_target="([^"]*)"', line.text))
        if op in ("dot", "convolution"):
            return Launch(PRODUCTS, "XLA")
        return Launch(COPIES, op) if op == "copy" else Launch(OTHER, op)

    def _fusion(self, line: hlo.Instruction) -> Launch:
        inside = {x.op for x in self.program.computations[hlo.called(line, "calls")]}
        written = re.search(r'"kind":"(__[\w$]+)"', line.text)
        by = written[1] if written else ""
        if "dot" in inside or "convolution" in inside or ("fusion" in inside and "gemm" in by):
            return Launch(PRODUCTS, "Triton" if "triton" in by else "cuDNN" if "cudnn" in by else by or "XLA")
        if inside & {"dynamic-slice", "dynamic-update-slice"} and inside <= MOVES:
            return Launch(COPIES, "slice")
        return Launch(FUSIONS, "Triton" if "triton" in by else "XLA")

    def _collective(self, line: hlo.Instruction) -> hlo.Instruction | None:
        """Return the collective of an instruction, if any: itself, or inside its fusion for XLA's own kernels."""
        fused = line.op.removesuffix("-start") == "fusion"
        lines = self.program.computations[hlo.called(line, "calls")] if fused else [line]
        return next((x for x in lines if x.op.removesuffix("-start") in communication.RING), None)

    def _overlaps(self, lines: list[hlo.Instruction], name: str, turns: int | None) -> Iterator[Overlap]:
        ends = {line.operands[0]: i for i, line in enumerate(lines) if line.op.endswith("-done")}
        for i, line in enumerate(lines):
            if inner := self._collective(line):
                end = ends.get(line.name, i)
                between = [] if '"is_sync":true' in line.text else lines[i + 1 : end]
                groups = collections.Counter(x.group for y in between if (x := self.launch(y)))
                result = dataclasses.replace(inner, type=lines[end].type)
                collective = communication.collective(result, lines, self.mesh)
                yield Overlap(collective.kind, collective.axes, collective.size, name, turns, dict(groups))


def _custom(target: str) -> Launch:
    if target.startswith("__cublas"):
        return Launch(PRODUCTS, "cuBLASLt" if "$lt$" in target else "cuBLAS")
    if target.startswith("__cudnn"):
        return Launch(CUDNN, target.removeprefix("__cudnn$"))
    return Launch(OTHER, target)
