"""Callback for the `Trainer` of Lightning."""

from typing import Any

from lightning.pytorch import Callback

from leanformer.watching import watch


class LightningCallback(Callback):
    """Watch of the module during `Trainer.fit()`, whose values go to the trainer's loggers.

    Its attribute `watch` has the results. `options` are arguments of `leanformer.watch`.
    """

    def __init__(self, every: int = 100, **options: Any):
        self.options, self.watch = options | {"every": every}, None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.watch = watch(pl_module, **self.options).__enter__()
        self.watch.training_only = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if values := self.watch.record():
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.watch is not None and self.watch.open:
            self.watch.__exit__()
