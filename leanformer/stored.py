"""Tensors in safetensors files, by name and read one by one, with NumPy alone: one file, or several with an index.

The index of several is `model.safetensors.index.json`, and the shards beside it `model-00001-of-00003.safetensors` etc.
"""

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from leanformer.errors import WeightsError


SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
SHOWN = 5


def check_not_pickle(path: Path) -> None:
    """Raise WeightsError for a file that could run code when it is opened, or that cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError as error:
        raise WeightsError(f"The weights {path} cannot be read: {error.strerror or error}.") from error
    # The length of the header comes first and may look like the start of a pickle; then the header, a JSON object.
    if head[8:] != b"{" and head[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise WeightsError(
            f"{path} is a PyTorch pickle or an archive, which could run any code when opened, so it was not opened. "
            "Convert it with safetensors.torch.save_file where it came from, and use that file."
        )


class StoredTensor:
    """Tensor in a safetensors file, read when it is called: float32 for half precision; `dtype` is such as "BF16"."""

    def __init__(self, path: Path, name: str, shape: tuple[int, ...], dtype: str):
        self._path, self.name, self.shape, self.dtype = path, name, shape, dtype

    def __call__(self) -> np.ndarray:
        if self.dtype != "BF16":
            with safe_open(self._path, framework="numpy") as file:
                x = file.get_tensor(self.name)
            return x.astype(np.float32) if self.dtype == "F16" else x
        with self._path.open("rb") as file:  # NumPy has no such type: its numbers are the upper halves of float32
            size = int.from_bytes(file.read(8), "little")
            start, end = json.loads(file.read(size))[self.name]["data_offsets"]
            file.seek(8 + size + start)
            upper = np.frombuffer(file.read(end - start), "<u2")
        return (upper.astype(np.uint32) << 16).view(np.float32).reshape(self.shape)


def open_lazily(path: str | Path) -> dict[str, StoredTensor]:
    """Return the tensors of safetensors weights, whose values are read later. Errors are as in `find_files`."""
    result: dict[str, StoredTensor] = {}
    for file in find_files(path):
        check_not_pickle(file)
        try:
            with safe_open(file, framework="numpy") as opened:
                slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
        except (SafetensorError, ValueError, TypeError, OSError) as error:
            raise WeightsError(
                f"{file} ({file.stat().st_size} bytes) is not a complete safetensors file: {error}. "
                "Was it truncated? Download it again."
            ) from error
        if twice := sorted(result.keys() & slices.keys()):  # left from another download
            raise WeightsError(f"{file} has {twice[0]}, which another file of the index has too. Delete the stale one.")
        result |= {name: StoredTensor(file, name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    return result


def find_files(path: str | Path) -> list[Path]:
    """Return the safetensors files of weights: the file itself, all that an index names, or those in a folder.

    Raises WeightsError unless a folder has exactly one file or one index.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        indices, single = sorted(path.glob(f"*{INDEX}")), sorted(path.glob(f"*{SUFFIX}"))
        found = indices or single
        if len(found) != 1 or (indices and (path / indices[0].name.removesuffix(".index.json")).is_file()):
            names = ", ".join(file.name for file in [*indices, *single][:SHOWN]) or "none"
            raise WeightsError(f"{path} must contain one file of weights or one index; found {names}. Name a file.")
        (path,) = found
    if not path.name.endswith(INDEX):
        return [path]
    return sorted({path.parent / name for name in json.loads(path.read_bytes())["weight_map"].values()})
