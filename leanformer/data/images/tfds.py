"""Source of TensorFlow Datasets images, read without TensorFlow, and their preparation, which needs it."""

import os
from pathlib import Path
from typing import Any

from leanformer.errors import DataError


class Tfds:
    """Prepared TensorFlow dataset in a random-access format, read without TensorFlow; images stay encoded."""

    def __init__(self, dataset: str, split: str, dir: str | None):
        import tensorflow_datasets as tfds  # slow to import, and needed only by this source

        self.dataset, self.split = dataset, split
        looked = dir or os.environ.get("TFDS_DATA_DIR") or str(Path("~/tensorflow_datasets").expanduser())
        prepare = f"python -m leanformer.prepare build --config=FILE --config.data.name=tfds:{dataset}"
        try:
            builder = tfds.builder(dataset, data_dir=looked, file_format="array_record")
        except tfds.core.DatasetNotFoundError as error:
            raise DataError(
                f'data.name="tfds:{dataset}" is not a known TFDS dataset, and not prepared in {looked}. '
                "See the list at tensorflow.org/datasets/catalog, or use folder:<path>."
            ) from error
        if not Path(builder.data_dir).exists() or not builder.info.splits:
            raise DataError(
                f'data.name="tfds:{dataset}" is not prepared. Looked in {builder.data_dir}. Prepare it once with\n'
                f"  {prepare}\nor point to it with --config.data.dir=DIR or TFDS_DATA_DIR=DIR."
            )
        if split.split("[")[0] not in builder.info.splits:
            raise DataError(
                f'data.name="tfds:{dataset}" has no split "{split}". Found: {", ".join(builder.info.splits)}.'
            )
        if not {"image", "label"} <= set(builder.info.features):
            raise DataError(
                f'data.name="tfds:{dataset}" has the features {", ".join(builder.info.features)}; '
                "image classification needs image and label."
            )
        try:
            self._examples = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
        except NotImplementedError as error:
            raise DataError(
                f"{builder.data_dir} holds {builder.info.file_format.value} files, which have no random access. "
                f"Prepare it again as array_record:\n  {prepare}"
            ) from error
        label = builder.info.features["label"]
        self.num_classes, self.classes = label.num_classes, label.names

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self._examples[index]
        return {"image": example["image"], "label": int(example["label"])}

    def name(self, index: int) -> str:
        return f"tfds:{self.dataset}, {self.split}, example {index}"


def get(dataset: str, dir: str | None) -> bool:
    """Download and prepare a dataset in a random-access format, which needs a network. Return True.

    Raises:
        DataError: the dataset cannot be prepared; the message has the reason.
    """
    import tensorflow_datasets as tfds

    try:
        tfds.builder(dataset, data_dir=dir, file_format="array_record").download_and_prepare()
    except ImportError as error:
        raise DataError(
            f"Preparing tfds:{dataset} needs a library that training does not need: {error}. "
            "Install it (usually: pip install tensorflow) in a separate environment and run this command there."
        ) from error
    except Exception as error:  # network, disk, manual downloads: whatever the dataset's own script raises
        raise DataError(f"tfds:{dataset} could not be prepared in {dir or 'the default folder'}: {error}") from error
    return True
