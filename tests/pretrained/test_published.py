"""The config.json beside published weights: settings that the shapes of weights do not show are compared."""

import functools
import json

import pytest
from messages import mentions, refuses

from leanformer import models
from leanformer.errors import WeightsError
from leanformer.exports import folders
from leanformer.pretrained import published
from tools.exports import CASES, case_config


FOLDERS = {  # folder: case, library
    **{"gpt2": ("GPT-2", "huggingface"), "llama": ("Llama", "huggingface"), "bert": ("BERT, masked", "huggingface")},
    **{"mistral": ("Llama, 5 x 16", "huggingface"), "qwen2": ("Qwen2, 5 x 16", "huggingface")},
    **{"qwen3": ("Qwen3, 5 x 16", "huggingface"), "vit": ("ViT, 5 x 16 > 24", "huggingface")},
    **{"deit": ("DeiT, 5 x 16", "huggingface"), "timm vit": ("ViT", "timm"), "timm lean": ("ViT, 5 x 16 > 24", "timm")},
    **{"timm deit": ("DeiT, 5 x 16", "timm"), "timm mean": ("ViT, mean of patches", "timm"), "xcit": ("XCiT", "timm")},
    **{"tnt": ("TNT", "timm"), "davit": ("DaViT", "timm"), "volo": ("VOLO-D1", "timm")},
}


@functools.cache
def describe(folder):
    """Return the content of config.json and the config of the model."""
    case, library = FOLDERS[folder]
    c = case_config(*CASES[case])
    return json.loads(json.dumps(dict(folders.describe(c, library).config))), c.model.to_dict()


def check(path, content, model, layout="huggingface"):
    (path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    published.check(path / "model.safetensors", layout, models.find_class(model["name"]).settings(model))


@pytest.mark.parametrize("folder", FOLDERS)
def test_exported_configs_fit_their_models(tmp_path, folder, capsys):
    check(tmp_path, *describe(folder), FOLDERS[folder][1])
    assert capsys.readouterr().err == ""


CHANGED = [  # folder, changes, what the message mentions
    ("vit", {"num_attention_heads": 10}, ("--config.model.num_heads=10", "model.num_heads=5")),
    ("vit", {"hidden_act": "relu"}, ("--config.model.activation=relu", "gelu")),
    ("vit", {"model_type": "bert"}, ("model.name=bert", "vit")),
    ("bert", {"position_embedding_type": "relative_key"}, ("position_embedding_type='relative_key'",)),
    ("gpt2", {"n_layer": 3}, ("--config.model.depth=3", 2)),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx=True",)),
    ("gpt2", {"scale_attn_weights": False}, ("scale_attn_weights=False",)),
    ("llama", {"num_key_value_heads": 4}, ("--config.model.num_kv_heads=4", 2)),
    ("llama", {"rope_parameters": {"rope_theta": 5e5}}, ("--config.model.rotary=500000.0", 10000.0)),
    ("llama", {"rope_parameters": {"rope_type": "yarn"}}, ("yarn", "default")),
    ("llama", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor=0.5",)),
    ("mistral", {"sliding_window": 8}, ("sliding_window=8", "--config.model.max_length=8")),
    ("qwen3", {"rms_norm_eps": 1e-5}, ("rms_norm_eps=1e-05",)),
    ("timm vit", {"num_heads": 6}, ("--config.model.num_heads=6", 3)),
    (
        "timm vit",
        {"num_heads": None, "architecture": "vit_small_patch16_224.augreg"},
        ("--config.model.num_heads=6", 3),
    ),
    ("xcit", {"num_heads": 6}, ("--config.model.num_heads=6", "--config.model.class_heads=6", 3)),
    ("tnt", {"num_heads_inner": 4}, ("--config.model.inner_heads=4", 2)),
    ("davit", {"num_heads": [1, 2]}, ("--config.model.num_heads=(1,2)", "(2, 4)")),
]


@pytest.mark.parametrize(("folder", "changes", "parts"), CHANGED, ids=str)
def test_changed_settings_are_refused(tmp_path, folder, changes, parts):
    content, model = describe(folder)
    args = content.get("model_args")
    content = content | {key: x for key, x in changes.items() if args is None or key in content}
    if args is not None:
        changed = args | {key: x for key, x in changes.items() if key not in content}
        content["model_args"] = {key: x for key, x in changed.items() if x is not None}
    with refuses(tmp_path / "config.json", *parts, error=WeightsError):
        check(tmp_path, content, model, FOLDERS[folder][1])


def test_unread_numbers_of_heads_are_warned_of(tmp_path, capsys):
    content, model = describe("timm vit")
    del (args := dict(content["model_args"]))["num_heads"]
    check(tmp_path, content | {"architecture": "vit_of_mine", "model_args": args}, model, "timm")
    assert mentions(capsys.readouterr().err, "WARNING", tmp_path / "config.json", "heads")
    (tmp_path / "config.json").unlink()
    published.check(tmp_path, "huggingface", {"name": "vit"})
    assert mentions(capsys.readouterr().err, "WARNING", tmp_path / "config.json", "heads")


def test_normalisation_of_images_is_read(tmp_path):
    assert published.normalisation(tmp_path) == {}
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2], "image_std": [0.3, 0.4]}')
    assert published.normalisation(tmp_path / "model.safetensors") == {"mean": (0.1, 0.2), "std": (0.3, 0.4)}


def test_gpt2_declared_tied_says_how_to_untie_it(tmp_path):
    """Following the advice for an untied GPT-2 whose config.json says that it is tied ends in a model that loads."""
    content, model = describe("gpt2")
    check(tmp_path, content, model)
    with refuses("--config.model.tied=True", "tie_word_embeddings", error=WeightsError):
        check(tmp_path, content, model | {"tied": False})
    check(tmp_path, content | {"tie_word_embeddings": False}, model | {"tied": False})
    silent = {key: x for key, x in content.items() if key != "tie_word_embeddings"}
    check(tmp_path, silent, model | {"tied": False})


def test_soft_cap_of_nanochat_is_compared(tmp_path):
    content = {"model_type": "nanochat", "num_attention_heads": 5, "final_logit_softcapping": 15.0}
    model = CASES["Qwen3, 5 x 16"][2] | {"name": "gpt", "gated": False, "activation": "relu2"}
    check(tmp_path, content, model | {"head_cap": 15.0})
    with refuses("--config.model.head_cap=15.0", "None", error=WeightsError):
        check(tmp_path, content, model)
