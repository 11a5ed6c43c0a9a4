"""The wheel, the demo, a notebook and the fast tests under other versions of Python.

    python stress/pythons.py --python=python3.13 [--python=python3.14] [--skip=tests] [--jobs=2]

For each interpreter: builds the wheel, installs it alone with the versions of constraints.txt, and runs the commands of
`make demo` and language.ipynb (at reduced size) with it outside the repository; then adds the packages for tests and
runs the fast tests in a clone. Prints versions, results and minutes. Exit status 1 if anything fails.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from colab import ROOT, run


NOTEBOOK = "language"  # uses leanformer alone; the others also use experiments/
DEMO = (
    "train --config=quickstart --workdir=runs/quickstart",
    "evaluate --workdir=runs/quickstart",
    "probe --workdir=runs/quickstart",
    "cost --config=quickstart --against=quickstart_baseline",
    "compare runs/quickstart",
)
PARTS = ("demo", "notebook", "tests")


def check(interpreter: str, folder: Path, skip: Sequence[str], jobs: int) -> None:
    """Check one interpreter, and print a line per part. Raises SystemExit with the output of what fails."""
    clone, elsewhere = folder / "clone", folder / "elsewhere"
    elsewhere.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"LEANFORMER_SMALL": "1", "MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu"}
    run("git", "clone", "--quiet", ROOT, clone, cwd=folder)
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=clone)
    (wheel,) = folder.glob("*.whl")
    run(interpreter, "-m", "venv", "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    install = (python, "-m", "pip", "install", "--quiet", "--constraint", clone / "constraints.txt")
    run(*install, wheel, cwd=folder)
    versions = "import sys, jax, numpy; print(*sys.version.split()[:1], 'jax', jax.__version__, numpy.__version__)"
    print(f"Python {run(python, '-c', versions, cwd=elsewhere, environment=environment).strip()}", flush=True)

    def demo() -> str:
        for words in DEMO:
            output = run(python, "-m", "leanformer", *words.split(), cwd=elsewhere, environment=environment)
        return output.strip().splitlines()[0]

    def notebook() -> str:
        run(*install, "ipython", "matplotlib-inline", "nbformat", cwd=folder)
        path = clone / "notebooks" / f"{NOTEBOOK}.ipynb"
        run(python, "-m", "IPython", "--colors=NoColor", path, cwd=elsewhere, environment=environment)
        return "runs"

    def tests() -> str:
        run(*install, "--editable", ".[dev]", cwd=clone)
        words = ("-m", "pytest", "-n", jobs, "-m", "not slow", "-p", "no:cacheprovider")
        return run(python, *words, cwd=clone, environment=environment).strip().splitlines()[-1]

    parts: dict[str, Callable[[], str]] = {"demo": demo, "notebook": notebook, "tests": tests}
    for name, part in parts.items():
        if name not in skip:
            start = time.monotonic()
            print(f"  {name}: {part()}; {(time.monotonic() - start) / 60:.1f} min", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", required=True, help="interpreter; may be given several times")
    parser.add_argument("--skip", action="append", choices=PARTS, default=[], help="part to leave out")
    parser.add_argument("--jobs", type=int, default=2, help="processes of the tests")
    args = parser.parse_args(argv)
    for interpreter in args.python:
        with tempfile.TemporaryDirectory() as folder:
            check(interpreter, Path(folder), args.skip, args.jobs)


if __name__ == "__main__":
    main()
