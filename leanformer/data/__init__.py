"""Images from the config's words to batches: source, transform, order."""

import functools

import numpy as np

from leanformer.data import image
from leanformer.data.loader import Batches, CorruptLog, stream
from leanformer.data.source import Source, open_source
from leanformer.data.teacher import Teacher, open_teacher


__all__ = [
    "Batches",
    "CorruptLog",
    "Source",
    "Teacher",
    "eval_batches",
    "open_source",
    "open_teacher",
    "stream",
    "train_batches",
]

VIEW = ("crop_scale", "crop_ratio", "flip")
HOST_AUGMENT = (
    *VIEW,
    "rand_magnitude",
    "rand_std",
    "rand_layers",
    "rand_prob",
    "color_jitter",
)


def _eval(picture: bytes | np.ndarray, rng: np.random.Generator, **options: object) -> np.ndarray:
    return image.eval_transform(picture, **options)


def train_batches(
    source: Source,
    *,
    batch_size: int,
    seed: int,
    image_size: int,
    channels: int,
    mean: tuple[float, ...],
    augment: dict,
    teacher: Teacher | None = None,
    process: int = 0,
    processes: int = 1,
) -> Batches:
    """Shuffled, augmented training batches; `augment` is config.augment, of which the host's part is used here.

    With a teacher, its answers stand in each batch beside what they are about.
    """
    fill = tuple(round(255 * m) for m in mean)  # what affine operations leave uncovered
    options = {key: augment[key] for key in HOST_AUGMENT}
    transform = functools.partial(image.train_transform, size=image_size, channels=channels, fill=fill, **options)
    return Batches(
        source,
        transform,
        batch_size=batch_size,
        train=True,
        seed=seed,
        repeats=augment["repeats"],
        process=process,
        processes=processes,
        answer=teacher and functools.partial(teacher.answer, **{key: options[key] for key in VIEW}),
    )


def eval_batches(
    source: Source,
    *,
    batch_size: int,
    image_size: int,
    channels: int,
    crop_fraction: float,
    process: int = 0,
    processes: int = 1,
) -> Batches:
    """Every example once, in order, centre-cropped; the last batch padded and masked."""
    transform = functools.partial(_eval, size=image_size, channels=channels, crop_fraction=crop_fraction)
    return Batches(source, transform, batch_size=batch_size, train=False, process=process, processes=processes)
