"""Training loop: step, check, log, evaluate, probe, checkpoint, stop."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from leanformer.runtime.stopping import Stopped, StopRequest
from leanformer.training.evaluators import PROBE, Evaluator, due
from leanformer.training.run import Run
from leanformer.training.state import TrainState


def train(
    run: Run,
    state: TrainState,
    step_fn: Callable[[TrainState, Any], tuple[TrainState, Any]],
    batches: Iterator[Any],
    evaluators: Mapping[str, Evaluator],
    stop: StopRequest,
    *,
    again: str,
) -> tuple[TrainState, int]:
    """Train to the end, or to a stop request. This function defines the order of all events in a run.

    Args:
        run: open and restored run.
        state: restored state, which is donated.
        step_fn: function (state, host batch) -> (state, metrics).
        batches: host batches from the next step on.
        evaluators: evaluators by the kind of their records, called in this order.
        stop: stop request, checked after each step; training then saves the state, if it is healthy, and ends.
        again: command that resumes the run, for messages.

    Returns:
        The last state, and the exit status: 0, or that of the stop request.

    Raises:
        TrainingError: the run diverged.
        CheckpointError: a checkpoint could not be saved.
        DataError: too many examples are unreadable.
    """
    c, timer, start, every, peak_examples = run.config, run.timer, run.start, run.intervals, run.peak_examples
    step, logged, last = start, start, max(start, every.total)
    if start > every.total:
        print(f"The run has {start} steps already, more than {every.total}: it is evaluated, not trained.", flush=True)

    def log_train() -> None:
        nonlocal logged
        run.settle(steps=last if step == last else None)
        seconds, waited = timer.lap()
        speed = (step - logged) * c.batch_size / seconds
        timing = {"examples_per_s": round(speed, 2), "data_wait": round(waited / seconds, 4)}
        if peak_examples:
            timing["mfu"] = round(speed / peak_examples, 4)
        run.log_train(step, timing if step > start else {})
        logged = step

    def evaluate() -> None:
        for kind, evaluator in evaluators.items():
            if evaluator.due(step, last) and not run.recorded(step, kind):
                run.settle()  # so that the time of pending steps does not count as evaluation
                with timer("probe" if kind == PROBE else "evaluation"):
                    values = run.measure(evaluator, state)
                run.log(step, kind, values)

    try:
        evaluate()  # the initial state, or evaluations that a stopped process saved for but did not run
    except Stopped:
        print(f"Stopped at step {start}, before the first step. To resume: {again}", flush=True)
        return state, stop.status
    timer.started()
    while step < last:
        step += 1
        timer.begin_step(step)
        with timer("data wait" if step > start + 1 else "start-up"):
            batch = next(batches)
        if step == start + 1:
            run.begin()
        run.corrupt(batch["corrupt"])
        state, metrics = step_fn(state, batch)
        run.on_step(step, metrics)
        if due(step, every.log, last):
            log_train()
        stopping = stop.now()
        if not stopping:
            try:
                evaluate()
            except Stopped:
                stopping = True
        saved = False
        if (stopping or due(step, every.checkpoint, last) or run.is_best(step)) and run.may_save(step):
            with timer("checkpoint"):
                run.save(step, state)
            saved = True
        if stopping:
            run.wait()
            done = "Saved" if saved else "Stopped without saving, because the last steps were skipped,"
            print(f"{done} at step {step}. To resume: {again}", flush=True)
            return state, stop.status
    if step == start <= every.total:  # nothing was left to train, by a config that may have another length
        run.begin()
    with timer("checkpoint"):
        run.wait()
    return state, 0
