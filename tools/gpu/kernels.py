"""Bytes and FLOPs of a training step by kind of kernel, from its program for a GPU that is not attached.

    python -m tools.gpu.kernels [--configs=NAME,...]

Prints a Markdown table. It needs `leanformer[cuda12]`, whose plugin describes the GPU, but no driver. Nothing runs: on
the GPU, XLA measures candidates of every matmul, and may fuse other kernels into them.

Bytes are the operands and results of each kernel, of a slice only its part; what a cache keeps between kernels is
counted too. The least time of a kernel is the larger of its bytes by the memory's bandwidth and its FLOPs by the peak
of bfloat16 matmuls. Kernels follow each other, so their times add up. A kind could save at most what its kernels take
beyond their FLOPs.
"""

import argparse
import collections
import dataclasses
import math
import mmap
import re
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from leanformer import config as configs
from leanformer.runtime import mesh as meshes
from leanformer.training import train_setup
from tools.gpu.absent import pretend_attached
from tools.speed import timing


BATCHES = {"vit_b_7x16": 256, "vit_b_12x12": 256, "gpt2_tinystories_12x12": 128}
BATCHES |= {"xcit_m_12x16": 128, "volo_d3_lean": 128}
GPU = "NVIDIA H100 80GB HBM3"
BANDWIDTHS, PEAK = {"H100": 3.35e12, "H200": 4.8e12}, 989e12  # data sheets: bytes/s, bfloat16 FLOP/s of both
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"}
SLICES, UPDATE = {"slice", "dynamic-slice", "gather"}, "dynamic-update-slice"
WHOLE = {"bitcast", "convert", "copy", "reshape", "transpose"}  # of one operand, all of it
MOVES = FREE | SLICES | {UPDATE, "copy", "transpose", "reshape", "convert", "broadcast", "pad", "concatenate"}
FUSED_MATMULS = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}  # of B N T S H, in a kernel of cuDNN


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Instruction of a computation: `%name = type op(arguments)attributes`."""

    name: str
    type: str
    op: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        """Names of the operands; name#1 is an element of a tuple."""
        return re.findall(r"%([\w.#-]+)", self.arguments)

    @property
    def shapes(self) -> list[tuple[int, tuple[int, ...]]]:
        """(Bytes of an element, shape) of each array of the result, whose type is such as `(f32[2,3], pred[])`."""
        arrays = re.findall(r"[a-z]+(\d*)\w*\[([\d,]*)\]", self.type)
        return [(int(bits or 8) // 8, tuple(map(int, re.findall(r"\d+", dims)))) for bits, dims in arrays]

    @property
    def bytes(self) -> int:
        return sum(width * math.prod(shape) for width, shape in self.shapes)

    def find(self, pattern: str) -> str:
        """Return the first group of a regular expression in the attributes; "" without a match."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class Kernel:
    kind: str
    bytes: int
    flops: int
    times: int  # launches per step

    def seconds(self, bandwidth: float) -> float:
        return self.times * max(self.bytes / bandwidth, self.flops / PEAK)


class Program:
    """A program after all optimisations, read from its text."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        for line in text.splitlines():
            if header := re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line):
                self.entry = header[1]  # the last one
                self.computations[self.entry] = {}
            elif x := re.match(r"\s+(ROOT )?%(\S+) = (.*?) ([\w-]+)\((.*?)\)(.*)", line):
                current = self.computations[self.entry]
                current[x[2]] = Instruction(*x.groups()[1:])
                for i, element in enumerate(re.findall(r"\w+\[[\d,]*\]", x[3]) if x[3].startswith("(") else ()):
                    current[f"{x[2]}#{i}"] = Instruction(f"{x[2]}#{i}", element, "get-tuple-element", "", "")
                if x[1]:
                    current["ROOT"] = current[x[2]]
        functions = dict(re.findall(r'^(\d+) "(.*)"$', text.partition("FunctionNames")[2], re.M))
        places = dict(re.findall(r"^(\d+) \{file_name_id=\d+ function_name_id=(\d+)", text, re.M))
        frames = re.findall(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}", text, re.M)
        # A frame is numbered from 1, its parent from 2; 1 is none.
        self.frames = {int(frame): (functions[places[place]], int(parent) - 1) for frame, place, parent in frames}

    def functions(self, x: Instruction) -> list[str]:
        """Return the names of the Python functions that made an instruction, the innermost first."""
        names, frame = [], int(x.find(r"stack_frame_id=(\d+)") or 0)
        while frame in self.frames:
            name, frame = self.frames[frame]
            names.append(name)
        return names

    def kernels(self, computation: str = "", times: int = 1) -> Iterator[Kernel]:
        """Yield the kernels of a step in their order, those of loops too."""
        lines = self.computations[computation or self.entry]
        for x in [x for name, x in lines.items() if name == x.name]:  # not the root again
            if x.op == "while":
                turns = int(x.find(r'"known_trip_count":\{"n":"(\d+)"'))
                yield from self.kernels(x.find(r"body=%([\w.-]+)"), times * turns)
            elif x.op in ("call", "async-start"):
                yield from self.kernels(x.find(r"(?:to_apply|calls)=%([\w.-]+)"), times)
            elif x.op not in FREE and not x.op.endswith("-done"):
                inside = self.computations.get(x.find(r"calls=%([\w.-]+)"), {x.name: x})
                flops = sum(count_flops(y, lines | inside) for key, y in inside.items() if key != "ROOT")
                yield Kernel(self.kind(x, inside, flops), self.count_bytes(x, lines, inside), flops, times)

    def kind(self, x: Instruction, inside: dict[str, Instruction], flops: int) -> str:
        functions = [name for name in self.functions(x) if "with_gradient" not in name]  # of custom derivatives
        if functions and re.search("attend|Attention|_fused|_grouped", functions[0]):
            return "attention"
        if flops or "/dot_general" in x.attributes:  # or partial sums of one
            return "matmul"
        if {y.op for y in inside.values()} <= MOVES:
            return "casts and copies"
        return "norms and elementwise" if any("gradient" in name for name in functions) else "optimizer"

    def count_bytes(self, x: Instruction, lines: dict[str, Instruction], inside: dict[str, Instruction]) -> int:
        """Return the bytes that a kernel reads and writes; of an array that it updates in place only the update."""

        def readers(name: str) -> Iterator[Instruction]:
            for y in [y for key, y in inside.items() if key != "ROOT"]:
                if name in y.operands:
                    yield from readers(y.name) if y.op in WHOLE else (y,)

        total, parameters = 0, {y.arguments: y.name for y in inside.values() if y.op == "parameter"}
        for i, operand in enumerate(x.operands):
            uses, whole = list(readers(parameters[str(i)])) if parameters else [x], lines[operand]
            parts = [math.prod(y.shapes[0][1]) * whole.shapes[0][0] for y in uses if y.op in SLICES]
            total += min(whole.bytes, sum(parts)) if all(y.op in SLICES | {UPDATE} for y in uses) else whole.bytes
        root = inside.get("ROOT", x)
        for y in [inside[name] for name in root.operands] if root.op == "tuple" else [root]:
            while y.op == "bitcast" and y.operands[0] in inside:
                y = inside[y.operands[0]]
            total += inside[y.operands[1]].bytes if y.op == UPDATE and y is not x else y.bytes
        return total


def count_flops(x: Instruction, lines: dict[str, Instruction]) -> int:
    """Return the FLOPs of a matmul or convolution, 2 per multiply-add; 0 for other instructions."""
    out, target = math.prod(x.shapes[0][1]) if x.shapes else 0, x.find(r'custom_call_target="([^"]*)"')
    if target in FUSED_MATMULS:
        keys = int(x.find(r'"intermediate_tensor_shape".*?"dimensions": ?\[(?:"\d+", ?){3}"(\d+)"'))
        return 2 * FUSED_MATMULS[target] * keys * out
    axes = x.find(r'lhs_contracting_dim\w+"?[=:] ?[\[{]([\d",]*)')
    if axes:
        shape = lines[x.operands[0]].shapes[0][1]
        return 2 * out * math.prod(shape[int(axis)] for axis in re.findall(r"\d+", axes))
    return 0


def describe_gpu() -> str:
    """Return the text in which XLA's CUDA plugin describes the H100."""
    specs = [util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)]
    library = next(Path(spec.origin).with_name("xla_cuda_plugin.so") for spec in specs if spec and spec.origin)
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        texts = [match.group().decode() for match in re.finditer(rb"gpu_device_info \{[\t\n -~]*", content)]
    return next(text for text in texts if f'device_description_str: "{GPU}"' in text)


