"""Learning-rate and beta1 schedules, by hand."""

import jax.numpy as jnp
import numpy as np
from messages import refuses

from leanformer.training import optimizers, train_setup


# float32 rounds a cosine by 6e-8: 2e-6 of a final rate 30 times below the peak. An off-by-one step changes it by 1e-2.
RTOL = 1e-5
PLAN = {"lr": 3e-3, "warmup_lr": 1e-5, "final_lr": 1e-4, "warmup": 20, "total": 100}


def test_schedule():
    def rate_at(step):
        return float(optimizers.learning_rate(step, **PLAN))

    np.testing.assert_allclose(rate_at(0), 1e-5, rtol=RTOL)
    np.testing.assert_allclose(rate_at(10), (1e-5 + 3e-3) / 2, rtol=RTOL)
    np.testing.assert_allclose(rate_at(20), 3e-3, rtol=RTOL)
    np.testing.assert_allclose(rate_at(60), (3e-3 + 1e-4) / 2, rtol=RTOL)
    np.testing.assert_allclose(rate_at(100), 1e-4, rtol=RTOL)
    np.testing.assert_allclose(rate_at(1000), 1e-4, rtol=RTOL)


def test_constant_stays_at_the_peak():
    result = [float(optimizers.learning_rate(step, **PLAN, schedule="constant")) for step in (10, 20, 61, 100)]
    np.testing.assert_allclose(result, [1.505e-3, 3e-3, 3e-3, 3e-3], rtol=RTOL)


def test_warm_up_is_a_share_of_the_run(tiny):
    tiny.total_steps = 92
    tiny.optim.update(schedule="linear", warmup_share=0.25, lr=1.0, warmup_lr=0.0)
    run = train_setup.set_up_training(tiny, examples=64, mesh=None)
    assert run.schedule.warmup == 23
    result = [run.schedule(jnp.int32(step))[0] for step in (0, 13, 23, 61)]
    np.testing.assert_allclose(result, [0, 13 / 23, 1, 31 / 69], rtol=RTOL, atol=1e-7)
    tiny.optim.warmup_share = 0.999
    with refuses("optim.warmup_share=0.999"):
        train_setup.set_up_training(tiny, examples=64, mesh=None)


def test_beta1_goes_down_and_up_again(tiny):
    tiny.optim.update(warmup_steps=4, b1=0.95, b1_peak=0.85)
    schedule = optimizers.make_schedule(tiny, examples=None, total=12)
    result = [float(schedule(step)[1]) for step in (0, 2, 4, 8, 12)]
    np.testing.assert_allclose(result, [0.95, 0.9, 0.85, 0.9, 0.95], rtol=RTOL)


def test_no_warmup_starts_at_the_peak():
    np.testing.assert_allclose(optimizers.learning_rate(0, **(PLAN | {"warmup": 0})), 3e-3, rtol=RTOL)
