"""Attention layers of a PyTorch model, found by structure."""

import dataclasses
import functools
import re
from typing import Any

from torch import nn


HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_attn_heads")
ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)  # in the name of a class
# Names of layers that compute queries, keys and values, packed or not.
INPUT = re.compile(
    r"^(w?_?[qkv]+|(pos_)?(q|k|v|qkv|kv|query|key|value)(_\w+)?|\w*qkv\w*|c_attn|in_proj\w*)$", re.IGNORECASE
)


@dataclasses.dataclass
class Scope:
    """Attention layer of a PyTorch model: the modules whose arrays are taken."""

    name: str  # path in the model; "" for the model itself
    module: nn.Module
    block: nn.Module | None  # module around it whose input is the tokens entering the block
    heads: int | None  # number of heads that the modules state; None if unknown
    projection: nn.Module | None = None  # output projection that `at` selects; None to find it while the layer runs

    @functools.cached_property
    def batch_first(self) -> bool:
        """True if arrays are B T D; False if an `nn.MultiheadAttention` inside takes T B D."""
        attentions = (m for m in self.module.modules() if isinstance(m, nn.MultiheadAttention))
        return all(attention.batch_first for attention in attentions)


def is_linear(module: nn.Module) -> bool:
    """Return True for an `nn.Linear`, and for the Conv1D of transformers, which is a linear layer."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def find_scopes(model: nn.Module) -> tuple[list[Scope], dict[str, str]]:
    """Return the attention layers, and {name: reason} for modules that look like attention but are not measured.

    A layer is a module with a number of heads, or whose class is named attention, and with a linear layer inside; the
    innermost of nested ones. If that has only the linear layers of queries, keys and values (BERT's `self`), it is the
    module around it that also has the output projection.
    """
    modules, candidates, unmatched = dict(model.named_modules()), {}, {}
    for name, module in modules.items():
        has_heads = any(isinstance(getattr(module, attribute, None), int) for attribute in HEADS)
        if not (has_heads or ATTENTION.search(type(module).__name__)):
            continue
        if any(map(is_linear, module.modules())) or isinstance(module, nn.MultiheadAttention):
            candidates[name] = module
        elif name and any(module.children()):  # others are functions of attention, part of a layer around them
            unmatched[name] = f"{type(module).__name__} has no linear layer"
    innermost = [n for n in candidates if not any(o != n and _contains(n, o) for o in candidates)]
    scopes = []
    for name in innermost:
        outer = _widen(name, candidates, innermost)
        scopes.append(Scope(outer, modules[outer], find_block(modules, outer), find_heads(modules, name)))
    return scopes, unmatched


def _contains(outer: str, inner: str) -> bool:
    return not outer or inner.startswith(f"{outer}.")


def _widen(name: str, candidates: dict[str, nn.Module], innermost: list[str]) -> str:
    """Return the smallest attention module around `name` that has more than queries, keys and values."""
    result = name
    while True:
        module = candidates[result]
        linears = [n.rpartition(".")[2] for n, m in module.named_modules() if is_linear(m)]
        if isinstance(module, nn.MultiheadAttention) or any(not INPUT.match(n) for n in linears):
            return result
        parent = result.rpartition(".")[0]
        if parent not in candidates or sum(_contains(parent, other) for other in innermost) != 1:
            return result
        result = parent


def find_block(modules: dict[str, nn.Module], name: str) -> nn.Module | None:
    """Return the block of a layer: the nearest module around it that is numbered, or else its parent."""
    for around in _ancestors(name):
        if around.rpartition(".")[2].isdecimal():
            return modules[around] if around != name else None
    return modules[name.rpartition(".")[0]] if name else None


def _ancestors(name: str) -> list[str]:
    """Return the dotted names of a module and of the modules around it, innermost first; "" is the model."""
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def find_heads(modules: dict[str, nn.Module], name: str) -> int | None:
    """Return the number of heads that the nearest module at or around a name states, itself or in its `config`."""
    for around in _ancestors(name):
        for source in (modules[around], getattr(modules[around], "config", None)):
            for attribute in HEADS:
                value: Any = getattr(source, attribute, None)
                if isinstance(value, int) and value > 0:
                    return value
    return None
