"""The command that converts weights: the same logits and the same bits, and one message for what does not fit."""

import functools
import pickle
import re

import numpy as np
import pytest
from commands import command, inside, refused
from messages import mentions
from parity import case
from safetensors.numpy import load_file, save, save_file


CASE = "vit_tiny_grey"  # images as configs/quickstart.py has them


@functools.cache
def words():
    """The command for a model of the case's shape."""
    arguments = case("vit_timm", CASE).arguments
    changes = {f"model.{name}": value for name, value in arguments.items() if name != "image_size"}
    return command("convert", changes=changes)


def tensors():
    return dict(case("vit_timm", CASE).tensors)


def reference(scale=1.0):
    """The file of a reference; `input` is B C height width, as PyTorch has it."""
    others = case("vit_timm", CASE).arrays
    images = np.ascontiguousarray(others["input"].transpose(0, 3, 1, 2))
    return {"input": images, "logits": others["logits"] * np.float32(scale)}


def written(folder, name="model"):
    return load_file(folder / f"{name}.safetensors")


def worst(out):
    """Return the largest difference of logits that the command printed, as a share of the largest logit."""
    (value,) = re.findall(r": (\d\S*e[-+]\d+) ", out)
    return float(value)


def test_there_and_back(tmp_path):
    theirs, ours, back, right, wrong = (tmp_path / name for name in ("theirs", "ours", "back", "right", "wrong"))
    save_file(tensors(), theirs)
    save_file(reference(), right)
    save_file(reference(0.5), wrong)
    status, out, err = inside([*words(), "--from=timm", f"--weights={theirs}", f"--out={ours}", f"--reference={right}"])
    assert (status, err) == (0, "") and mentions(out, ours / "weights.safetensors", "vit", "own")
    assert 0 < worst(out) < 1e-5
    assert {"head.kernel", "blocks.layers.attention.query.bias"} < written(ours, "weights").keys()

    words_back = [*words(), f"--weights={ours / 'weights.safetensors'}", "--to=timm", f"--out={back}"]
    status, out, err = inside([*words_back, f"--reference={wrong}"])
    assert (status, err) == (0, "") and mentions(out, back / "model.safetensors", "timm")
    assert worst(out) == pytest.approx(1, abs=0.06)  # of logits that are half of ours, and so said
    assert written(back).keys() == tensors().keys()
    for name, value in tensors().items():
        np.testing.assert_array_equal(written(back)[name], value, err_msg=name)


def test_half_precision_is_read_as_it_is(tmp_path):
    half = {name: x.astype(np.float16) for name, x in tensors().items()}
    save_file(half, tmp_path / "half")
    save_file(reference(), tmp_path / "reference")
    files = [f"--weights={tmp_path / 'half'}", f"--out={tmp_path}", f"--reference={tmp_path / 'reference'}"]
    status, out, err = inside([*words(), "--from=timm", "--to=timm", *files])
    assert (status, err) == (0, "") and 1e-5 < worst(out) < 1e-2
    for name, value in half.items():
        assert written(tmp_path)[name].dtype == np.float32
        np.testing.assert_array_equal(written(tmp_path)[name], value.astype(np.float32), err_msg=name)


def misnamed():
    result = tensors()
    del result["norm.weight"]
    return result | {"stranger": np.zeros(3, np.float32)}


def of_huggingface():
    return case("vit_huggingface", "vit").tensors


MISFITS = {
    "another layout": (of_huggingface, ["vit.embeddings.cls_token", "(1, 1, 20)", "pos_embed"]),
    "misnamed": (misnamed, ["norm.weight", "norm.scale", "stranger", "(3,)"]),
    "another size": (lambda: tensors() | {"head.bias": np.zeros(7, np.float32)}, ["head.bias", "(7,)"]),
}


@pytest.mark.parametrize("name", MISFITS)
def test_misfits_are_one_message(tmp_path, name):
    make, parts = MISFITS[name]
    save_file(make(), tmp_path / "theirs")
    files = [f"--weights={tmp_path / 'theirs'}", f"--out={tmp_path / 'ours'}"]
    refused([*words(), "--from=timm", *files], *parts)
    assert not (tmp_path / "ours").exists()


BROKEN = {
    "truncated": lambda: save(tensors())[:-9],
    "a pickle": lambda: pickle.dumps(tensors()),
    "nothing": None,
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_are_no_weights_are_one_message(tmp_path, name):
    if make := BROKEN[name]:
        (tmp_path / "theirs").write_bytes(make())
    files = [f"--weights={tmp_path / 'theirs'}", f"--out={tmp_path / 'ours'}"]
    err = refused([*words(), "--from=timm", *files], tmp_path / "theirs")
    assert ("safetensors" in err, "pickle" in err.lower()) == (name != "nothing", name == "a pickle"), err
    assert not (tmp_path / "ours").exists()


def test_a_family_without_a_key_map_says_which_it_has(tmp_path):
    save_file(tensors(), tmp_path / "theirs")
    small = {"width": 8, "mlp_dim": 8, "depth": 1, "num_heads": 1, "inner_width": 4, "inner_mlp_dim": 8}
    words = command("convert", changes={f"model.{k}": v for k, v in small.items()}, config="configs/tnt_b_8x16.py")
    files = [f"--weights={tmp_path / 'theirs'}", f"--out={tmp_path}"]
    refused([*words, "--from=huggingface", *files], "huggingface", "tnt", "timm")


REFERENCES = {
    "no logits": (lambda: {"input": reference()["input"]}, ["logits"]),
    "channels": (lambda: reference() | {"input": np.zeros((2, 3, 28, 28), np.float32)}, ["(2, 3, 28, 28)", "C = 1"]),
    "classes": (lambda: reference() | {"logits": np.zeros((2, 7), np.float32)}, ["(2, 7)", "(2, 11)"]),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_that_do_not_fit_are_one_message(tmp_path, name):
    """The weights are written before, and stay."""
    make, parts = REFERENCES[name]
    save_file(tensors(), tmp_path / "theirs")
    save_file(make(), tmp_path / "reference")
    files = [f"--weights={tmp_path / 'theirs'}", f"--out={tmp_path / 'ours'}"]
    status, _, err = inside([*words(), "--from=timm", *files, f"--reference={tmp_path / 'reference'}"])
    assert status == 2 and mentions(err, f"--reference={tmp_path / 'reference'}", *parts), err
