"""Helpers that run leanformer commands, in a subprocess or in this process (which saves starting Python and JAX)."""

import contextlib
import importlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
from messages import missing

from leanformer.runtime import mesh


ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
# The XLA flags that conftest sets in this process, without the eight devices.
FAST_COMPILE_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
FAST_COMPILE_FLAGS = f"{FAST_COMPILE_FLAGS} {os.environ.get('LEANFORMER_TEST_XLA_FLAGS', '')}".strip()


def command(module, workdir=None, changes=(), config="configs/quickstart.py"):
    """Return a command line as a list of words."""
    words = [sys.executable, "-m", f"leanformer.{module}"]
    words += [f"--config={config}"] if config else []
    words += [f"--workdir={workdir}"] if workdir else []
    return words + [f"--config.{key}={value}" for key, value in dict(changes).items()]


def subprocess_environment(cache=os.environ["LEANFORMER_TEST_CACHE"], **variables):
    """Return the environment of a subprocess outside any cluster job: CPU, fast compilation, a compilation cache."""
    result = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "OMPI_", "JAX_"))}
    result |= {"JAX_COMPILATION_CACHE_DIR": str(cache)} if cache else {}
    result |= {"JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return result | {"XLA_FLAGS": FAST_COMPILE_FLAGS, "TF_CPP_MIN_LOG_LEVEL": "2"} | variables


def start(words, env=None):
    """Start a program, whose outputs are pipes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*map(str, words)], cwd=ROOT, env=env or subprocess_environment(), **pipes)


def run(words, timeout=300, env=None, cwd=ROOT):
    """Run a program; return its exit status, standard output and standard error."""
    options = {"cwd": cwd, "env": env or subprocess_environment(), "timeout": timeout}
    result = subprocess.run([*map(str, words)], capture_output=True, text=True, **options)
    return result.returncode, result.stdout, result.stderr


def run_python(*words, **options):
    """Run Python, which must end with status 0; return its standard output."""
    status, out, err = run([sys.executable, *words], **options)
    assert status == 0, out + err
    return out


def use_one_device(make_mesh=mesh.make_mesh):
    """Return a context in which every command uses the first device: programs for eight take longer to compile."""
    return mock.patch.object(mesh, "make_mesh", lambda *_, **__: make_mesh(devices=jax.devices()[:1]))


def run_in_process(words):
    """Run a command in this process on one device; return the same as `run`. Unexpected errors propagate."""
    main, out, err = importlib.import_module(words[2]).main, io.StringIO(), io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), use_one_device():
        status = main([*map(str, words[3:])])
    return status, out.getvalue(), err.getvalue()


def check_refused(words, *parts):
    """Run a command in this process and assert that it fails with one message that mentions every part.

    Returns its standard error.
    """
    status, out, err = run_in_process(words)
    assert (status, out) == (2, ""), f"status {status}\n{out}\n{err}"
    assert err.startswith("\nError: ") and err.count("Error:") == 1, err
    assert parts and not missing(err, *parts), f"not mentioned: {missing(err, *parts)}\n{err}"
    return err
