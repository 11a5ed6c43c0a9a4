"""A small sample of the config fuzz: configs that pass `check` can be built and traced, and crashes are reported."""

import importlib.util

import pytest
from commands import ROOT

from leanformer.training import checks, train_setup


SPEC = importlib.util.spec_from_file_location("fuzz", ROOT / "tests" / "stress" / "fuzz_configs.py")
fuzz = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fuzz)


def test_random_configs_are_refused_by_check_or_traced():
    """`try_config` raises every error that is not a message for the user."""
    outcomes = [fuzz.try_config(*fuzz.draw_changes(15, number), deep=False)[0] for number in range(16)]
    assert set(outcomes) == {"refused by check", "traced"}


@pytest.mark.slow
def test_single_edge_values_are_refused_by_check_or_traced():
    """A sample of the values of every architecture; `fuzz_configs.py --alone` tries all."""
    draws = [
        draw for i, draw in enumerate(fuzz.iterate_single_keys()) if i % 101 == 0 and "model" not in next(iter(draw[1]))
    ]
    outcomes = [
        (next(iter(changes)), fuzz.try_config(architecture, changes, deep=False)[0])
        for architecture, changes in draws[::3]
    ]
    refused_later = {key for key, result in outcomes if result == "refused later"}
    assert refused_later <= {
        f"optim.warmup_{unit}" for unit in ("epochs", "steps", "share")
    }  # these need the length of the data
    assert {result for _, result in outcomes} >= {"refused by check", "traced"} and len(outcomes) > 10


def test_draws_are_determined_by_seed_and_number():
    assert fuzz.draw_changes(3, 5) == fuzz.draw_changes(3, 5) != fuzz.draw_changes(3, 6)
    assert fuzz.draw_changes(4, 5) != fuzz.draw_changes(3, 5)


@pytest.mark.parametrize(("module", "name"), [(checks, "check"), (train_setup, "build")])
def test_crashes_are_printed_and_counted(module, name, monkeypatch, capsys):
    monkeypatch.setattr(checks, "check", lambda c: None)
    monkeypatch.setattr(module, name, lambda *_, **__: 1 / 0)
    assert fuzz.main(["--draws=3", "--deep=0"]) == 1
    out = capsys.readouterr().out
    assert out.count("ZeroDivisionError: division by zero") == 3 and "     3 BROKEN" in out
