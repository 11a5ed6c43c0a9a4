"""Images: uint8 on the host, decoded, cropped and augmented there; normalised, erased and mixed on the device."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from leanformer import data
from leanformer.data import image
from leanformer.rules import sides
from leanformer.tasks import mixing as aug


VIEW = ("crop_scale", "crop_ratio", "flip")
HOST_AUGMENT = (*VIEW, "rand_magnitude", "rand_std", "rand_layers", "rand_prob", "color_jitter")


@dataclasses.dataclass(frozen=True)
class Images:
    """Images of `size`, (height, width) or the side of a square, as `image` (B height width C, uint8). `augment` is
    config.augment."""

    size: int | Sequence[int]
    channels: int
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_fraction: float
    augment: Mapping[str, Any]

    def open_source(self, name: str, split: str, dir: str | None, classes: Sequence[str] | None = None) -> data.Source:
        shape = {"image_size": self.size, "channels": self.channels, "num_classes": self.num_classes}
        shape |= {"classes": classes}
        return data.open_source(name, split, dir=dir, **shape)

    def train_batches(
        self,
        source: data.Source,
        *,
        batch_size: int,
        seed: int,
        teacher: data.Teacher | None = None,
        process: int = 0,
        processes: int = 1,
    ) -> data.Batches:
        """Shuffled, augmented. With a teacher, its answers stand in each batch beside what they are about."""
        options = {key: self.augment[key] for key in HOST_AUGMENT}
        fill = tuple(round(255 * m) for m in self.mean)  # what affine operations leave uncovered
        shape = {"size": self.size, "channels": self.channels}
        view = functools.partial(image.train_transform, fill=fill, **shape, **options)
        answer = teacher and functools.partial(teacher.answer, **{key: options[key] for key in VIEW})
        return data.Batches(
            source,
            functools.partial(_augmented, view, answer),
            batch_size=batch_size,
            train=True,
            seed=seed,
            repeats=self.augment["repeats"],
            process=process,
            processes=processes,
        )

    def eval_batches(
        self, source: data.Source, *, batch_size: int, process: int = 0, processes: int = 1
    ) -> data.Batches:
        """Centre-cropped."""
        cropped = functools.partial(_cropped, **self._crop)
        return data.Batches(source, cropped, batch_size=batch_size, train=False, process=process, processes=processes)

    @property
    def _crop(self) -> dict[str, Any]:
        return {"size": self.size, "channels": self.channels, "crop_fraction": self.crop_fraction}

    def read(self, raw: bytes | np.ndarray, name: str) -> dict[str, Any]:
        return {"image": raw}

    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return _cropped(0, example, None, **self._crop)

    def leaves(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        return {"image": ((*sides(self.size), self.channels), np.uint8)}

    def draw(
        self, batch: Mapping[str, Array], batch_key: Key[Array, ""], mix_key: Key[Array, ""]
    ) -> tuple[dict[str, Array], aug.Mix | None]:
        """When mixing is on, everything of each example's partner stands beside it."""
        size, height, width, _ = batch["image"].shape
        parts = {**batch, "key": jax.random.split(batch_key, size)}
        if not (self.augment["mixup"] or self.augment["cutmix"]):
            return parts, None
        names = ("mixup", "cutmix", "mix_prob", "switch_prob")
        mix = aug.draw_mix(mix_key, height, width, **{name: self.augment[name] for name in names})
        mix = jax.lax.optimization_barrier(mix)  # or the compiler draws it again for every pixel
        return parts | {f"partner_{name}": jnp.flip(x, axis=0) for name, x in parts.items()}, mix

    def training(self, part: dict[str, Array], mix: aug.Mix | None) -> tuple[tuple[Array, ...], Array]:
        smoothing = self.augment["label_smoothing"]
        if mix is None:
            still = aug.Mix(jnp.float32(1), jnp.zeros((1, 1), bool), jnp.float32(1))
            targets = aug.soft_targets(still, part["label"], part["label"], self.num_classes, smoothing)
            return (self._erased(part, ""),), targets
        targets = aug.soft_targets(mix, part["label"], part["partner_label"], self.num_classes, smoothing)
        return (aug.mix_images(mix, self._erased(part, ""), self._erased(part, "partner_")),), targets

    def _erased(self, part: dict[str, Array], prefix: str) -> Float[Array, "b height width c"]:
        pixels = aug.normalise(part[f"{prefix}image"], self.mean, self.std)
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(part[f"{prefix}key"], 0)
        return aug.erase(pixels, keys, self.augment["erase"])

    def plain(self, batch: Mapping[str, Array]) -> tuple[Array, ...]:
        return (aug.normalise(batch["image"], self.mean, self.std),)


def _augmented(
    view: Callable[..., np.ndarray],
    answer: Callable[..., dict[str, np.ndarray]] | None,
    index: int,
    example: Mapping[str, Any],
    draws: Callable[[], np.random.Generator],
) -> dict[str, np.ndarray]:
    picture = example["image"]
    # The teacher's generator draws what the view's own draws, so both speak of the same crop.
    return {"image": view(picture, draws())} | (answer(index, picture, draws()) if answer else {})


def _cropped(index: int, example: Mapping[str, Any], draws: object, **options: Any) -> dict[str, np.ndarray]:
    return {"image": image.eval_transform(example["image"], **options)}
