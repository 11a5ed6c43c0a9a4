"""Test suite on several processors: instruction sets and BLAS kernels that this machine can emulate.

python tests/stress/processors.py [--rows=NAME,...] [pytest arguments]

Libraries choose their kernels by processor when a program starts: XLA, OpenBLAS (one copy in NumPy, one in SciPy) and
NumPy itself. A row restricts all three, as an older processor would. The default pytest arguments are those of `make
test` without the linter. Rows that this machine cannot run are skipped and listed. Before its tests, the effect of each
row is checked. Prints a table of rows and the names of failed tests; exit status 1 on any failure.

The flags of XLA are passed on by tests/conftest.py, the other settings by the environment, also to the commands that
tests start.
"""

import ctypes
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree


ROOT = Path(__file__).parents[2]
DEFAULT = ("-n", "2", "-m", "not slow")
NAME = "LEANFORMER_PROCESSOR"  # variable with the name of the row, for test_processors.py
# Names that OpenBLAS in the wheels of NumPy and SciPy reports for kernels shared between processors.
SHARED = {"PRESCOTT": ("PRESCOTT", "KATMAI", "COPPERMINE", "NORTHWOOD"), "ZEN": ("ZEN", "HASWELL")}
CORE_NAMES = [f"{prefix}openblas_get_corename{end}" for prefix in ("scipy_", "") for end in ("64_", "")]


