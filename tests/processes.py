"""Helpers that run leanformer commands in one or several subprocesses."""

import socket
import sys

from commands import start, subprocess_environment

from leanformer.training import run_files


def find_free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start_processes(module, workdir, cache, processes=1, *, config, extra=(), last=()):
    """Start a command in `processes` connected processes; `last` are additional flags of the last one."""
    words = [sys.executable, "-m", f"leanformer.{module}", f"--workdir={workdir}", *extra]
    words += ["--config=configs/quickstart.py"] if config else []
    words += [f"--config.{key}={value}" for key, value in config.items()]
    connection = [f"--coordinator=localhost:{find_free_port()}", f"--processes={processes}"] if processes > 1 else []
    flags_by_process = [
        [*connection, f"--process={i}", *(last if i == processes - 1 else ())] if connection else []
        for i in range(processes)
    ]
    return [start([*words, *flags], subprocess_environment(cache)) for flags in flags_by_process]


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
