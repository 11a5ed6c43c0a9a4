"""Augmentation on the device, inside the jitted step: normalisation, random erasing, mixup and cutmix.

`tasks.images` applies it to batches. Mixing follows timm's batch mode: one λ per batch, partners in reversed batch
order, soft targets.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt8


ERASE_TRIES = 10
ERASE_AREA, ERASE_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)


class Mix(NamedTuple):
    """Mixing of the images of a batch with their partners, the same for all examples.

    An image becomes where(inside, partner, weight · image + (1 − weight) · partner), and its target share · target +
    (1 − share) · partner's target.

    Attributes:
        weight: weight of the image outside the cutmix box, a scalar; 1 for cutmix and without mixing.
        inside: True for pixels in the cutmix box, (height, width); all False for mixup and without mixing.
        share: weight of the image's label in the target, a scalar: `weight` for mixup, the fraction of pixels outside
            the box for cutmix, 1 without mixing.
    """

    weight: Float[Array, ""]
    inside: Bool[Array, "height width"]
    share: Float[Array, ""]


def draw_mix(
    key: Key[Array, ""], height: int, width: int, *, mixup: float, cutmix: float, mix_prob: float, switch_prob: float
) -> Mix:
    """Draw the mixing of a batch (Zhang et al. 2018; Yun et al. 2019), with λ from Beta(α, α).

    For mixup, λ is the weight of the image. The cutmix box has a fraction 1 − λ of the image's area; the share of
    labels is corrected for the part of the box that falls outside the image.

    Args:
        key: random key of the batch.
        height, width: size of the images in pixels.
        mixup, cutmix: α of each; 0 is off.
        mix_prob: probability that the batch is mixed.
        switch_prob: probability of cutmix instead of mixup if both are on.
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
    which keeps its digits near 0. `jax.random.beta` uses rejection sampling in while loops with dynamic trip count; the
    host of a GPU waits for every iteration.
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
    """Return images mixed with their partners by the formula of `Mix`, in the dtype of the images."""
    weight = mix.weight.astype(images.dtype)
    blend = weight * images + (1 - weight) * partners
    return jnp.where(mix.inside[None, :, :, None], partners, blend)


def soft_targets(
    mix: Mix, labels: Int[Array, "b"], partners: Int[Array, "b"], num_classes: int, smoothing: float
) -> Float[Array, "b v"]:
    """Return the targets of mixed images, B V: smoothed one-hot vectors mixed by `mix.share`; rows sum to 1.

    Args:
        mix: mixing of the batch.
        labels: classes of the images.
        partners: classes of the images that they are mixed with.
        num_classes: number of classes V.
        smoothing: fraction of each target that is spread over all classes.
    """
    targets, others = (smoothed(y, num_classes, smoothing) for y in (labels, partners))
    return mix.share * targets + (1 - mix.share) * others


def smoothed(labels: Int[Array, "b"], num_classes: int, smoothing: float) -> Float[Array, "b v"]:
    """Return one-hot targets, of which `smoothing` is spread over all classes (Szegedy et al. 2016).

    >>> smoothed(jnp.array([1]), num_classes=4, smoothing=0.25).tolist()
    [[0.0625, 0.8125, 0.0625, 0.0625]]
    """
    return jax.nn.one_hot(labels, num_classes) * (1 - smoothing) + smoothing / num_classes


def normalise(
    images: UInt8[Array, "b h w c"], mean: tuple[float, ...], std: tuple[float, ...]
) -> Float[Array, "b h w c"]:
    """Return (x / 255 − mean) / std per channel, in float32, as one multiplication and one addition per pixel.

    `mean` and `std` are on a scale of 0 to 1.
    """
    shift, scale = (np.asarray(x, np.float64).reshape(1, 1, 1, -1) for x in (mean, std))
    return images.astype(jnp.float32) * np.float32(1 / (255 * scale)) - np.float32(shift / scale)


def erase(images: Float[Array, "b h w c"], keys: Key[Array, "b"], probability: float) -> Float[Array, "b h w c"]:
    """Replace a random box of each image by N(0, 1) noise with a probability (random erasing, Zhong et al. 2020).

    A box has 2-33 % of the image's area and a log-uniform aspect ratio of 0.3-3.3; it is the first of ten draws that
    fits, as in timm. An image without one is unchanged.

    Args:
        images: normalised images, B height width C.
        keys: random key of each image.
        probability: probability that an image gets a box; 0 returns the images.
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
