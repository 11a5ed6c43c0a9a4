"""Published config.json files beside weights: every setting that changes what the weights compute is compared."""

import functools
import json

import pytest
from messages import mentions, refuses

from experiments.exports import CASES, case_config
from leanformer import models
from leanformer.errors import WeightsError
from leanformer.exports import folders
from leanformer.pretrained import published
from leanformer.pretrained.published import huggingface, timm


FOLDERS = {  # folder: case, library
    **{
        "gpt2": ("GPT-2", "huggingface"),
        "llama": ("Llama", "huggingface"),
        "mistral": ("Llama, 5 x 16", "huggingface"),
    },
    **{"qwen2": ("Qwen2, 5 x 16", "huggingface"), "qwen3": ("Qwen3, 5 x 16", "huggingface")},
    **{"deepseek": ("DeepSeek-V3", "huggingface"), "bert": ("BERT, masked", "huggingface")},
    **{"vit": ("ViT, 5 x 16 > 24", "huggingface"), "deit": ("DeiT, 5 x 16", "huggingface")},
    **{
        "dinov2": ("DINOv2, 5 x 16", "huggingface"),
        "timm vit": ("ViT", "timm"),
        "timm lean": ("ViT, 5 x 16 > 24", "timm"),
    },
    **{"timm deit": ("DeiT, 5 x 16", "timm"), "timm mean": ("ViT, mean of patches", "timm"), "xcit": ("XCiT", "timm")},
    **{"tnt": ("TNT", "timm"), "davit": ("DaViT", "timm"), "volo": ("VOLO-D1", "timm")},
}
ABSENT = object()  # the key is removed, so that the library takes its default


@functools.cache
def describe(folder):
    """Return the content of config.json and the config of the model."""
    case, library = FOLDERS[folder]
    c = case_config(*CASES[case])
    content = dict(folders.describe(c, library).config)
    if library == "timm":
        content["pretrained_cfg"] = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "num_classes": 11}
    return json.loads(json.dumps(content)), c.model.to_dict()


