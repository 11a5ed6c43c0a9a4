"""Callback for the `Trainer` of transformers."""

from typing import Any

import transformers

from leanformer.watching import watch


class TrainerCallback(transformers.TrainerCallback):
    """Watch of the model during `Trainer.train()`, whose values are added to each record of the log.

    `Trainer(..., callbacks=[TrainerCallback()])` adds them to `trainer.state.log_history`. For loggers such as W&B, put
    it before them: `trainer.callback_handler.callbacks.insert(0, TrainerCallback())`. Its attribute `watch` has the
    results. `options` are arguments of `leanformer.watch`.
    """

    def __init__(self, every: int = 100, **options: Any):
        self.options, self.watch = options | {"every": every}, None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.watch = watch(model, **self.options).__enter__()
        self.watch.training_only = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.watch is not None and self.watch.open:
            values = self.watch.record()
            logs.update(values)
            state.log_history[-1].update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.watch is not None:
            self.watch.__exit__()
