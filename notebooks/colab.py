"""Set-up of a notebook on Colab: its first cell clones the repository and calls `main`.

Installs leanformer from the clone, on a GPU runtime with JAX for CUDA 12: Colab's own JAX is older than leanformer
requires, and its CUDA plugin does not work with a newer one. Then prints versions and devices. Stops with a message if
the session has to be restarted, or if JAX would compute on the CPU of a GPU runtime.
"""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path


CLONE = Path(__file__).resolve().parents[1]
NUMPY = "numpy>=2.2,<2.3"  # JAX requires 2.2; Colab's numba works below 2.3
PACKAGES = ("jax", "jaxlib", "numpy", "flax", "leanformer")


def install(*, gpu: bool) -> None:
    """Install leanformer, with JAX for CUDA on a GPU. Raises RuntimeError if pip fails or a restart is needed."""
    imported = {name: sys.modules[name].__version__ for name in ("jax", "jaxlib", "numpy") if name in sys.modules}
    words = [sys.executable, "-m", "pip", "install", "--quiet", f"{CLONE}[cuda]" if gpu else f"{CLONE}[train]", NUMPY]
    if subprocess.run(words, check=False).returncode:
        raise RuntimeError(f"Installation failed: {' '.join(words)}")
    importlib.invalidate_caches()
    if outdated := [name for name, version in imported.items() if importlib.metadata.version(name) != version]:
        raise RuntimeError(
            "Restart the session (Runtime > Restart session), then run this cell again: it has imported an older "
            f"version of {', '.join(outdated)}."
        )


def check(*, gpu: bool) -> None:
    """Print versions and devices.

    Raises RuntimeError if JAX does not see the GPU of a GPU runtime.
    """
    import jax

    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    print(f"Python {sys.version.split()[0]}, {versions}\nDevices: {', '.join(map(str, jax.devices()))}")
    if gpu and jax.default_backend() == "cpu":
        raise RuntimeError(
            "This runtime has a GPU, but JAX computes on the CPU. Choose Runtime > Disconnect and delete runtime, then "
            "run this cell first."
        )


def main() -> None:
    gpu = shutil.which("nvidia-smi") is not None
    if not [*importlib.metadata.Distribution.discover(name="leanformer")]:  # find_spec would find the clone's folder
        install(gpu=gpu)
    if str(CLONE) not in sys.path:
        sys.path.append(str(CLONE))  # for study/
    check(gpu=gpu)


if __name__ == "__main__":
    main()
