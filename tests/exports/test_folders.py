"""Exported folders for other libraries: exact configs, tokenizers and preprocessing, and unsupported models."""

import json

import jax
import numpy as np
import pytest
import tokenizers
from commands import check_refused, command, run_in_process
from messages import mentions, refuses
from parity import case
from safetensors.numpy import load_file, save_file

from leanformer import pretrained
from leanformer.data.text import tokenizer as ours
from leanformer.errors import ConfigError
from leanformer.exports import folders
from leanformer.training import model_setup
from tools.exports import BERT, CASES, GPT2, IMAGE, LEAN, LLAMA, TEXT, case_config, random_weights


VIT = ("images", "vit", IMAGE)


def describe(changes=(), to="huggingface", model_case=VIT, classes=None):
    task, name, arguments = model_case
    return folders.describe(case_config(task, name, arguments | dict(changes)), to, classes)


def test_lean_vit_config_is_exact():
    names = ("cat", "dog")
    description = describe(LEAN | {"num_classes": 2}, classes=names)
    assert description.config == {
        **{"model_type": "vit", "architectures": ["ViTForImageClassification"], "dtype": "float32"},
        **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 5, "head_dim": 16},
        **{"intermediate_size": 48, "image_size": 32, "patch_size": 8, "num_channels": 3, "hidden_act": "gelu"},
        **{"layer_norm_eps": 1e-6, "qkv_bias": True},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        **{"id2label": {"0": "cat", "1": "dog"}, "label2id": {"cat": 0, "dog": 1}},
        "problem_type": "single_label_classification",
    }
    assert (description.needs, describe().needs) == ("5.9", "")


