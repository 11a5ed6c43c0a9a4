"""The order of training: an endless sequence of shuffled epochs, as a function of seed and position."""

import functools

import grain
import numpy as np


LARGE = 2**24  # examples of a source whose epochs are not drawn as a whole: 64 MiB for each process that reads


def shuffled(position: int, length: int, seed: int) -> int:
    """The index, of `length` examples, at a position of the order; each stands once in every epoch.

    A permutation that is drawn as a whole is uniform over all of them; of LARGE sources it is a keyed one, which needs
    no memory (grain's `index_shuffle`).
    """
    epoch, place = divmod(position, length)
    if length < LARGE:
        return int(_permutation(seed, epoch, length)[place])
    return grain.experimental.index_shuffle(place, max_index=length - 1, seed=_key(seed, epoch), rounds=4)


@functools.lru_cache(maxsize=2)  # a batch may straddle two epochs
def _permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=(seed, epoch))).permutation(length).astype(np.int32)


@functools.lru_cache(maxsize=2)
def _key(seed: int, epoch: int) -> int:
    return int(np.random.Generator(np.random.Philox(key=(seed, epoch))).integers(2**32))
