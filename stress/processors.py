"""Test suite on several processors: instruction sets and BLAS kernels that this machine can emulate.

python stress/processors.py [--rows=NAME,...] [pytest arguments]

Libraries choose their kernels by processor when a program starts: XLA, OpenBLAS (one copy in NumPy, one in SciPy) and
NumPy itself. A row restricts all three, as an older processor would. The default pytest arguments are those of `make
test` without the linter. Rows that this machine cannot run are skipped and listed. Prints a table of rows; exit status
1 if pytest fails in any of them.

The flags of XLA are passed on by tests/conftest.py, the other settings by the environment, also to the commands that
tests start.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from numpy._core._multiarray_umath import __cpu_dispatch__ as OPTIONAL
from numpy._core._multiarray_umath import __cpu_features__ as FEATURES


ROOT = Path(__file__).parents[1]
DEFAULT = ("-n", "2", "-m", "not slow")


class Row(NamedTuple):
    """Settings that emulate a processor."""

    isa: str | None  # largest instruction set of XLA; None for the machine's
    core: str  # OpenBLAS core type
    without: tuple[str, ...] = ()  # words in the names of NumPy's features to disable; "" disables all optional ones
    needs: tuple[str, ...] = ("SSE42",)  # features, by NumPy's names, that the machine must have

    def environment(self) -> dict[str, str]:
        """Return the environment of the row's tests, with a cache of compiled programs of its own."""
        disabled = [x for x in OPTIONAL if FEATURES[x] and any(word in x for word in self.without)]
        variables = {"OPENBLAS_CORETYPE": self.core, "NPY_DISABLE_CPU_FEATURES": " ".join(disabled)}
        if self.isa:
            variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa={self.isa}".strip()
        if cache := os.environ.get("LEANFORMER_TEST_CACHE"):
            variables["LEANFORMER_TEST_CACHE"] = f"{cache.rstrip('/')}_{self.core}"
            Path(variables["LEANFORMER_TEST_CACHE"]).mkdir(parents=True, exist_ok=True)
        return os.environ | variables


ROWS = {
    "oldest": Row("SSE4_2", "PRESCOTT", without=("",)),
    "avx2": Row("AVX2", "HASWELL", without=("AVX512", "X86_V4"), needs=("AVX2",)),
    "zen": Row(None, "ZEN", needs=("AVX2",)),
    "skylakex": Row(None, "SKYLAKEX", needs=("AVX512F", "AVX512BW", "AVX512DQ")),
}


def main(argv: Sequence[str]) -> int:
    selected, arguments = [*ROWS], [*argv]
    if arguments and arguments[0].startswith("--rows="):
        selected = arguments.pop(0).partition("=")[2].split(",")
    lines, failed = [], False
    for name in selected:
        row = ROWS[name]
        if missing := [feature for feature in row.needs if not FEATURES.get(feature)]:
            lines.append(f"{name:<10} skipped: the processor has no {', '.join(missing)}")
            continue
        start = time.monotonic()
        words = [sys.executable, "-m", "pytest", *(arguments or DEFAULT)]
        status = subprocess.run(words, cwd=ROOT, env=row.environment(), check=False).returncode
        lines.append(f"{name:<10} {'failed' if status else 'passed'} in {time.monotonic() - start:.0f} s")
        failed |= status != 0
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
