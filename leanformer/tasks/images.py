"""Image classification: uint8 images, augmented on the host; normalised, erased and mixed on the device."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from leanformer import data
from leanformer.config.rules import image_sides
from leanformer.data.images import KINDS, build_images, transforms
from leanformer.data.loader import Prepare
from leanformer.data.source import find
from leanformer.tasks import Batch, DataModule, Spec, Task
from leanformer.tasks.classification import LABEL, Classification, classify, labelled, smoothed


HOST_AUGMENT = ("crop_scale", "crop_ratio", "flip")
HOST_AUGMENT += ("rand_magnitude", "rand_std", "rand_layers", "rand_prob", "color_jitter")
STRENGTHS = ("rand_magnitude", "color_jitter", "erase", "mixup", "cutmix")  # shown at the start; 0: off
ERASE_TRIES = 10
ERASE_AREA, ERASE_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)


class Mix(NamedTuple):
    """Mixing of the images of a batch with their partners, the same for all examples.

    An image becomes where(inside, partner, weight · image + (1 − weight) · partner), and its target share · target +
    (1 − share) · partner's target. As in timm's batch mode, partners are in reversed batch order.
    """

    weight: Float[Array, ""]  # of the image outside the cutmix box; 1 for cutmix and without mixing
    inside: Bool[Array, "height width"]  # True in the cutmix box
    share: Float[Array, ""]  # of the image's label: `weight` for mixup, the fraction outside the box for cutmix


def draw_mix(
    key: Key[Array, ""], height: int, width: int, *, mixup: float, cutmix: float, mix_prob: float, switch_prob: float
) -> Mix:
    """Draw the mixing of a batch (Zhang et al. 2018; Yun et al. 2019), with λ from Beta(α, α); α = 0 is off.

    For mixup, λ is the weight of the image. The cutmix box has a fraction 1 − λ of the image's area; the share of
    labels is corrected for the part of the box that falls outside the image. `switch_prob` is the probability of cutmix
    instead of mixup if both are on.
    """
    pick, use, mixing, cutting, row, column = jax.random.split(key, 6)
    on = jax.random.bernoulli(use, mix_prob) & (mixup > 0 or cutmix > 0)
    cut = jax.random.bernoulli(pick, switch_prob) if mixup > 0 and cutmix > 0 else jnp.asarray(cutmix > 0)
    lam_mix = symmetric_beta(mixing, mixup) if mixup > 0 else jnp.float32(1)
    lam_cut = symmetric_beta(cutting, cutmix) if cutmix > 0 else jnp.float32(1)

    side = jnp.sqrt(1 - lam_cut)
    inside = _between(row, side, height)[:, None] & _between(column, side, width)[None, :]
    inside = inside & on & cut
    weight = jnp.where(on & ~cut, lam_mix, 1.0)
    share = jnp.where(cut, 1 - inside.mean(), weight)
    return Mix(weight, inside, share)


def symmetric_beta(key: Key[Array, ""], alpha: float, shape: tuple[int, ...] = ()) -> Float[Array, "*shape"]:
    """Draw an array of `shape` from Beta(α, α), exactly for every α > 0, from two uniform numbers U and V per entry.

    With w = U^(1/α), t = √(1/w − 1) cos 2πV is Student's t of 2α degrees over √(2α) (Bailey 1994, "Polar generation of
    random variates with the t-distribution"), and (1 + t / √(1 + t²)) / 2 is Beta(α, α): here as the square of a sine,
    which keeps its digits near 0. `jax.random.beta` loops until it accepts, and a GPU's host waits for every iteration.
    """
    u, v = jax.random.uniform(key, (2, *shape))
    log_w = jnp.log(u) / alpha
    across = jnp.sqrt(-jnp.expm1(log_w)) * jnp.cos(2 * jnp.pi * v)
    return jnp.square(jnp.sin(jnp.arctan2(jnp.exp(log_w / 2), across) / 2))


def _between(key: Key[Array, ""], side: Float[Array, ""], length: int) -> Bool[Array, " length"]:
    """Return the mask of the interval of floor(side · length) pixels about a uniform centre, clipped to 0..length."""
    extent = jnp.floor(side * length).astype(jnp.int32)
    centre = jax.random.randint(key, (), 0, length)
    low, high = centre - extent // 2, centre + extent // 2
    place = jnp.arange(length)
    return (place >= jnp.maximum(low, 0)) & (place < jnp.minimum(high, length))


def mix_images(mix: Mix, images: Float[Array, "b h w c"], partners: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
    weight = mix.weight.astype(images.dtype)
    blend = weight * images + (1 - weight) * partners
    return jnp.where(mix.inside[None, :, :, None], partners, blend)


def soft_targets(
    mix: Mix, labels: Int[Array, "b"], partners: Int[Array, "b"], num_classes: int, smoothing: float
) -> Float[Array, "b v"]:
    """Return the targets of mixed images: smoothed one-hot vectors, mixed by `mix.share`."""
    targets, others = (smoothed(y, num_classes, smoothing) for y in (labels, partners))
    return mix.share * targets + (1 - mix.share) * others


def normalise(
    images: UInt8[Array, "b h w c"], mean: tuple[float, ...], std: tuple[float, ...]
) -> Float[Array, "b h w c"]:
    """Return (x / 255 − mean) / std per channel, in float32, as one multiplication and one addition per pixel."""
    shift, scale = (np.asarray(x, np.float64).reshape(1, 1, 1, -1) for x in (mean, std))
    return images.astype(jnp.float32) * np.float32(1 / (255 * scale)) - np.float32(shift / scale)


def erase(images: Float[Array, "b h w c"], keys: Key[Array, "b"], probability: float) -> Float[Array, "b h w c"]:
    """Replace a random box of each normalised image by N(0, 1) noise with a probability (Zhong et al. 2020).

    A box has 2-33 % of the image's area and a log-uniform aspect ratio of 0.3-3.3; it is the first of ten draws that
    fits, as in timm.
    """
    if probability == 0:
        return images
    return jax.vmap(lambda image, key: _erase_one(image, key, probability))(images, keys)


def _erase_one(image: Float[Array, "h w c"], key: Key[Array, ""], probability: float) -> Float[Array, "h w c"]:
    height, width, _ = image.shape
    use, area, ratio, row, column, noise = jax.random.split(key, 6)
    areas = jax.random.uniform(area, (ERASE_TRIES,), minval=ERASE_AREA[0], maxval=ERASE_AREA[1]) * height * width
    low, high = jnp.log(ERASE_RATIO[0]), jnp.log(ERASE_RATIO[1])
    ratios = jnp.exp(jax.random.uniform(ratio, (ERASE_TRIES,), minval=low, maxval=high))
    tall = jnp.round(jnp.sqrt(areas * ratios)).astype(jnp.int32)
    wide = jnp.round(jnp.sqrt(areas / ratios)).astype(jnp.int32)
    fits = (tall < height) & (wide < width)
    first = jnp.argmax(fits)
    tall, wide = tall[first], wide[first]
    top = jax.random.randint(row, (), 0, jnp.maximum(height - tall, 0) + 1)
    left = jax.random.randint(column, (), 0, jnp.maximum(width - wide, 0) + 1)
    rows, columns = jnp.arange(height)[:, None], jnp.arange(width)[None, :]
    box = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
    box = box & fits.any() & jax.random.bernoulli(use, probability)
    return jnp.where(box[..., None], jax.random.normal(noise, image.shape, image.dtype), image)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageData(DataModule):
    """Data of image classification: batches of `image` (B height width C, uint8) and `label` (B, int32)."""

    size: int | Sequence[int]  # side of the images in pixels, or (height, width)
    channels: int
    num_classes: int
    mean: tuple[float, ...]  # of each channel, 0 to 1: augmentation fills uncovered pixels with it
    crop_fraction: float  # side of the central crop / side of the resized image, in evaluation
    augment: Mapping[str, Any]  # section config.augment
    name: str = "synthetic"
    dir: str | None = None  # of TFDS data

    def build(self) -> bool:
        return build_images(self.name, self.dir)

    def open(self, split: str, classes: Sequence[str] | None = None) -> data.Source:
        shape = {"image_size": self.size, "channels": self.channels, "num_classes": self.num_classes}
        return data.open_images(self.name, split, dir=self.dir, classes=classes, **shape)

    def notes(self) -> dict[str, str]:
        low, high = self.augment["crop_scale"]
        strengths = [f"{key} {self.augment[key]:g}" for key in STRENGTHS if self.augment[key]]
        return {"augment": ", ".join([f"crops of {low:.0%} to {high:.0%} of the area", *strengths])}

    def make_prepare(self, source: data.Source, *, train: bool) -> Prepare:
        return labelled(source, self._augmented if train else self._cropped)

    def train_batches(self, source: data.Source, **options: Any) -> data.Batches:
        return super().train_batches(source, repeats=self.augment["repeats"], **options)

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
    """Objective of image classification: cross-entropy with smoothed labels, random erasing, mixup and cutmix."""

    mean: tuple[float, ...]  # of each channel, 0 to 1
    std: tuple[float, ...]
    augment: Mapping[str, Any]  # section config.augment

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        return (normalise(batch["image"], self.mean, self.std),)

    def prepare_train_batch(
        self, batch: Batch, batch_key: Key[Array, ""], shared_key: Key[Array, ""]
    ) -> tuple[dict[str, Array], Mix | None]:
        """Return the batch with a random `key` (B), each array again in reversed order as `partner_<name>`, and a Mix.

        There are no partners and no Mix if mixup and CutMix are off.
        """
        parts, _ = super().prepare_train_batch(batch, batch_key, shared_key)
        if not (self.augment["mixup"] or self.augment["cutmix"]):
            return parts, None
        _, height, width, _ = batch["image"].shape
        names = ("mixup", "cutmix", "mix_prob", "switch_prob")
        mix = draw_mix(shared_key, height, width, **{name: self.augment[name] for name in names})
        mix = jax.lax.optimization_barrier(mix)  # or the compiler draws it again for every pixel
        return parts | {f"partner_{name}": jnp.flip(x, axis=0) for name, x in parts.items()}, mix

    def loss(self, model: Any, part: dict[str, Array], batch_aux: Any, key: Key[Array, "b"] | None) -> Float[Array, ""]:
        images, targets = self._mixed(part, batch_aux)
        logits, _ = model(images, key=key)
        return classify(logits, targets, self.kind).sum()

    def _mixed(
        self, part: dict[str, Array], mix: Mix | None
    ) -> tuple[Float[Array, "b height width c"], Float[Array, "b v"]]:
        smoothing = self.augment["label_smoothing"]
        if mix is None:
            return self._erased(part, ""), smoothed(part["label"], self.num_classes, smoothing)
        targets = soft_targets(mix, part["label"], part["partner_label"], self.num_classes, smoothing)
        return mix_images(mix, self._erased(part, ""), self._erased(part, "partner_")), targets

    def _erased(self, part: dict[str, Array], prefix: str) -> Float[Array, "b height width c"]:
        pixels = normalise(part[f"{prefix}image"], self.mean, self.std)
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(part[f"{prefix}key"], 0)
        return erase(pixels, keys, self.augment["erase"])


def from_config(c: Any) -> Task:
    m, d = c.model, c.data
    find(d.name, KINDS)
    shared = {"num_classes": m.num_classes, "mean": tuple(map(float, d.mean)), "augment": c.augment.to_dict()}
    size = m.image_size if isinstance(m.image_size, int) else tuple(m.image_size)
    return Task(
        ImageData(**shared, size=size, channels=m.channels, crop_fraction=d.crop_fraction, name=d.name, dir=d.dir),
        ImageClassification(**shared, std=tuple(map(float, d.std)), kind=c.loss),
    )