@dataclasses.dataclass(frozen=True)
class Row:
    """Settings that emulate a processor.

    Attributes:
        isa: largest instruction set of XLA; None for the machine's.
        core: OpenBLAS core type.
        without: words in the names of NumPy's features to disable; "" disables all that are optional.
        needs: features, by NumPy's names, that the machine must have.
    """

    name: str
    isa: str | None
    core: str
    without: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("SSE42",)

    def environment(self, features: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Return the environment variables of the row, by the machine's NumPy `features`."""
        variables = {"OPENBLAS_CORETYPE": self.core, NAME: self.name}
        if disabled := self.disabled(features):
            variables["NPY_DISABLE_CPU_FEATURES"] = " ".join(disabled)
        if self.isa:
            flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_cpu_max_isa={self.isa}"]
            variables["XLA_FLAGS"] = " ".join(filter(None, flags))
        return variables

    def disabled(self, features: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the NumPy features that the row disables: optional ones that the machine has."""
        optional = [name for name in features["optional"] if name in features["enabled"]]
        return [name for name in optional if any(word in name for word in self.without)]

    def obstacle(self, features: Mapping[str, Sequence[str]]) -> str | None:
        """Return the reason why this machine cannot run the row, or None."""
        missing = [name for name in self.needs if name not in features["enabled"]]
        return f"the processor has no {', '.join(missing)}" if missing else None


AVX512 = ("AVX512", "X86_V4")
ROWS = (
    Row("oldest", "SSE4_2", "PRESCOTT", without=("",)),
    Row("avx2", "AVX2", "HASWELL", without=AVX512, needs=("AVX2",)),
    Row("zen", None, "ZEN", needs=("AVX2",)),
    Row("skylakex", None, "SKYLAKEX", needs=("AVX512F", "AVX512BW", "AVX512DQ")),
)


def cpu_features() -> dict[str, list[str]]:
    """Return NumPy's optional CPU features and those that are enabled in this process."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    return {"optional": [*__cpu_dispatch__], "enabled": [name for name, on in __cpu_features__.items() if on]}


def blas_cores() -> dict[str, str]:
    """Return the core type of each OpenBLAS that NumPy and SciPy have loaded, by its folder."""
    for name in ("numpy.linalg", "scipy.linalg"):
        importlib.import_module(name)
    cores = {}
    for path in sorted({line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}):
        folder = Path(path).parent.name
        if "openblas" not in path or folder not in ("numpy.libs", "scipy.libs"):
            continue
        library = ctypes.CDLL(path)
        function = next((getattr(library, name) for name in CORE_NAMES if hasattr(library, name)), None)
        if function is not None:
            function.restype = ctypes.c_char_p
            cores[folder] = function().decode()
    return cores


def read_state() -> dict[str, Any]:
    """Return the kernels that libraries in this process have chosen, and the flags of XLA."""
    return {"features": cpu_features(), "cores": blas_cores(), "xla": os.environ.get("XLA_FLAGS", "")}


def deviations(row: Row, machine: Mapping[str, Sequence[str]], state: Mapping[str, Any]) -> list[str]:
    """Return the differences between the state of a process and its row; `machine` are unrestricted features."""
    wrong = [f"NumPy has {name}" for name in row.disabled(machine) if name in state["features"]["enabled"]]
    allowed = SHARED.get(row.core, (row.core,))
    wrong += [f"{name}: {core}" for name, core in state["cores"].items() if core.upper() not in allowed]
    wrong += [f"no OpenBLAS in {name}" for name in ("numpy.libs", "scipy.libs") if name not in state["cores"]]
    if row.isa and f"--xla_cpu_max_isa={row.isa}" not in state["xla"].split():
        wrong.append(f"XLA_FLAGS={state['xla']}")
    return wrong


CHECK = """
import json, sys
sys.path.insert(0, sys.argv[1])
import processors
state = processors.read_state()
import jax
jax.numpy.ones((8, 8)).dot(jax.numpy.ones(8)).block_until_ready()  # an unknown flag of XLA ends the process
print(json.dumps(state))
"""


def clean_environment() -> dict[str, str]:
    """Return this process's environment without the settings of a row."""
    names = ("NPY_DISABLE_CPU_FEATURES", "OPENBLAS_CORETYPE", "LEANFORMER_TEST_XLA_FLAGS", NAME)
    return {name: value for name, value in os.environ.items() if name not in names}


def check(row: Row, machine: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the differences between a process started with the row's settings and the row."""
    environment = clean_environment() | row.environment(machine) | {"JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-c", CHECK, str(Path(__file__).parent)]
    result = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        return [f"a process with its settings ends with {result.returncode}: {result.stderr[-500:]}"]
    return deviations(row, machine, json.loads(result.stdout.splitlines()[-1]))


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of a row: numbers of passed and failed tests, names of failed ones, and seconds."""

    passed: int
    failed: int
    failures: list[str]
    seconds: float


def run(row: Row, machine: Mapping[str, Sequence[str]], arguments: Sequence[str]) -> Result:
    """Run pytest with the row's settings; a cache of compiled programs has a folder per row."""
    environment = clean_environment() | row.environment(machine)
    if cache := os.environ.get("LEANFORMER_TEST_CACHE"):
        environment["LEANFORMER_TEST_CACHE"] = f"{cache.rstrip('/')}_{row.name}"
        Path(environment["LEANFORMER_TEST_CACHE"]).mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
        status = subprocess.run(words, cwd=ROOT, env=environment, stdout=sys.stderr, check=False).returncode
        cases = [*ElementTree.parse(report).iter("testcase")] if report.is_file() else []
    broken = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = [f"{case.get('classname')}::{case.get('name')}" for case in broken]
    if status and not names:
        names = [f"pytest ended with {status}"]
    passed = len(cases) - len(broken) - len(skipped)
    return Result(passed, len(names), names, time.monotonic() - start)


def main(argv: Sequence[str]) -> int:
    selected, arguments = [row.name for row in ROWS], [*argv]
    if arguments and arguments[0].startswith("--rows="):
        selected = arguments.pop(0).partition("=")[2].split(",")
        if unknown := sorted({*selected} - {row.name for row in ROWS}):
            raise SystemExit(f"--rows={','.join(unknown)}: choose from {', '.join(row.name for row in ROWS)}.")
    machine = cpu_features()
    lines, failures = [f"{'row':<10} {'passed':>7} {'failed':>7} {'seconds':>8}"], []
    for row in (row for row in ROWS if row.name in selected):
        if obstacle := row.obstacle(machine):
            lines.append(f"{row.name:<10} skipped: {obstacle}")
            continue
        if wrong := check(row, machine):
            lines.append(f"{row.name:<10} has no effect: {'; '.join(wrong)}")
            failures.append(f"{row.name}: its settings have no effect")
            continue
        result = run(row, machine, arguments or DEFAULT)
        lines.append(f"{row.name:<10} {result.passed:>7} {result.failed:>7} {result.seconds:>8.0f}")
        failures += [f"{row.name}: {name}" for name in result.failures]
    print("\n".join([*lines, *failures]))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
