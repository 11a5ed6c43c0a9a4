"""The loop over steps: of one run, or of several that one program steps side by side (`training/together.py`)."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from ml_collections import ConfigDict

from leanformer.costs import hardware
from leanformer.runtime import peers
from leanformer.runtime.interrupt import StopRequest
from leanformer.runtime.watch import Watchdog
from leanformer.training import goodput, streams
from leanformer.training.experiment import Experiment
from leanformer.training.session import Session
from leanformer.training.state import TrainState


@runtime_checkable
class Program(Protocol):
    """What steps the runs of a loop, and holds their states."""

    compiled: jax.stages.Compiled

    def step(self, hosts: Sequence[Mapping[str, np.ndarray]]) -> Sequence[Mapping[str, Any]]:
        """One step of each, from its batch in host memory; its metrics, as `step.make_train_step` has them."""

    def state(self, run: int) -> TrainState:
        """Of one of them, now."""


class Alone:
    """The program of a single run, on all devices of its mesh. `state` is given away to it."""

    def __init__(self, run: Experiment, state: TrainState, clock: goodput.Clock):
        with clock("compile"):
            self.compiled = run.compile_train_step()
        self._run, self._state, self._key = run, state, run.run_key()

    def step(self, hosts: Sequence[Mapping[str, np.ndarray]]) -> Sequence[Mapping[str, Any]]:
        [host] = hosts
        self._state, metrics = self.compiled(self._state, streams.put(self._run, host), self._key)
        return [metrics]

    def state(self, run: int) -> TrainState:
        return self._state


class Loop:
    """Steps runs to their end, and does whatever is due between two steps.

    Args:
        sessions: begun, all at one step, with one rhythm; several have no patience (`together.check`).
        program: that steps them.
    """

    def __init__(
        self, sessions: Sequence[Session], program: Program, *, clock: goodput.Clock, watch: Watchdog, stop: StopRequest
    ):
        self.sessions, self.program = sessions, program
        self.clock, self.watch, self.stop = clock, watch, stop
        run = sessions[0].run
        self.config, self.start, self._recorded = run.config, sessions[0].start, sessions[0].start
        peak = hardware.peak_flops(run.device) if run.config.dtype == "bfloat16" else None
        self._peak = peak and peak * run.mesh.size

    def run(self, again: str) -> int:
        """Trains to the end, or to a stop request: the exit status. `again`: how to go on, for who stopped it.

        Raises:
            TrainingError, DataError, CheckpointError: as `Health`, `data.CorruptLog` and `Checkpoints` do.
        """
        start, total = self.start, self._last(self.start)
        # What was due when an earlier run was stopped, between its save and this; and the probe at initialisation.
        if start and not self._evaluate(start, total):
            print(f"Stopped at step {start}, where it began. To go on: {again}", flush=True)
            return self.stop.status
        total = self._last(start)
        for i, session in enumerate(self.sessions):
            if session.probe_due(start, total) and not peers.same(session.record.has(start, "probe")):
                session.probe(start, self.program.state(i))

        self.clock.started()
        step = start
        while step < total:
            step += 1
            self._step(step)
            total = self._last(step)
            if step % self.config.log_every == 0 or step == total:
                self._look_back(step, ends=step == total)
            stopping = self.stop.now() or not self._evaluate(step, total)
            if all(step in session.saved.scores for session in self.sessions) and self._last(step) == step < total:
                total = step
                print(given_up(self.config, step, self.sessions[0].run.total), flush=True)
                if self._recorded < step:
                    self._look_back(step, ends=True)
                stopping = stopping or not self._evaluate(step, total)
            for i, session in enumerate(self.sessions):
                if session.probe_due(step, total) and not stopping:
                    session.probe(step, self.program.state(i))
            sound = self._save(step) if stopping or any(s.save_due(step, total) for s in self.sessions) else True
            if stopping:
                self._wait()
                skipped = max(session.health.skipped for session in self.sessions)
                what = "Saved" if sound else f"Stopped, and not saved since {skipped} steps were skipped,"
                print(f"{what} at step {step}. To go on: {again}", flush=True)
                return self.stop.status
        with self.clock("checkpoint"):
            self._wait()
        return 0

    def _step(self, step: int) -> None:
        self.watch.step(step)
        with self.clock("data wait" if step > self.start + 1 else "start-up"):  # of what reads the data
            hosts = [next(session.batches) for session in self.sessions]
        for session, host in zip(self.sessions, hosts, strict=True):
            if step == self.start + 1:
                session.keep_config()
            session.corrupt(host["corrupt"])
        for session, metrics in zip(self.sessions, self.program.step(hosts), strict=True):
            session.sent(step, metrics)

    def _last(self, step: int) -> int:
        return max(session.last(step) for session in self.sessions)

    def _evaluate(self, step: int, last: int) -> bool:
        """False where a stop request came between."""
        pairs = enumerate(self.sessions)
        return all(s.evaluate_due(step, lambda i=i: self.program.state(i), last, self.stop) for i, s in pairs)

    def _look_back(self, step: int, *, ends: bool) -> None:
        """Records of the steps since the last ones, with examples a second of each run, evaluation and saving left out,
        the share of the time that waited for data, and of what the devices could do."""
        for session in self.sessions:
            session.settle(step, ends=ends)
        seconds, waited = self.clock.lap()
        speed = (step - self._recorded) * self.config.batch_size / seconds
        timing = {"examples_per_s": round(speed, 2), "data_wait": round(waited / seconds, 4)}
        if self._peak:
            asked = sum(session.run.flops_per_example[1] for session in self.sessions)
            timing["mfu"] = round(speed * asked / self._peak, 4)
        for session in self.sessions:
            session.look_back(step, timing)
        self._recorded = step

    def _save(self, step: int) -> bool:
        """All runs or none, so that they can go on side by side; False where a state is not sound."""
        sound = all(session.sound(step) for session in self.sessions)
        for i, session in enumerate(self.sessions if sound else ()):
            session.save(step, self.program.state(i))
        return sound

    def _wait(self) -> None:
        for session in self.sessions:
            session.saved.wait()


def given_up(c: ConfigDict, step: int, total: int) -> str:
    """What is said where patience has run out."""
    return (
        f"It ends at step {step} of {total}: the last {c.eval.patience} evaluations were no better than one before "
        "them. To go on, raise eval.patience or set it to 0."
    )
