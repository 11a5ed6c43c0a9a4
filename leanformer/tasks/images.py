"""Image classification: uint8 images, decoded, cropped and augmented on the host; normalised, erased and mixed on the
device."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from leanformer import data
from leanformer.config.rules import image_sides
from leanformer.data.images import KINDS, build, transforms
from leanformer.data.source import find
from leanformer.tasks import losses, mixup
from leanformer.tasks.classification import LABEL, Classification, labelled
from leanformer.tasks.task import Batch, DataModule, Spec, Task


HOST_AUGMENT = ("crop_scale", "crop_ratio", "flip")
HOST_AUGMENT += ("rand_magnitude", "rand_std", "rand_layers", "rand_prob", "color_jitter")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageData(DataModule):
    """Data of image classification: batches of `image` (B height width C, uint8) and `label` (B, int32).

    Attributes:
        size: side of the images in pixels, or (height, width).
        channels: number of channels C, 1 or 3.
        num_classes: number of classes of the model.
        mean: mean of each channel, 0 to 1, with which geometric augmentation fills uncovered pixels.
        crop_fraction: side of the central crop over that of the resized image, in evaluation.
        augment: section config.augment.
        name: value of `data.name`.
        dir: folder of TFDS data; None for the default.
    """

    size: int | Sequence[int]
    channels: int
    num_classes: int
    mean: tuple[float, ...]
    crop_fraction: float
    augment: Mapping[str, Any]
    name: str = "synthetic"
    dir: str | None = None

    def build(self) -> bool:
        return build(self.name, self.dir)

    def open(self, split: str, classes: Sequence[str] | None = None) -> data.Source:
        shape = {"image_size": self.size, "channels": self.channels, "num_classes": self.num_classes}
        return data.open_images(self.name, split, dir=self.dir, classes=classes, **shape)

    def train_batches(self, source: data.Source, **options: Any) -> data.Batches:
        """Return endless batches of shuffled, augmented images; `options`: see `DataModule.train_batches`."""
        prepare = labelled(source, self._augmented)
        return data.Batches(source, prepare, train=True, repeats=self.augment["repeats"], **options)

    def eval_batches(self, source: data.Source, **options: Any) -> data.Batches:
        """Return batches of central crops, for evaluation; `options` are arguments of `DataModule.eval_batches`."""
        return data.Batches(source, labelled(source, self._cropped), train=False, **options)

    @functools.cached_property
    def _augmentation(self) -> transforms.Augmentation:
        settings = {key: self.augment[key] for key in HOST_AUGMENT}
        return transforms.Augmentation(**settings, fill=tuple(round(255 * m) for m in self.mean))

    def _augmented(
        self, index: int, example: Mapping[str, Any], draws: Callable[[], np.random.Generator]
    ) -> dict[str, np.ndarray]:
        shape = {"size": self.size, "channels": self.channels}
        return {
            "image": transforms.train_transform(example["image"], draws(), **shape, augmentation=self._augmentation)
        }

    def _cropped(self, index: int, example: Mapping[str, Any], draws: object) -> dict[str, np.ndarray]:
        shape = {"size": self.size, "channels": self.channels, "crop_fraction": self.crop_fraction}
        return {"image": transforms.eval_transform(example["image"], **shape)}

    def input_specs(self) -> dict[str, Spec]:
        return {"image": ((*image_sides(self.size), self.channels), np.uint8)}

    def target_specs(self, *, train: bool) -> dict[str, Spec]:
        return LABEL

    def read(self, raw: Any) -> dict[str, Any]:
        return {"image": raw}

    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return self._cropped(0, example, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageClassification(Classification):
    """Objective of image classification: cross-entropy with smoothed labels, random erasing, mixup and cutmix.

    Attributes:
        num_classes, kind: as in `Classification`.
        mean, std: mean and standard deviation of each channel, 0 to 1, with which images are normalised.
        augment: section config.augment.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: Mapping[str, Any]

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        return (mixup.normalise(batch["image"], self.mean, self.std),)

    def prepare_train_batch(
        self, batch: Batch, batch_key: Key[Array, ""], shared_key: Key[Array, ""]
    ) -> tuple[dict[str, Array], mixup.Mix | None]:
        """Return the batch with a random `key` (B), and the parameters of mixup or CutMix; None if both are off.

        With mixing, the batch also has each array of the batch in reversed order, as `partner_<name>`: the example that
        each one is mixed with.
        """
        parts, _ = super().prepare_train_batch(batch, batch_key, shared_key)
        if not (self.augment["mixup"] or self.augment["cutmix"]):
            return parts, None
        _, height, width, _ = batch["image"].shape
        names = ("mixup", "cutmix", "mix_prob", "switch_prob")
        mix = mixup.draw_mix(shared_key, height, width, **{name: self.augment[name] for name in names})
        mix = jax.lax.optimization_barrier(mix)  # or the compiler draws it again for every pixel
        return parts | {f"partner_{name}": jnp.flip(x, axis=0) for name, x in parts.items()}, mix

    def loss(self, model: Any, part: dict[str, Array], batch_aux: Any, key: Key[Array, "b"] | None) -> Float[Array, ""]:
        images, targets = self._mixed(part, batch_aux)
        logits, _ = model(images, key=key)
        return losses.classify(logits, targets, self.kind).sum()

    def _mixed(
        self, part: dict[str, Array], mix: mixup.Mix | None
    ) -> tuple[Float[Array, "b height width c"], Float[Array, "b v"]]:
        """Return the images and soft targets of a prepared batch."""
        smoothing = self.augment["label_smoothing"]
        if mix is None:
            still = mixup.Mix(jnp.float32(1), jnp.zeros((1, 1), bool), jnp.float32(1))
            targets = mixup.soft_targets(still, part["label"], part["label"], self.num_classes, smoothing)
            return self._erased(part, ""), targets
        targets = mixup.soft_targets(mix, part["label"], part["partner_label"], self.num_classes, smoothing)
        return mixup.mix_images(mix, self._erased(part, ""), self._erased(part, "partner_")), targets

    def _erased(self, part: dict[str, Array], prefix: str) -> Float[Array, "b height width c"]:
        pixels = mixup.normalise(part[f"{prefix}image"], self.mean, self.std)
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(part[f"{prefix}key"], 0)
        return mixup.erase(pixels, keys, self.augment["erase"])


def from_config(c: Any) -> Task:
    """Return the image-classification task of a config. Raises ConfigError for an unknown `data.name`."""
    m, d = c.model, c.data
    find(d.name, KINDS)
    shared = {"num_classes": m.num_classes, "mean": tuple(map(float, d.mean)), "augment": c.augment.to_dict()}
    size = m.image_size if isinstance(m.image_size, int) else tuple(m.image_size)
    return Task(
        ImageData(**shared, size=size, channels=m.channels, crop_fraction=d.crop_fraction, name=d.name, dir=d.dir),
        ImageClassification(**shared, std=tuple(map(float, d.std)), kind=c.loss),
    )
