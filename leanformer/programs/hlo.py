"""Parser for the text of XLA programs: computations, instructions and their attributes.

The format is the same before and after a backend's passes: `communication` reads the former, `launches` the latter.
"""

import dataclasses
import math
import re

import numpy as np


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Instruction of a computation, written as `%name = type op(%operands)...`.

    Attributes:
        name: name of the result.
        type: type of the result with its layout, such as "f32[2,3]{1,0}".
        op: operation, such as "dot" or "all-reduce-start".
        operands: names of the operands; "name#1" is an element of a tuple.
        text: rest of the line after the bracket that opens the operands, with the attributes.
    """

    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Program:
    """Program as the instructions of its computations.

    Attributes:
        computations: instructions of each computation by its name, in the order of the text, which is the order of
            execution if the program is scheduled.
        entry: name of the computation with which the program begins.
    """

    computations: dict[str, list[Instruction]]
    entry: str


def parse(text: str) -> Program:
    """Return the program in the text of an HLO module."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%(\S+) \(.*\{$", line):
            computations[header[2]] = current = []
            entry = header[2] if header[1] else entry
        elif match := re.match(r"\s+(?:ROOT )?%(\S+) = (.*?) ([\w-]+)\((.*)", line):
            operands = re.findall(r"%([\w.-]+(?:#\d+)?)", match[4].partition(")")[0])
            current.append(Instruction(match[1], match[2], match[3], tuple(operands), match[4]))
    return Program(computations, entry)


def find(pattern: str, text: str) -> str:
    """Return what the first group of a regular expression matches in a text from XLA.

    Raises NotImplementedError if there is no match, because another version of XLA writes another format.
    """
    if match := re.search(pattern, text):
        return match[1]
    raise NotImplementedError(f"This version of XLA writes programs without {pattern!r}: {text[:200]}")


def called(x: Instruction, role: str) -> str:
    """Return the name of the computation that an instruction calls in a role.

    Args:
        x: instruction.
        role: attribute: "body" or "condition" of a loop, "calls" of a fusion.

    Raises:
        NotImplementedError: the instruction has no such attribute.
    """
    return find(rf"{role}=%([\w.-]+)", x.text)


def computations(x: Instruction) -> list[str]:
    """Return the names of the computations that a call, fusion or condition runs; all branches of a condition."""
    parts = re.findall(r"\b(?:to_apply|calls|\w+_computations?)=(\{[^}]*\}|%[\w.-]+)", x.text)
    return [name for part in parts for name in re.findall(r"%([\w.-]+)", part)]


def operation(x: Instruction) -> str:
    """Return the name that JAX gave to an instruction, such as "jit(step)/jvp(...)/while"; "" without one."""
    match = re.search(r'op_name="([^"]*)"', x.text)
    return match[1] if match else ""


def pass_name(loop: Instruction) -> str:
    """Return the pass that a loop belongs to by its `operation`: "forward", "backward", or "loop" for neither."""
    name = operation(loop)
    return "backward" if "transpose(" in name else "forward" if "jvp(" in name else "loop"


def group(text: str, devices: int) -> tuple[int, ...]:
    """Return the numbers of the devices in the first group of a collective; for a permute one source and its target.

    Args:
        text: attributes of the instruction, with the groups in any of XLA's notations.
        devices: number of all devices, which are the group if the text names none.

    Raises:
        NotImplementedError: the group spans a part of a mesh axis.
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", text):
        moves = [tuple(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", pairs[1])]
        return next(((a, b) for a, b in moves if a != b), moves[0])
    if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
        ids = np.arange(devices).reshape(tuple(sizes.values()))
        inside = dict(re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2]))
        if any(inside.values()):
            raise NotImplementedError(f"Collectives over a part of an axis are not supported: {named[0]}")
        return tuple(map(int, ids[tuple(slice(None) if axis in inside else 0 for axis in sizes)].reshape(-1)))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, base, order = (list(map(int, part.split(","))) if part else None for part in iota.groups())
        ids = np.arange(devices).reshape(base).transpose(order)
        return tuple(map(int, ids.reshape(shape)[0]))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return tuple(map(int, listed[1].split(",")))
    return tuple(range(devices))


def shapes(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return [(dtype, shape), ...] of an HLO type such as `(f32[2,3], s32[])`, one pair per array."""
    arrays = re.findall(r"([a-z]\w*)\[([\d,]*)\]", type_)
    return [(dtype, tuple(map(int, filter(None, shape.split(","))))) for dtype, shape in arrays]


def type_bytes(type_: str) -> int:
    """Return the bytes of an array type, or of all arrays of a tuple type."""

    def width(dtype: str) -> int:
        bits = re.search(r"\d+", dtype)
        return int(bits[0]) // 8 if bits else 1  # pred

    return sum(width(dtype) * math.prod(shape) for dtype, shape in shapes(type_))


def flops(x: Instruction, body: list[Instruction]) -> int:
    """Return the FLOPs of a matmul or convolution, 2 per multiply-add.

    Args:
        x: instruction with op "dot" or "convolution".
        body: instructions of its computation, which have the shapes of the operands.

    Raises:
        NotImplementedError: this version of XLA writes the instruction in another format.
    """

    def shape(operand: str) -> tuple[int, ...]:
        name, _, element = operand.partition("#")
        (type_,) = (y.type for y in body if y.name == name)
        return shapes(type_)[int(element or 0)][1]

    ((_, out),) = shapes(x.type)
    left, right = map(shape, x.operands)
    if x.op == "dot":
        contracted = find(r"lhs_contracting_dims=\{([\d,]*)\}", x.text)
        return 2 * math.prod(out) * math.prod(left[int(axis)] for axis in filter(None, contracted.split(",")))
    labels = find(r"dim_labels=\w+_(\w+)->", x.text)
    dilated = re.search(r"lhs_dilate=([\dx]+)", x.text)
    zeros = math.prod(map(int, dilated[1].split("x"))) if dilated else 1
    return 2 * math.prod(out) * math.prod(right) // right[labels.index("o")] // zeros
