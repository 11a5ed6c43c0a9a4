"""Settings of the rows of processors.py reach a test process, and missing settings are detected."""

import os
import sys
from pathlib import Path

import pytest
from stress import processors


MACHINE = processors.cpu_features()
ROWS = {row.name: row for row in processors.ROWS}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")


def test_settings_of_this_process_match_its_row():
    if processors.NAME not in os.environ:
        pytest.skip("not started by processors.py")
    row = ROWS[os.environ[processors.NAME]]
    disabled = os.environ.get("NPY_DISABLE_CPU_FEATURES", "").split()
    machine = MACHINE | {"enabled": [*MACHINE["enabled"], *disabled]}
    assert processors.deviations(row, machine, processors.read_state()) == []


def test_settings_of_a_row_reach_a_test_process():
    row = next((row for row in processors.ROWS if row.obstacle(MACHINE) is None), None)
    if row is None or processors.NAME in os.environ:
        pytest.skip("no row for this machine, or already run by processors.py")
    file = str(Path(__file__))
    result = processors.run(row, MACHINE, ["-n", "0", "-p", "no:cacheprovider", file, "-k", "match_its_row"])
    assert (result.passed, result.failed) == (1, 0), result.failures


def test_settings_without_effect_are_detected():
    machine = {"optional": ["X86_V3", "X86_V4"], "enabled": ["SSE42", "AVX2", "X86_V3", "X86_V4"]}
    row = ROWS["avx2"]
    assert row.obstacle(machine) is None and row.disabled(machine) == ["X86_V4"]
    assert "AVX2" in row.obstacle(machine | {"enabled": ["SSE42"]})
    assert ROWS["oldest"].disabled(machine) == ["X86_V3", "X86_V4"] and ROWS["zen"].disabled(machine) == []

    cores = {"numpy.libs": "Haswell", "scipy.libs": "Haswell"}
    right = {"features": {"enabled": ["AVX2", "X86_V3"]}, "cores": cores, "xla": "--a --xla_cpu_max_isa=AVX2"}
    assert processors.deviations(row, machine, right) == []
    wrong = [
        right | {"features": machine},
        right | {"cores": cores | {"scipy.libs": "SkylakeX"}},
        right | {"cores": {"numpy.libs": "Haswell"}},
        right | {"xla": "--xla_cpu_max_isa=AVX512"},
    ]
    assert all(len(processors.deviations(row, machine, result)) == 1 for result in wrong)
