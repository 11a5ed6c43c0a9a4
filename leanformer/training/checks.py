"""Static validation of a config, before data are opened or devices are used."""

from typing import Any

from leanformer import conditioning, config, models, tasks
from leanformer.config import rules
from leanformer.training import loggers


def check(c: Any) -> None:
    """Validate every key of a config: types, allowed values and rules. The set-up of a run finds wrong shapes.

    Raises ConfigError if a key is invalid; the message names the key, its value and the fix.
    """
    config.check_keys(c)
    models.check(**c.model.to_dict())
    config.check(c)
    loggers.check(c.loggers)
    tasks.build(c)
    if rules.measures_conditioning(c):
        conditioning.tap(c.probe.measures)