MODEL_TYPES = {  # case of tools/exports.py: model_type, and keys that differ between models
    "DeiT, 5 x 16": ("deit", {"head_dim": 16}),
    "BERT, masked": ("bert", {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}),
    "GPT-2": ("gpt2", {"n_inner": 48, "activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5}),
    "Llama": ("llama", {"num_key_value_heads": 2, "head_dim": 16, "rope_theta": 10_000.0, "attention_bias": False}),
    "Llama, 5 x 16": ("mistral", {"head_dim": 16, "sliding_window": None, "num_key_value_heads": 5}),
    "Qwen2, 5 x 16": ("qwen2", {"head_dim": 16}),
    "Llama, biases": ("llama", {"attention_bias": True}),
    "Qwen3, 5 x 16": ("qwen3", {"head_dim": 16, "rms_norm_eps": 1e-6}),
}


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_model_type_follows_from_options(name):
    kind, keys = MODEL_TYPES[name]
    content = describe(model_case=CASES[name]).config
    assert content["model_type"] == kind and {key: content[key] for key in keys} == keys


TEXTS = {"masked": ("masked", "bert", TEXT | BERT | {"transform": True, "head_bias": True})}
TEXTS |= {"gpt2": ("language", "gpt", TEXT | GPT2), "llama": ("language", "gpt", TEXT | LLAMA)}
UNSUPPORTED = {
    "bert, heads": (TEXTS["masked"], LEAN, ["model.num_heads=5", "model.head_dim=16", "model.width=24", "--to=own"]),
    "gpt2, heads": (TEXTS["gpt2"], {"head_dim": 4}, ["model.head_dim=4", "--to=own"]),
    "llama, no positions": (TEXTS["llama"], {"rotary": None}, ["model.rotary=None"]),
    "qwen3, epsilon": (TEXTS["llama"], {"qk_norm": "rmsnorm", "epsilon": 1e-5}, ["model.epsilon=1e-05"]),
    "mistral, biases": (TEXTS["llama"], LEAN | {"qkv_bias": True, "out_bias": True}, ["model.qkv_bias=True"]),
    "vit, mean": (VIT, {"pool": "mean"}, ["model.pool='mean'"]),
    "vit, layer scale": (VIT, {"layer_scale": 0.0}, ["model.layer_scale=0.0"]),
    "vit, rotary": (VIT, {"rotary": 100.0}, ["model.rotary=100.0"]),
    "latent attention": (CASES["GPT, latent attention"], {}, ["model.attention='latent'"]),
    "xcit": (CASES["XCiT"], {}, ['model.name="xcit"', "--to=timm"]),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_options_unsupported_by_transformers_are_refused(name):
    model_case, changes, parts = UNSUPPORTED[name]
    with refuses(*parts, error=ConfigError):
        describe(changes, model_case=model_case)


def test_bert_without_a_head_is_loaded_without_a_pooler():
    """A pooler would get random weights."""
    description = describe({"transform": False, "head_bias": False}, model_case=TEXTS["masked"])
    assert description.architecture == "BertModel"
    assert 'AutoModel.from_pretrained(".", add_pooling_layer=False)' in folders.loading_code(description)


def test_timm_configs_are_exact():
    description = describe(LEAN | {"pool": "mean"}, "timm")
    assert (description.architecture, description.head_dim) == ("vit_base_patch16_224", 16)
    assert description.config["model_args"] == {
        **{"img_size": 32, "patch_size": 8, "in_chans": 3, "embed_dim": 24, "depth": 2, "num_heads": 5},
        **{"init_values": None, "mlp_ratio": 2.0, "global_pool": "avg", "class_token": False},
    }
    sizes = [(name, describe({}, "timm", model_case=CASES[name])) for name in ("XCiT", "TNT", "DaViT", "VOLO-D1")]
    assert all(description.head_dim is None for _, description in sizes)
    assert sizes[-1][1].architecture == "volo_d1_224" and "layers" not in sizes[-1][1].config["model_args"]
    for name, changes, part in (
        ("XCiT", LEAN, "model.head_dim=16"),
        ("XCiT", {"class_heads": 2}, "model.class_heads=2"),
        ("TNT", {"inner_mlp_dim": 9}, "model.inner_mlp_dim=9"),
        ("DaViT", {"head_dim": (4, 8)}, "model.head_dim=8"),
        ("VOLO-D1", {"depth": (4, 4, 8, 3)}, "model.depth=(4, 4, 8, 3)"),
        ("GPT-2", {}, 'model.name="gpt"'),
    ):
        with refuses(part, "--to=own", error=ConfigError):
            describe(changes, "timm", model_case=CASES[name])


def test_preprocessing_config_is_exact():
    assert folders.preprocessing(28, 0.9, (0.5,), (0.25,)) == {
        **{"image_processor_type": "BitImageProcessor", "do_convert_rgb": True, "do_resize": True, "resample": 3},
        **{"size": {"shortest_edge": 31}, "do_center_crop": True, "crop_size": {"height": 28, "width": 28}},
        **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
        **{"image_mean": [0.5] * 3, "image_std": [0.25] * 3},
    }
    assert folders.preprocessing((28, 20), 0.9, (0.5,), (0.25,)) is None


def test_tokenizers_add_the_special_tokens_of_the_models():
    content = ours.byte_tokenizer().json()
    written = folders.tokenizer_files(content, causal=True, types=False, length=16)
    base = tokenizers.Tokenizer.from_str(json.dumps(written["tokenizer.json"]))
    assert base.encode("ab").ids == [256, 97, 98]
    settings = written["tokenizer_config.json"]
    assert settings["split_special_tokens"] is True  # "<|endoftext|>" in a text is text there too
    base.encode_special_tokens = settings["split_special_tokens"]  # what transformers does
    assert base.encode("<|endoftext|>", add_special_tokens=False).ids == [*b"<|endoftext|>"]
    base.encode_special_tokens = False
    assert (settings["eos_token"], settings["model_max_length"], settings["padding_side"]) == (ours.END, 16, "left")
    others = {"GPT-2's": tokenizers.processors.ByteLevel(trim_offsets=False)}
    others["Llama's"] = tokenizers.processors.TemplateProcessing("z $A", "z $A z $B", [("z", ord("z"))])
    for name, processor in others.items():  # as in published files, of models that a run goes on from
        base.post_processor = processor
        again = folders.tokenizer_files(base.to_str(), causal=True, types=False, length=16)["tokenizer.json"]
        assert tokenizers.Tokenizer.from_str(json.dumps(again)).encode("ab").ids == [256, 97, 98], name
    wordpiece = ours.train_wordpiece(["a b ab ba"] * 3, 10)
    written = folders.tokenizer_files(wordpiece.json(), causal=False, types=True, length=8)
    base = tokenizers.Tokenizer.from_str(json.dumps(written["tokenizer.json"]))
    assert [base.encode("a", "b").ids[i] for i in (0, 2, 4)] == [2, 3, 3]
    settings = written["tokenizer_config.json"]
    assert "split_special_tokens" not in settings  # "[MASK]" in a text is the token, as in `Tokenizer.encode`
    assert (settings["mask_token"], settings["pad_token"], settings["cls_token"]) == ("[MASK]", "[PAD]", "[CLS]")
    assert settings["model_input_names"] == ["input_ids", "token_type_ids", "attention_mask"]


def test_folder_has_the_exported_weights(tmp_path):
    """A grey ViT becomes one of three channels, equal for grey images."""
    model = model_setup.set_up_model(case_config("images", "vit", IMAGE | {"channels": 1}))
    folders.write_folder(tmp_path / "grey", model, weights := random_weights(model), "huggingface", folders.Origin())
    written = load_file(tmp_path / "grey" / "model.safetensors")
    plain = pretrained.export(jax.device_get(weights), model.layout("huggingface"))
    name = "vit.embeddings.patch_embeddings.projection.weight"
    np.testing.assert_allclose(written.pop(name).sum(axis=1, keepdims=True), plain.pop(name), rtol=1e-5, atol=1e-7)
    assert written.keys() == plain.keys()
    for key, x in plain.items():
        np.testing.assert_array_equal(written[key], x, err_msg=key)


def make_command(tmp_path, **changes):
    arguments = case("vit_timm", "vit_tiny_grey").arguments | changes
    save_file(dict(case("vit_timm", "vit_tiny_grey").tensors), tmp_path / "theirs")
    keys = {f"model.{name}": value for name, value in arguments.items() if name != "image_size"}
    return [*command("convert", changes=keys), "--from=timm", f"--weights={tmp_path / 'theirs'}"]


def test_command_writes_a_complete_folder(tmp_path):
    out_folder = tmp_path / "out"
    status, out, err = run_in_process([*make_command(tmp_path), "--to=huggingface", f"--out={out_folder}"])
    assert status == 0 and mentions(out, "ViTForImageClassification", "transformers")
    assert err.count("\n") == 1 and mentions(err, "WARNING", tmp_path / "config.json")  # the weights are a single file
    files_written = {path.name for path in out_folder.iterdir()}
    assert files_written == {"config.json", "preprocessor_config.json", "README.md", "model.safetensors"}
    card = (out_folder / "README.md").read_text()
    assert 'AutoModelForImageClassification.from_pretrained(".")' in card and "library_name: transformers" in card
    words = [*make_command(tmp_path), "--to=own", f"--out={tmp_path / 'ours'}"]
    assert run_in_process(words)[0] == 0 and len(pretrained.read(tmp_path / "ours")) > 20
    check_refused([*make_command(tmp_path), "--to=huggingface", f"--out={out_folder}"], f"--out={out_folder}")


def test_card_has_the_scores_of_the_exported_checkpoint(tmp_path):
    c = case_config(*VIT)
    records = [{"kind": "train", "step": 20, "loss": 9.0}, {"kind": "eval", "step": 20, "loss": 0.3846}]
    records.append({"kind": "eval", "step": 30, "loss": 0.2888})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert folders.Origin.of_run(tmp_path, c, 20).facts.items() >= {"step": 20, "loss": 0.3846}.items()
    assert folders.Origin.of_run(tmp_path, c, 30).facts.items() >= {"step": 30, "loss": 0.2888}.items()
    assert "loss" not in folders.Origin.of_run(tmp_path, c, 10).facts  # not evaluated
