"""XLA's programs as text: their computations and instructions, and what is written in an instruction.

The same text before and after a backend's own passes; `communication` reads the one, `launches` the other.
"""

import dataclasses
import math
import re

import numpy as np


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation: %name = type op(%operands), and from the bracket on its text."""

    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Program:
    """Computations by name, each in the order it is written in: a scheduled program's is the order it runs in."""

    computations: dict[str, list[Instruction]]
    entry: str


def parse(text: str) -> Program:
    """The computations of a module's text."""
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%(\S+) \(.*\{$", line):
            computations[header[2]] = current = []
            entry = header[2] if header[1] else entry
        elif found := re.match(r"\s+(?:ROOT )?%(\S+) = (.*?) ([\w-]+)\((.*)", line):
            operands = re.findall(r"%([\w.-]+(?:#\d+)?)", found[4].partition(")")[0])
            current.append(Instruction(found[1], found[2], found[3], tuple(operands), found[4]))
    return Program(computations, entry)


def called(x: Instruction, role: str) -> str:
    """The computation that an instruction calls as `role`: the "body" of a loop, what a fusion "calls"."""
    return re.search(rf"{role}=%([\w.-]+)", x.text)[1]


def computations(x: Instruction) -> list[str]:
    """The computations that a call, fusion or condition runs; all branches of a condition."""
    found = re.findall(r"\b(?:to_apply|calls|\w+_computations?)=(\{[^}]*\}|%[\w.-]+)", x.text)
    return [name for part in found for name in re.findall(r"%([\w.-]+)", part)]


def operation(x: Instruction) -> str:
    """What the traced program calls an instruction, "" if it does not say."""
    found = re.search(r'op_name="([^"]*)"', x.text)
    return found[1] if found else ""


def way(loop: Instruction) -> str:
    """Whether a loop is of the "forward" or of the "backward" pass; "loop" if of neither."""
    name = operation(loop)
    return "backward" if "transpose(" in name else "forward" if "jvp(" in name else "loop"


def group(text: str, devices: int) -> tuple[int, ...]:
    """The first group of a collective's devices, from any of the ways XLA writes them."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", text):
        moves = [tuple(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", pairs[1])]
        return next(((a, b) for a, b in moves if a != b), moves[0])
    if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
        ids = np.arange(devices).reshape(tuple(sizes.values()))
        inside = dict(re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2]))
        if any(inside.values()):
            raise NotImplementedError(f"A collective over part of an axis: {named[0]}")
        return tuple(map(int, ids[tuple(slice(None) if axis in inside else 0 for axis in sizes)].reshape(-1)))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, base, order = (list(map(int, part.split(","))) if part else None for part in iota.groups())
        ids = np.arange(devices).reshape(base).transpose(order)
        return tuple(map(int, ids.reshape(shape)[0]))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return tuple(map(int, listed[1].split(",")))
    return tuple(range(devices))


def shapes(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """The dtype and shape of an array, or of each in a tuple."""
    found = re.findall(r"([a-z]\w*)\[([\d,]*)\]", type_)
    return [(dtype, tuple(map(int, filter(None, shape.split(","))))) for dtype, shape in found]


def size(type_: str) -> int:
    """Bytes of an array, or of all in a tuple."""

    def width(dtype: str) -> int:
        bits = re.search(r"\d+", dtype)
        return int(bits[0]) // 8 if bits else 1  # pred

    return sum(width(dtype) * math.prod(shape) for dtype, shape in shapes(type_))


def flops(x: Instruction, body: list[Instruction]) -> int:
    """Of a product or convolution in `body`, 2 a multiply-add, as `count.flops`."""

    def shape(operand: str) -> tuple[int, ...]:
        name, _, element = operand.partition("#")
        (type_,) = (y.type for y in body if y.name == name)
        return shapes(type_)[int(element or 0)][1]

    ((_, out),) = shapes(x.type)
    left, right = map(shape, x.operands)
    if x.op == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.text)[1]
        return 2 * math.prod(out) * math.prod(left[int(axis)] for axis in filter(None, contracted.split(",")))
    labels = re.search(r"dim_labels=\w+_(\w+)->", x.text)[1]
    dilated = re.search(r"lhs_dilate=([\dx]+)", x.text)
    zeros = math.prod(map(int, dilated[1].split("x"))) if dilated else 1
    return 2 * math.prod(out) * math.prod(right) // right[labels.index("o")] // zeros
