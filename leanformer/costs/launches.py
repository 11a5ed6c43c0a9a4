"""What a GPU is asked to do in a step: kernels, products, cuDNN's calls, loops, and what runs beside collectives.

Read from the text of a program compiled for a GPU, in the order that it was scheduled in. Nothing here ran. A program
that was compiled without its GPU has not been measured on it either: which library makes a product, and by what tiles,
is then the compiler's guess, where on the GPU itself it would try several.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping

from leanformer.costs import communication, hlo


# Instructions that ask nothing of the device: they name, order or finish what others do.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id"),
    *("replica-id", "while", "call", "conditional", "add-dependency", "domain"),
}
# Of a fusion: the last words are of what it does to memory alone.
MOVES = {*FREE, "dynamic-slice", "dynamic-update-slice", "slice", "copy", "add", "compare", "select", "subtract"}
GROUPS = ("product", "cuDNN", "fusion", "copy", "collective", "other")
PRODUCTS, CUDNN, FUSIONS, COPIES, COLLECTIVES, OTHER = GROUPS


@dataclasses.dataclass(frozen=True)
class Launch:
    """What one instruction has the device do: `group` is one of GROUPS, `name` says more."""

    group: str
    name: str


@dataclasses.dataclass(frozen=True)
class Beside:
    """A collective, and what its device computes between its start and its end."""

    kind: str  # a key of communication.RING
    axes: tuple[str, ...]
    size: int  # bytes of the result on a device
    loop: str  # that it is in, or "outside"
    times: int | None  # a step; None in a loop of unknown length
    between: Mapping[str, int]  # launches by group; empty where it runs alone


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of the program, or what is outside of all loops."""

    name: str  # "forward" or "backward" through layers, another "loop", or "outside"
    operation: str  # what the model's source calls it
    turns: int | None  # a step; None where the program itself finds out
    launches: Mapping[Launch, int]  # a turn, those of loops inside it left out
    collectives: tuple[Beside, ...]


def total(loops: list[Loop], *groups: str) -> int:
    """Launches of a step in any of `groups`, or all of them; those of loops of unknown length cannot be counted."""
    return sum(number for launch, number in _a_step(loops) if not groups or launch.group in groups)


def by_name(loops: list[Loop], group: str) -> dict[str, int]:
    """Launches of a step in `group`, by name; counted as `total` does."""
    found: collections.Counter[str] = collections.Counter()
    for launch, number in _a_step(loops):
        if launch.group == group:
            found[launch.name] += number
    return dict(found)


def _a_step(loops: list[Loop]) -> Iterator[tuple[Launch, int]]:
    for loop in loops:
        if loop.turns is not None:
            yield from ((launch, loop.turns * number) for launch, number in loop.launches.items())


def read(text: str, mesh: Mapping[str, int]) -> list[Loop]:
    """What is outside of loops, and every loop, in the order that they run.

    Args:
        text: of a program compiled for a GPU, `compiled.as_text()`.
        mesh: sizes by axis, as in `communication.read`.
    """
    return list(_Reader(hlo.parse(text), mesh).walk("outside", "", 1))


class _Reader:
    def __init__(self, program: hlo.Program, mesh: Mapping[str, int]):
        self.program, self.mesh = program, mesh

    def walk(self, name: str, operation: str, turns: int | None, body: str = "") -> Iterator[Loop]:
        """The loop `name`, and those inside it."""
        lines = list(self._lines(body or self.program.entry))
        launched = [launch for line in lines if (launch := self.launch(line))]
        beside = tuple(self._beside(lines, name, turns))
        yield Loop(name, operation, turns, collections.Counter(launched), beside)
        for line in lines:
            if line.op == "while":
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line.text)
                within = turns * int(trips[1]) if turns and trips else None
                yield from self.walk(hlo.way(line), hlo.operation(line), within, hlo.called(line, "body"))

    def _lines(self, name: str) -> Iterator[hlo.Instruction]:
        """A computation's instructions, those of what it calls in their place; of a condition, all branches."""
        for line in self.program.computations[name]:
            if line.op in ("call", "conditional", "async-start"):
                for inner in hlo.computations(line):
                    yield from self._lines(inner)
            else:
                yield line

    def launch(self, line: hlo.Instruction) -> Launch | None:
        """What the device does, None if nothing."""
        op = line.op.removesuffix("-start")
        if line.op in FREE or line.op.endswith("-done"):
            return None
        if sent := self._collective(line):
            return Launch(COLLECTIVES, sent.op.removesuffix("-start"))
        if op == "fusion":
            return self._fusion(line)
        if op == "custom-call":
            return _custom(re.search(r'custom_call_target="([^"]*)"', line.text)[1])
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
        """What a line has sent, if anything: itself, or, of a collective with a kernel of XLA's own, in its fusion."""
        fused = line.op.removesuffix("-start") == "fusion"
        lines = self.program.computations[hlo.called(line, "calls")] if fused else [line]
        return next((x for x in lines if x.op.removesuffix("-start") in communication.RING), None)

    def _beside(self, lines: list[hlo.Instruction], name: str, turns: int | None) -> Iterator[Beside]:
        ends = {line.operands[0]: i for i, line in enumerate(lines) if line.op.endswith("-done")}
        for i, line in enumerate(lines):
            if sent := self._collective(line):
                end = ends.get(line.name, i)
                at_once = [] if '"is_sync":true' in line.text else lines[i + 1 : end]
                groups = collections.Counter(x.group for y in at_once if (x := self.launch(y)))
                result = dataclasses.replace(sent, type=lines[end].type)
                found = communication.collective(result, lines, self.mesh)
                yield Beside(found.kind, found.axes, found.size, name, turns, dict(groups))


def _custom(target: str) -> Launch:
    if target.startswith("__cublas"):
        return Launch(PRODUCTS, "cuBLASLt" if "$lt$" in target else "cuBLAS")
    if target.startswith("__cudnn"):
        return Launch(CUDNN, target.removeprefix("__cudnn$"))
    return Launch(OTHER, target)