def compile_step(name: str, gpu: Any) -> str:
    """Return the text of a config's compiled training step."""
    c = configs.load(name).unlock()
    c.update(batch_size=BATCHES[name], accumulate=1)
    with pretend_attached(gpu):
        run = train_setup.set_up_training(c, examples=1_281_167, mesh=meshes.make_mesh(devices=[gpu]))
        return str(run.compile_train_step().as_text())


def tabulate(name: str, kernels: list[Kernel]) -> list[dict[str, Any]]:
    """Return a row per kind of kernel, the slowest first, and one of all."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for k in kernels:
        seconds[k.kind] += k.seconds(BANDWIDTHS["H100"])
    rows = []
    for kind in ("all", *sorted(seconds, key=lambda kind: -seconds[kind])):
        some = [k for k in kernels if kind in ("all", k.kind)]
        total = {unit: sum(k.times * getattr(k, unit) for k in some) for unit in ("bytes", "flops")}
        row: dict[str, Any] = {"config": name, "kind": kind, "launches": sum(k.times for k in some)}
        row |= {"GB": round(total["bytes"] / 1e9, 2), "TFLOP": round(total["flops"] / 1e12, 2)}
        for card, bandwidth in BANDWIDTHS.items():
            least, whole = (sum(k.seconds(bandwidth) for k in ks) for ks in (some, kernels))
            row[f"{card}: least ms"] = round(1e3 * least, 2)
            row[f"{card}: could save"] = f"{(least - total['flops'] / PEAK) / whole:.0%}"
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", default=",".join(BATCHES), help="names, separated by commas")
    f = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot read programs of GPUs that are not attached
    (gpu,) = topologies.get_topology_desc("absent", "cuda", topology="1x1x1", target_config=describe_gpu()).devices
    rows = [tabulate(name, list(Program(compile_step(name, gpu)).kernels())) for name in f.configs.split(",")]
    print(timing.format_markdown([row for table in rows for row in table]))


if __name__ == "__main__":
    main()
