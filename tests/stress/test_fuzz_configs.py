"""A small share of the fuzz of configs: what passes `check` is built and traced; and what breaks is seen."""

import importlib.util

import pytest
from commands import ROOT

from leanformer.training import checks, train_setup


SPEC = importlib.util.spec_from_file_location("fuzz", ROOT / "tests" / "stress" / "fuzz_configs.py")
fuzz = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fuzz)


def test_draws_at_random_are_refused_by_check_or_traced():
    """`follow` raises every error that is no message for the user."""
    came = [fuzz.follow(*fuzz.drawn(11, number), deep=False)[0] for number in range(16)]
    assert set(came) == {"refused by check", "traced"}


@pytest.mark.slow
def test_edge_values_one_key_at_a_time_are_refused_by_check_or_traced():
    """A sample of the values, of every family in turn; the benchmark takes all."""
    draws = [draw for i, draw in enumerate(fuzz.alone()) if i % 101 == 0 and "model" not in next(iter(draw[1]))]
    came = [(next(iter(changes)), fuzz.follow(family, changes, deep=False)[0]) for family, changes in draws[::3]]
    late = {key for key, result in came if result == "refused later"}
    assert late <= {
        f"optim.warmup_{unit}" for unit in ("epochs", "steps", "share")
    }  # these need the length of the data
    assert {result for _, result in came} >= {"refused by check", "traced"} and len(came) > 10


def test_a_seed_and_a_number_are_a_draw():
    assert fuzz.drawn(3, 5) == fuzz.drawn(3, 5) != fuzz.drawn(3, 6)
    assert fuzz.drawn(4, 5) != fuzz.drawn(3, 5)


@pytest.mark.parametrize(("module", "name"), [(checks, "check"), (train_setup, "build")])
def test_what_breaks_is_shown_and_counted(module, name, monkeypatch, capsys):
    monkeypatch.setattr(checks, "check", lambda c: None)
    monkeypatch.setattr(module, name, lambda *_, **__: 1 / 0)
    assert fuzz.main(["--draws=3", "--deep=0"]) == 1
    out = capsys.readouterr().out
    assert out.count("ZeroDivisionError: division by zero") == 3 and "     3 BROKEN" in out