def check(path, content, model, layout="huggingface"):
    (path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    family = models.find_class(model["name"])
    settings, keys = family.settings(model), {*family.defaults(), *model}
    published.check(path / "model.safetensors", layout, settings, configurable=keys)


def change(content, key, value):
    """Return a published config with another value; keys of timm are those of `model_args`, or dotted."""
    content = json.loads(json.dumps(content))
    place, _, name = key.rpartition(".")
    where = content[place] if place else content.get("model_args", content)
    where.pop(name, None)
    return (
        content
        if value is ABSENT
        else content | {place: where | {name: value}}
        if place
        else (content | ({"model_args": where | {name: value}} if "model_args" in content else {name: value}))
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_exported_configs_are_those_of_their_models(tmp_path, folder, capsys):
    check(tmp_path, *describe(folder), FOLDERS[folder][1])
    assert capsys.readouterr().err == ""


CHANGED = [  # folder, key, value, what the message mentions
    ("vit", "num_attention_heads", 10, ("model.num_heads=10", 5, "--config.model.num_heads=10")),
    ("vit", "head_dim", ABSENT, ("model.head_dim=4", 16)),
    ("vit", "hidden_act", "relu", ("model.activation=relu", "gelu")),
    ("vit", "hidden_act", "gelu_new", ("model.activation=gelu_tanh", "gelu")),
    ("vit", "layer_norm_eps", 1e-3, ("model.epsilon=0.001", 1e-6)),
    ("vit", "layer_norm_eps", ABSENT, ("model.epsilon=1e-12", 1e-6, "--config.model.epsilon=1e-12")),
    ("vit", "qkv_bias", False, ("model.qkv_bias=False",)),
    ("vit", "model_type", "bert", ("model.name=bert", "vit")),
    ("vit", "model_type", "deit", ("model.distilled=True", False)),
    ("vit", "model_type", "dinov2", ("model.layer_scale=True",)),
    ("vit", "model_type", "siglip", ("model_type=siglip",)),
    ("vit", "model_type", ABSENT, ("model_type=None",)),
    ("vit", "image_size", [16, 64], ("model.image_size=(16, 64)", "init_from.resize_positions=True")),
    ("vit", "patch_size", ABSENT, ("model.patch_size=16", 8)),
    ("vit", "quantization_config", {"bits": 8}, ("quantization_config",)),
    ("dinov2", "mlp_ratio", 4, ("model.mlp_dim=96", 48)),
    ("dinov2", "use_swiglu_ffn", True, ("use_swiglu_ffn=True",)),
    ("bert", "num_attention_heads", 6, ("model.num_heads=6", 3, "model.head_dim=4", 8)),
    ("bert", "num_attention_heads", ABSENT, ("model.num_heads=12", 3)),
    ("bert", "hidden_act", "relu", ("model.activation=relu", "gelu")),
    ("bert", "layer_norm_eps", 1e-5, ("model.epsilon=1e-05", 1e-12)),
    ("bert", "is_decoder", True, ("is_decoder=True",)),
    ("bert", "position_embedding_type", "relative_key", ("position_embedding_type='relative_key'",)),
    ("bert", "tie_word_embeddings", False, ("tie_word_embeddings=False",)),
    ("bert", "model_type", "roberta", ("model.max_length=14", 16)),
    ("gpt2", "n_head", 6, ("model.num_heads=6", "model.head_dim=4")),
    ("gpt2", "num_attention_heads", 6, ("model.num_heads=6", "model.head_dim=4")),
    ("gpt2", "activation_function", "gelu", ("model.activation=gelu", "gelu_tanh")),
    ("gpt2", "scale_attn_weights", False, ("scale_attn_weights=False",)),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True, ("scale_attn_by_inverse_layer_idx=True",)),
    ("gpt2", "tie_word_embeddings", False, ("model.tied=False", True)),
    ("gpt2", "layer_norm_epsilon", ABSENT, ()),
    ("llama", "num_key_value_heads", 4, ("model.num_kv_heads=4", 2)),
    ("llama", "num_key_value_heads", ABSENT, ("model.num_kv_heads=4", 2)),
    ("llama", "rms_norm_eps", 1e-5, ("model.epsilon=1e-05", 1e-6)),
    ("llama", "hidden_act", "gelu", ("model.activation=gelu", "silu")),
    ("llama", "rope_parameters", {"rope_theta": 5e5}, ("model.rotary=500000.0", 10000.0)),
    ("llama", "rope_parameters", {"rope_type": "yarn", "factor": 4.0}, ("yarn", "default")),
    ("llama", "rope_parameters", {"full_attention": {"rope_theta": 1e4}}, ("default",)),
    ("llama", "rope_scaling", {"type": "linear", "factor": 2.0}, ("linear", "default")),
    ("llama", "rope_scaling", {"rope_theta": 7.0}, ("model.rotary=7.0", 10000.0)),
    ("llama", "rope_scaling", {"rope_type": "default"}, ()),
    ("llama", "partial_rotary_factor", 0.5, ("partial_rotary_factor=0.5",)),
    ("llama", "attention_bias", True, ("model.qkv_bias=True", "model.out_bias=True")),
    ("llama", "mlp_bias", True, ("mlp_bias=True",)),
    ("llama", "model_type", "smollm3", ("model_type=smollm3",)),
    ("mistral", "sliding_window", 8, ("sliding_window=8", "model.max_length=16")),
    ("mistral", "sliding_window", 16, ()),
    ("qwen2", "layer_types", ["full_attention", "sliding_attention"], ("model.max_length=16",)),
    ("qwen2", "attention_bias", True, ("attention_bias=True",)),
    ("qwen3", "rms_norm_eps", 1e-5, ("rms_norm_eps=1e-05", 1e-6)),
    ("qwen3", "head_dim", ABSENT, ("model.head_dim=128", 16)),
    ("deepseek", "rope_interleave", False, ("rope_interleave=false",)),
    ("deepseek", "first_k_dense_replace", 1, ("first_k_dense_replace=1", "model.depth=2")),
    ("deepseek", "qk_rope_head_dim", 4, ("model.rotary_width=4", 6)),
    ("timm vit", "num_heads", 6, ("model.num_heads=6", 3)),
    ("timm vit", "num_heads", ABSENT, ("model.num_heads=12", 3)),
    ("timm vit", "num_classes", 22, ("num_classes=11", 22)),
    ("timm vit", "pretrained_cfg.num_classes", 22, ()),
    ("timm vit", "act_layer", "relu", ("act_layer='relu'",)),
    ("timm vit", "norm_layer", "rmsnorm", ("norm_layer='rmsnorm'",)),
    ("timm vit", "global_pool", "avg", ("model.pool=mean", "token")),
    ("timm vit", "pretrained_cfg.global_pool", "avg", ("model.pool=mean", "token")),
    ("timm vit", "init_values", 1e-5, ("model.layer_scale=True", False)),
    ("timm vit", "pool_include_prefix", True, ("pool_include_prefix=True",)),
    ("timm deit", "num_heads", 10, ("model.num_heads=10", 5)),
    ("xcit", "num_heads", 6, ("model.num_heads=6", 3)),
    ("xcit", "tokens_norm", False, ("model.tokens_norm=False", True)),
    ("xcit", "act_layer", "relu", ("act_layer='relu'",)),
    ("tnt", "num_heads_inner", 4, ("model.inner_heads=4", 2)),
    ("tnt", "num_heads_outer", 6, ("model.num_heads=6", 3)),
    ("tnt", "legacy", False, ("model.layout=patchwise", "original")),
    ("davit", "num_heads", [1, 2], ("model.num_heads=(1, 2)", "model.channel_head_dim=(8, 8)")),
    ("davit", "window_size", 8, ("model.window_size=8", 7)),
    ("davit", "norm_eps", 1e-6, ("model.epsilon=1e-06", 1e-5)),
    ("volo", "outlook_attention", [True, True, False, False], ("outlook_attention",)),
    ("volo", "post_layers", ["ca"], ("model.class_depth=1", 2)),
    ("volo", "use_aux_head", False, ("model.token_head=False", True)),
]


@pytest.mark.parametrize(("folder", "key", "value", "parts"), CHANGED)
def test_changed_settings_are_refused(tmp_path, folder, key, value, parts, capsys):
    content, model = describe(folder)
    content = change(content, key, value)
    if not parts:  # the value is that of the model, or not read
        check(tmp_path, content, model, FOLDERS[folder][1])
        return
    with refuses(tmp_path / "config.json", *parts, error=WeightsError) as error:
        check(tmp_path, content, model, FOLDERS[folder][1])
    assert "\n" not in str(error.value) and capsys.readouterr().err == ""


def test_rotation_of_a_part_of_each_head_is_not_that_of_a_llama(tmp_path):
    content, model = describe("llama")
    with refuses("model.rotary_width", 4, error=WeightsError):
        check(tmp_path, content, model | {"rotary_width": 4})


HARMLESS = [
    *(("vit", key, 0.5) for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")),
    *(("llama", key, 7) for key in ("bos_token_id", "transformers_version", "max_position_embeddings", "torch_dtype")),
    *(("bert", key, None) for key in ("use_cache", "classifier_dropout", "id2label", "problem_type")),
    *(("timm vit", key, 0.5) for key in ("drop_rate", "drop_path_rate", "proj_drop_rate")),
    ("xcit", "img_size", 384),
]


@pytest.mark.parametrize(("folder", "key", "value"), HARMLESS)
def test_settings_without_effect_are_not_mentioned(tmp_path, folder, key, value, capsys):
    content, model = describe(folder)
    check(tmp_path, change(content, key, value), model, FOLDERS[folder][1])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("folder", ["gpt2", "vit", "timm vit", "davit"])
def test_unknown_keys_are_warned_of(tmp_path, folder, capsys):
    content, model = describe(folder)
    check(tmp_path, change(content, "attention_sinks", 4), model, FOLDERS[folder][1])
    assert mentions(capsys.readouterr().err, "WARNING", tmp_path / "config.json", "attention_sinks")


def test_weights_without_a_published_config_are_warned_of(tmp_path, capsys):
    published.warn_unchecked(tmp_path / "model.safetensors")
    assert mentions(capsys.readouterr().err, "WARNING", tmp_path / "config.json", "heads")
    (tmp_path / "config.json").write_text("{}")
    published.warn_unchecked(tmp_path)
    assert capsys.readouterr().err == ""


def test_unknown_names_of_timm_are_warned_of(tmp_path, capsys):
    content, model = describe("timm vit")
    check(tmp_path, content | {"architecture": "vit_of_mine"}, model, "timm")
    assert mentions(capsys.readouterr().err, "WARNING", "vit_of_mine", "model_args")
    with refuses("model.num_heads=6", error=WeightsError):
        check(tmp_path, change(content | {"architecture": "vit_of_mine"}, "num_heads", 6), model, "timm")


@pytest.mark.parametrize(
    "name", ["vit_small_patch16_224.augreg_in1k", "deit_tiny_distilled_patch16_224", "volo_d5_448"]
)
def test_registered_names_have_arguments(name):
    table, named = timm.find(name)
    theirs = table.translate(timm.flatten({"architecture": name}, named))
    expected = {"vit": (384, 6, 1536), "dei": (192, 3, 768), "vol": ((384, 768, 768, 768), (12, 16, 16, 16))}[name[:3]]
    assert (theirs["width"], theirs["num_heads"], theirs["mlp_dim"])[: len(expected)] == expected


@pytest.mark.parametrize("kind", huggingface.REFUSED)
def test_unsupported_model_types_are_refused_by_name(tmp_path, kind):
    with refuses(tmp_path / "config.json", kind, error=WeightsError):
        check(tmp_path, {"model_type": kind}, describe("gpt2")[1])


@pytest.mark.parametrize("content", ["{", "[1]", "\0", '{"model_type": "vit", "num_attention_heads": "four"}'])
def test_unreadable_configs_are_refused(tmp_path, content):
    with refuses(tmp_path / "config.json", error=WeightsError):
        check(tmp_path, content, describe("vit")[1])


@pytest.mark.parametrize("value", [None, "x", [], {}, True, -1, 1e400, [[1]], 0])
@pytest.mark.parametrize("folder", ["dinov2", "deepseek", "timm vit", "davit", "volo"])
def test_values_of_other_types_are_one_message(tmp_path, folder, value):
    """Each key in turn has a hostile value: it is refused, or equal to what the model has."""
    content, model = describe(folder)
    for key in content.get("model_args", content):
        try:
            check(tmp_path, change(content, key, value), model, FOLDERS[folder][1])
        except WeightsError as error:
            assert str(tmp_path) in str(error)


def test_nothing_is_checked_without_a_config(tmp_path):
    published.check(tmp_path / "model.safetensors", "huggingface", {"name": "vit"})
    published.check(tmp_path, "timm", {"name": "vit"})


def test_soft_cap_of_nanochat_is_compared(tmp_path):
    content = {"model_type": "nanochat", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 5}
    content |= {"num_key_value_heads": 5, "head_dim": 16, "intermediate_size": 48, "vocab_size": 61}
    model = CASES["Qwen3, 5 x 16"][2] | {"name": "gpt", "gated": False, "activation": "relu2"}
    check(tmp_path, content, model | {"head_cap": 15.0})
    with refuses("model.head_cap=15.0", "None", error=WeightsError):
        check(tmp_path, content, model)
    check(tmp_path, content | {"final_logit_softcapping": None}, model)
