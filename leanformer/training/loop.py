"""Training loop: step, check, log, evaluate, probe, checkpoint, stop."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from leanformer.runtime.stopping import Stopped, StopRequest
from leanformer.runtime.timing import training_seconds
from leanformer.training.evaluators import PROBE, Evaluator, due
from leanformer.training.step import TrainState
from leanformer.training.trainer import Trainer


STOPPED = "Stopped at step {step}, before the first step. To resume: {command}"


def train(
    trainer: Trainer,
    state: TrainState,
    train_step: Callable[[TrainState, Any, Any], tuple[TrainState, Any]],
    batches: Iterator[Any],
    evaluators: Mapping[str, Evaluator],
    stop: StopRequest,
    *,
    resume_command: str,
) -> tuple[TrainState, int]:
    """Train to the end, or to a stop request. This function defines the order of all events in a run.

    Returns the last state, and the exit status: 0, or the status of the stop request, which is checked after each step;
    training then saves the state, if it is healthy, and ends. The restored state is donated; `batches` are host batches
    from the next step on; evaluators, by the kind of their records, are called in this order. Raises TrainingError if
    the run diverged, CheckpointError if a save failed, DataError if too many examples are unreadable.
    """
    setup, timer, start, every = trainer.setup, trainer.timer, trainer.first_step, trainer.setup.intervals
    step, logged, last, key = start, start, max(start, every.total), setup.run_key()
    if start > every.total:
        print(f"The run has {start} steps already, more than {every.total}: it is evaluated, not trained.", flush=True)

    def log_train() -> None:
        nonlocal logged, before
        trainer.divergence.check_pending_steps(last if step == last else None)
        now = timer.seconds()
        seconds = max(training_seconds(now) - training_seconds(before), 1e-9)
        waited = now.get("data wait", 0.0) - before.get("data wait", 0.0)
        speed = (step - logged) * setup.config.batch_size / seconds
        timing = {"examples_per_s": round(speed, 2), "data_wait": round(waited / seconds, 4)}
        with timer("start-up"):  # the first time it traces the model, to count its FLOPs
            peak = setup.peak_examples
        if peak:
            timing["mfu"] = round(speed / peak, 4)
        trainer.log_train(step, timing)
        logged, before = step, now

    def evaluate() -> None:
        for kind, evaluator in evaluators.items():
            if evaluator.due(step, last) and not trainer.recorded(step, kind):
                trainer.divergence.check_pending_steps()  # so that their time does not count as evaluation
                with timer("probe" if kind == PROBE else "evaluation"):
                    values = evaluator.measure(state)
                trainer.log(step, kind, values)

    try:
        evaluate()  # the initial state, or evaluations that a stopped process saved for but did not run
    except Stopped:
        print(STOPPED.format(step=start, command=resume_command), flush=True)
        return state, stop.status
    timer.started()
    before = timer.seconds()
    while step < last:
        step += 1
        timer.begin_step(step)
        with timer("data wait" if step > start + 1 else "start-up"):
            batch = next(batches)
        if step == start + 1:
            trainer.begin()
        trainer.unreadable(batch["corrupt"])
        state, metrics = train_step(state, setup.put(batch), key)
        trainer.on_step(step, metrics)
        if due(step, every.log, last):
            log_train()
        stopping = stop.now()
        if not stopping:
            try:
                evaluate()
            except Stopped:
                stopping = True
        saved = False
        wanted = stopping or due(step, every.checkpoint, last) or trainer.is_best(step)
        if wanted and trainer.wait_and_check_healthy(step):
            with timer("checkpoint"):
                trainer.save(step, state)
            saved = True
        if stopping:
            trainer.checkpoints.wait()
            done = "Saved" if saved else "Stopped without saving, because the last steps were skipped,"
            print(f"{done} at step {step}. To resume: {resume_command}", flush=True)
            return state, stop.status
    if step == start <= every.total:  # nothing was left to train, by a config that may have another length
        trainer.begin()
    with timer("checkpoint"):
        trainer.checkpoints.wait()
    return state, 0
