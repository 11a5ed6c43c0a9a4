"""Generator of the bundled images: 10,000 train and 2,000 test images of Fashion-MNIST, equally many of each class.

    python tools/bundled/make_fashion_mnist.py --source=DIR --out=DIR

The images are Fashion-MNIST by Zalando Research (MIT licence, see leanformer/data/bundled/LICENSE). `--source` is
the folder of the four original files; Debian's package `dataset-fashion-mnist` installs them to
/usr/share/datasets/fashion-mnist. Train images come from the original train split, test images from the
original test split. The script writes four files of the original names and format and their SHA256SUMS to
`--out`, 5.3 MB in all; repeating it writes the same bytes.
"""

import argparse
import gzip
import hashlib
import pathlib
import struct

import numpy as np


SEED = 0
NUM_CLASSES = 10
PER_CLASS = {"train": 1000, "t10k": 200}


def read_idx(path):
    """Return the uint8 array in a gzipped IDX file."""
    raw = gzip.decompress(path.read_bytes())
    zeros, dtype, ndim = struct.unpack_from(">HBB", raw)
    if zeros != 0 or dtype != 0x08:
        raise ValueError(f"{path} starts with {raw[:4].hex()}, but uint8 IDX data starts with 000008")
    shape = struct.unpack_from(f">{ndim}I", raw, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def write_idx(path, array):
    """Write a uint8 array as a gzipped IDX file."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 0x08, array.ndim, *array.shape)
    # A fixed time and no file name, so that the bytes depend on the content alone.
    with path.open("wb") as file, gzip.GzipFile("", "wb", compresslevel=9, fileobj=file, mtime=0) as packed:
        packed.write(header + array.tobytes())


def choose(labels, per_class, rng):
    """Return the indices of `per_class` examples of every class, in random order."""
    chosen = [rng.permutation(np.flatnonzero(labels == c))[:per_class] for c in range(NUM_CLASSES)]
    return rng.permutation(np.concatenate(chosen))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=pathlib.Path, required=True, help="folder of the original files")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write to")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    rng = np.random.RandomState(SEED)  # NumPy freezes the stream of RandomState, not of default_rng
    sums = []
    for split, per_class in PER_CLASS.items():
        names = [f"{split}-images-idx3-ubyte.gz", f"{split}-labels-idx1-ubyte.gz"]
        images, labels = (read_idx(args.source / name) for name in names)
        index = choose(labels, per_class, rng)
        for name, array in zip(names, (images[index], labels[index]), strict=True):
            write_idx(args.out / name, array)
            sums.append(f"{hashlib.sha256((args.out / name).read_bytes()).hexdigest()}  {name}\n")

        images, labels = (read_idx(args.out / name) for name in names)
        counts = np.bincount(labels, minlength=NUM_CLASSES)
        if images.shape != (per_class * NUM_CLASSES, 28, 28) or counts.tolist() != [per_class] * NUM_CLASSES:
            raise ValueError(
                f"{split}: wrote images {images.shape} with {counts.tolist()} of each class, "
                f"expected {per_class} of each; check that {args.source} contains all of Fashion-MNIST"
            )
        print(f"{split}: images {images.shape}, {per_class} of each class, mean {images.mean() / 255:.4f}")
    (args.out / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")


if __name__ == "__main__":
    main()
