"""Environment variables and limits that JAX does not work with: refused before JAX is imported."""

import os
import resource
import subprocess
import sys

import pytest
from commands import ROOT
from messages import refuses

from leanformer import cli
from leanformer.errors import ConfigError
from leanformer.runtime import environment


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("JAX_ENABLE_X64", value) for value in ("1", "True", "maybe")],
        *[("JAX_DISABLE_JIT", "on"), ("JAX_NUMPY_DTYPE_PROMOTION", "strict"), ("JAX_TRANSFER_GUARD", "disallow")],
        *[("JAX_PLATFORMS", value) for value in ("bogus", "CPU", "cpu,bogus", "cuda", "cpu,gpu")],
        *[("XLA_FLAGS", value) for value in ("--xla_bogus=1", "xla_dump_to=x", "--xla_backend_optimization_level=x")],
        ("JAX_RANDOM_SEED_OFFSET", "5"),
    ],
)
def test_variable_is_refused(name, value, monkeypatch):
    monkeypatch.setattr(environment.metadata, "entry_points", lambda group: ())  # no GPU plugin
    with refuses(f"{name}={value}"):
        environment.check(os.environ | {name: value})


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"JAX_ENABLE_X64": "False", "JAX_DISABLE_JIT": "", "JAX_NUMPY_DTYPE_PROMOTION": "standard"},
        {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        {"JAX_PLATFORMS": "", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    ],
)
def test_usual_variables_are_accepted(variables):
    environment.check({name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | variables)


@pytest.mark.parametrize(("limit", "value"), [(resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_AS, 2**30)])
def test_small_limit_is_refused(limit, value, monkeypatch):
    actual = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (value, value) if kind == limit else actual(kind))
    with refuses("ulimit"):
        environment.check({})


def test_limit_of_open_files_is_raised_and_plots_need_no_backend():
    program = "import os, resource; from leanformer.runtime import environment as e; e.prepare()"
    program += "; from matplotlib.figure import Figure; Figure().savefig(os.devnull, format='png')"
    program += "; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    words = ["sh", "-c", 'ulimit -S -n 64; "$0" -c "$1"', sys.executable, program]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "bogus"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and int(done.stdout) >= 256, done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("JAX_LOG_COMPILES", "invalid truth value 'maybe' for environment 'JAX_LOG_COMPILES'"),
        ("JAX_DEFAULT_DEVICE", "jax.default_device must be passed"),
        ("JAX_DEFAULT_MATMUL_PRECISION", 'Invalid value "x" for JAX flag jax_default_matmul_precision'),
    ],
)
def test_error_of_the_import_of_jax_names_the_variable(name, message, monkeypatch):
    """The messages are those of JAX 0.12."""

    def fail(_):
        raise ValueError(message)

    monkeypatch.setenv(name, "x")
    monkeypatch.setattr(cli.importlib, "import_module", fail)
    with refuses(f"{name}=x"):
        cli._import_execution()
    monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=message[:12]) as caught:
        cli._import_execution()
    assert not isinstance(caught.value, ConfigError)


def test_error_of_the_devices_names_the_variable():
    words = [sys.executable, "-m", "leanformer", "probe", "--config=quickstart"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "tpu"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "JAX_PLATFORMS=tpu" in done.stderr and "Traceback" not in done.stderr
