"""Images with a label: uint8 on the host, decoded, cropped and augmented there; normalised, erased and mixed on the
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
from leanformer.config.rules import sides
from leanformer.data.images import KINDS, transforms
from leanformer.data.source import build, find
from leanformer.tasks import losses, mixup
from leanformer.tasks.classification import Classification, labelled
from leanformer.tasks.task import Batch, Leaf


HOST_AUGMENT = ("crop_scale", "crop_ratio", "flip")
HOST_AUGMENT += ("rand_magnitude", "rand_std", "rand_layers", "rand_prob", "color_jitter")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images(Classification):
    """Images of `size`, (height, width) or the side of a square, as `image` (B height width C, uint8).

    Attributes:
        augment: config.augment.
        name, dir: those of config.data.
    """

    size: int | Sequence[int]
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_fraction: float
    augment: Mapping[str, Any]
    name: str = "synthetic"
    dir: str | None = None

    @classmethod
    def of(cls, c: Any) -> "Images":
        """The task of a config. Raises ConfigError for data of no known kind."""
        m, d = c.model, c.data
        find(d.name, KINDS)
        return cls(
            num_classes=m.num_classes,
            kind=c.loss,
            size=m.image_size if isinstance(m.image_size, int) else tuple(m.image_size),
            channels=m.channels,
            mean=tuple(map(float, d.mean)),
            std=tuple(map(float, d.std)),
            crop_fraction=d.crop_fraction,
            augment=c.augment.to_dict(),
            name=d.name,
            dir=d.dir,
        )

    def build(self) -> bool:
        return build(self.name, KINDS, self.dir)

    def open(self, split: str, classes: Sequence[str] | None = None) -> data.Source:
        shape = {"image_size": self.size, "channels": self.channels, "num_classes": self.num_classes}
        return data.open_images(self.name, split, dir=self.dir, classes=classes, **shape)

    def train_batches(
        self, source: data.Source, *, batch_size: int, seed: int, process: int = 0, processes: int = 1
    ) -> data.Batches:
        """Shuffled, augmented."""
        options = {key: self.augment[key] for key in HOST_AUGMENT}
        fill = tuple(round(255 * m) for m in self.mean)  # what affine operations leave uncovered
        shape = {"size": self.size, "channels": self.channels}
        view = functools.partial(transforms.train_transform, fill=fill, **shape, **options)
        return data.Batches(
            source,
            labelled(source, functools.partial(_augmented, view)),
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
        cropped = labelled(source, functools.partial(_cropped, **self._crop))
        return data.Batches(source, cropped, batch_size=batch_size, train=False, process=process, processes=processes)

    @property
    def _crop(self) -> dict[str, Any]:
        return {"size": self.size, "channels": self.channels, "crop_fraction": self.crop_fraction}

    def read(self, raw: Any) -> dict[str, Any]:
        return {"image": raw}

    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return _cropped(0, example, None, **self._crop)

    def leaves(self) -> dict[str, Leaf]:
        return {"image": ((*sides(self.size), self.channels), np.uint8)}

    def draw(
        self, batch: Batch, batch_key: Key[Array, ""], shared_key: Key[Array, ""]
    ) -> tuple[dict[str, Array], mixup.Mix | None]:
        """When mixing is on, everything of each example's partner stands beside it."""
        size, height, width, _ = batch["image"].shape
        parts = {**batch, "key": jax.random.split(batch_key, size)}
        if not (self.augment["mixup"] or self.augment["cutmix"]):
            return parts, None
        names = ("mixup", "cutmix", "mix_prob", "switch_prob")
        mix = mixup.draw_mix(shared_key, height, width, **{name: self.augment[name] for name in names})
        mix = jax.lax.optimization_barrier(mix)  # or the compiler draws it again for every pixel
        return parts | {f"partner_{name}": jnp.flip(x, axis=0) for name, x in parts.items()}, mix

    def loss(
        self, model: Any, part: dict[str, Array], shared: mixup.Mix | None, key: Key[Array, "b"]
    ) -> Float[Array, ""]:
        """Cross-entropy with smoothed and mixed labels."""
        images, targets = self._mixed(part, shared)
        logits, _ = model(images, key=key)
        return losses.classify(logits, targets, self.kind).sum()

    def _mixed(
        self, part: dict[str, Array], mix: mixup.Mix | None
    ) -> tuple[Float[Array, "b height width c"], Float[Array, "b v"]]:
        """Images and soft targets of a batch that `draw` made."""
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

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        return (mixup.normalise(batch["image"], self.mean, self.std),)


def _augmented(
    view: Callable[..., np.ndarray], index: int, example: Mapping[str, Any], draws: Callable[[], np.random.Generator]
) -> dict[str, np.ndarray]:
    return {"image": view(example["image"], draws())}


def _cropped(index: int, example: Mapping[str, Any], draws: object, **options: Any) -> dict[str, np.ndarray]:
    return {"image": transforms.eval_transform(example["image"], **options)}
