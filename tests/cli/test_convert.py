"""The `convert` command: equal logits, bit-equal weights, and one message for weights that do not fit."""

import functools
import re

import numpy as np
import pytest
from commands import command, run_in_process
from messages import mentions
from parity import case
from safetensors.numpy import load_file, save_file


CASE = "vit_tiny_grey"  # image size and channels of configs/quickstart.py


@functools.cache
def make_command():
    """Return the command for the architecture of CASE."""
    arguments = case("vit_timm", CASE).arguments
    changes = {f"model.{name}": value for name, value in arguments.items() if name != "image_size"}
    return command("convert", changes=changes)


def load_tensors():
    return dict(case("vit_timm", CASE).tensors)


def make_reference(scale=1.0):
    """Return the contents of a reference file; `input` is B C height width, as in PyTorch."""
    arrays = case("vit_timm", CASE).arrays
    images = np.ascontiguousarray(arrays["input"].transpose(0, 3, 1, 2))
    return {"input": images, "logits": arrays["logits"] * np.float32(scale)}


def load_written(folder, name="model"):
    return load_file(folder / f"{name}.safetensors")


def parse_error(out):
    """Return the largest logit difference that the command printed, relative to the largest logit."""
    (value,) = re.findall(r": (\d\S*e[-+]\d+) ", out)
    return float(value)


def test_conversion_to_our_format_and_back(tmp_path):
    theirs, ours, back, right, wrong = (tmp_path / name for name in ("theirs", "ours", "back", "right", "wrong"))
    save_file(load_tensors(), theirs)
    save_file(make_reference(), right)
    save_file(make_reference(0.5), wrong)
    status, out, err = run_in_process(
        [*make_command(), "--from=timm", f"--weights={theirs}", f"--out={ours}", f"--reference={right}"]
    )
    assert status == 0 and mentions(out, ours / "weights.safetensors", "vit", "own")
    assert err.count("\n") == 1 and mentions(err, "WARNING", tmp_path / "config.json")  # the weights are a single file
    assert 0 < parse_error(out) < 1e-5
    assert {"head.kernel", "blocks.layers.attention.query.bias"} < load_written(ours, "weights").keys()

    words_back = [*make_command(), f"--weights={ours / 'weights.safetensors'}", "--to=timm", f"--out={back}"]
    status, out, err = run_in_process([*words_back, f"--reference={wrong}"])
    assert status == 2 and mentions(out, back / "model.safetensors", "timm")
    assert mentions(err, f"--reference={wrong}", "1.0e+00")  # relative to reference logits that are half of ours
    assert load_written(back).keys() == load_tensors().keys()
    for name, value in load_tensors().items():
        np.testing.assert_array_equal(load_written(back)[name], value, err_msg=name)


UNFITTING = {  # by name: tensors, and the parts of the message
    "another layout": (lambda: case("vit_huggingface", "vit").tensors, ["vit.embeddings.cls_token", "pos_embed"]),
    "another size": (lambda: load_tensors() | {"head.bias": np.zeros(7, np.float32)}, ["head.bias", "(7,)"]),
}


@pytest.mark.parametrize("name", UNFITTING)
def test_unfitting_weights_are_one_message(tmp_path, name):
    make, parts = UNFITTING[name]
    save_file(make(), tmp_path / "theirs")
    files = [f"--weights={tmp_path / 'theirs'}", f"--out={tmp_path / 'ours'}"]
    status, out, err = run_in_process([*make_command(), "--from=timm", *files])
    warning, message = err.split("\nError: ")
    assert (status, out) == (2, "") and mentions(warning, "WARNING", "config.json") and mentions(message, *parts)
    assert not (tmp_path / "ours").exists()
