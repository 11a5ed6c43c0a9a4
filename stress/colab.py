"""Notebooks in an environment like Colab's: Python 3.13 with an older JAX, without a GPU.

    python stress/colab.py --python=python3.13 [--notebooks=conditioning,rank] [--gpu]

Builds the environment with Colab's versions of September 2026, makes a local clone where `git clone` of the first cell
would put it, and runs every cell of each notebook with IPython, at reduced size (tests/small_notebooks.py). Prints
versions, devices and seconds per notebook. Exit status 1 if a notebook fails.

--gpu runs the first cell as on a GPU runtime instead: with Colab's CUDA plugin and an `nvidia-smi` that does nothing.
The cell must install JAX with a plugin of the same version, and then stop, because there is no GPU. No notebook is
tested on a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import nbformat


ROOT = Path(__file__).resolve().parents[1]
COLAB = ("jax==0.7.2", "jaxlib==0.7.2", "flax==0.11.2", "numpy==2.1.3", "optax==0.2.8", "orbax-checkpoint==0.12.4")
COLAB += ("grain==0.2.18", "array_record==0.8.3", "tensorflow-datasets==4.9.10", "numba==0.61.2", "matplotlib")
CUDA = ("jax-cuda12-plugin==0.7.2", "jax-cuda12-pjrt==0.7.2")
COLAB += ("ipython", "matplotlib-inline", "nbformat")


def run(*words: object, cwd: Path, environment: Mapping[str, str] | None = None, fails: bool = False) -> str:
    """Run a command and return its output. Raises SystemExit if it fails, or if it should fail and does not."""
    done = subprocess.run(
        [*map(str, words)],
        cwd=cwd,
        env=environment,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if bool(done.returncode) != fails:
        raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def check_gpu_runtime(python: Path, content: Path) -> None:
    """Run the first cell of a notebook as on a GPU runtime, and check versions and the error."""
    run(python, "-m", "pip", "install", "--quiet", *COLAB, *CUDA, cwd=content)
    program = content / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    notebook = json.loads((content / "leanformer" / "notebooks" / "conditioning.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (content / "first.ipynb").write_text(json.dumps(notebook | {"cells": code[:1]}))
    variables = {"COLAB_RELEASE_TAG": "like Colab", "PATH": f"{program.parent}:{os.environ['PATH']}"}
    words = (python, "-m", "IPython", "--colors=NoColor", "first.ipynb")
    output = run(*words, cwd=content, environment=os.environ | variables, fails=True)
    listed = json.loads(run(python, "-m", "pip", "list", "--format=json", cwd=content))
    versions = {item["name"]: item["version"] for item in listed if item["name"].startswith("jax")}
    assert len({versions[name] for name in ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt")}) == 1, versions
    assert "JAX computes on the CPU" in output, output
    print(output[-400:], versions)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="python3.13", help="interpreter of the environment")
    parser.add_argument(
        "--notebooks", default=",".join(sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")))
    )
    parser.add_argument("--gpu", action="store_true", help="run the first cell as on a GPU runtime")
    args = parser.parse_args(argv)
    sys.path.append(str(ROOT / "tests"))
    import small_notebooks

    with tempfile.TemporaryDirectory() as folder:
        content = Path(folder)  # /content of Colab
        run(args.python, "-m", "venv", "venv", cwd=content)
        run("git", "clone", "--quiet", ROOT, "leanformer", cwd=content)
        python = content / "venv" / "bin" / "python"
        if args.gpu:
            check_gpu_runtime(python, content)
            return
        for name in args.notebooks.split(","):
            run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "leanformer", cwd=content)
            run(python, "-m", "pip", "install", "--quiet", *COLAB, cwd=content)
            variables = {"COLAB_RELEASE_TAG": "like Colab", "MPLBACKEND": "agg"}
            notebook = content / "leanformer" / "notebooks" / f"{name}.ipynb"
            nbformat.write(small_notebooks.read(notebook), notebook)
            start = time.monotonic()
            words = (python, "-m", "IPython", "--colors=NoColor", notebook)
            output = run(*words, cwd=content, environment=os.environ | variables)
            lines = [line for line in output.splitlines() if line.startswith(("Python 3", "Devices:"))]
            print(f"{name}: {time.monotonic() - start:.0f} s", *lines, sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
