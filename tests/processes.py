"""Helpers that run leanformer commands in one or several subprocesses."""

import os
import socket
import subprocess
import sys

from commands import FAST_COMPILE_FLAGS, ROOT

from leanformer.training import run_files


def find_free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def make_environment(cache):
    """Return the environment of a CPU process outside any cluster job, with `cache` as compilation cache."""
    result = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "OMPI_", "JAX_"))}
    result |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST_COMPILE_FLAGS, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    return result | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "TF_CPP_MIN_LOG_LEVEL": "2"}


def start_processes(module, workdir, cache, processes=1, *, config, extra=(), last=()):
    """Start a command in `processes` connected processes; `last` are additional flags of the last one."""
    words = [sys.executable, "-m", f"leanformer.{module}", f"--workdir={workdir}", *extra]
    words += ["--config=configs/quickstart.py"] if config else []
    words += [f"--config.{key}={value}" for key, value in config.items()]
    connection = [f"--coordinator=localhost:{find_free_port()}", f"--processes={processes}"] if processes > 1 else []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    flags_by_process = [
        [*connection, f"--process={i}", *(last if i == processes - 1 else ())] if connection else []
        for i in range(processes)
    ]
    return [
        subprocess.Popen([*words, *flags], cwd=ROOT, env=make_environment(cache), **pipes) for flags in flags_by_process
    ]


def wait_for_processes(running, timeout=200):
    """Wait for processes; return their exit statuses, standard outputs and standard errors."""
    try:
        outputs = [process.communicate(timeout=timeout) for process in running]
    finally:
        for process in running:
            process.kill()
    return [process.returncode for process in running], [out for out, _ in outputs], [err for _, err in outputs]


def read_records_by_step(workdir, kind):
    """Return the metrics records of one kind in a workdir, by step."""
    return {record["step"]: record for record in run_files.read_records(workdir, kind)}
