"""Small dataset of TensorFlow Datasets, prepared in array_record without TensorFlow."""

import io
from pathlib import Path


def prepare_tiny_images(folder: Path, examples: list[tuple[bytes, int]]) -> None:
    """Prepare tfds:tiny_images, with the split "train", from encoded grey images of 8 x 8 pixels and labels below 3."""
    import tensorflow_datasets as tfds

    folder.mkdir(parents=True, exist_ok=True)

    class TinyImages(tfds.core.GeneratorBasedBuilder):
        """Grey pictures."""

        code_path, pkg_dir_path = None, folder  # otherwise tfds looks for a package that contains this file
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            label = tfds.features.ClassLabel(num_classes=3)
            image = tfds.features.Image(shape=(8, 8, 1), encoding_format="png")
            return self.dataset_info_from_configs(
                features=tfds.features.FeaturesDict({"image": image, "label": label}), supervised_keys=None
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i, (image, label) in enumerate(examples):
                yield i, {"image": io.BytesIO(image), "label": label}

    TinyImages(data_dir=folder, file_format="array_record").download_and_prepare()
