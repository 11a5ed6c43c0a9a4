"""Arrays of one attention layer of a PyTorch model, taken from the functions that it calls.

The output projection is the first linear layer after the attention product that takes heads x head dimension and is not
applied to the layer's input; without a product that is visible (a fused kernel), the last such linear layer.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from leanformer.watching.measures import OF_LOGITS, OF_QUERIES
from leanformer.watching.torch_layers import Scope


PRODUCTS = {"matmul", "__matmul__", "bmm"}
DROPOUT = {"dropout", "dropout_", "to", "type_as", "contiguous"}
INNER = ("linear", "softmax", "scaled_dot_product_attention")  # functions that multi_head_attention_forward calls


class Recorder(TorchFunctionMode):
    """Observer of the functions that one attention layer calls, within a `with` block around one call of the layer.

    It holds references to tensors, and copies nothing. `arrays` returns the result after the call.

    Args:
        args, kwargs: arguments of the call of the layer.
    """

    def __init__(self, scope: Scope, args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        super().__init__()
        self.scope = scope
        self.ignored = {id(x) for name, x in scope.module.named_parameters() if "lora_" in name}
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        self.inputs = {id(x): x for x in given}  # tensors that other linear layers take: the projection takes another
        self.leading = given[0].shape[:-1] if given else ()
        self.projected: torch.Tensor | None = None  # input of the output projection
        self.weight: torch.Tensor | None = None  # of the output projection
        self.flat = False  # whether this weight is inputs x outputs
        self.transposed: tuple[int, int] | None = None  # (T, B) if rows of `projected` are in this order
        self.tokens_first = False  # whether the layer takes T B D
        self.product: torch.Tensor | None = None  # result of the attention product, B N T H
        self.logits: Callable[[int], torch.Tensor] | None = None  # of the first examples, B N T S
        self.queries: torch.Tensor | None = None  # of a fused attention product, B N T H
        self.keys: torch.Tensor | None = None  # likewise, B K S H
        self.weights: list[torch.Tensor] = []  # attention probabilities, and the same after dropout or a cast

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "multi_head_attention_forward":
            return self._inside(func, args, kwargs)
        result = func(*args, **kwargs)
        self.see(name, args, kwargs, result)
        return result

    def _inside(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call PyTorch's function for `nn.MultiheadAttention`, and see the functions inside, which have no hooks."""

        def watch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                self.see(name, args, kwargs, result)
                return result

            return call

        query = _argument(args, kwargs, 0, "query")  # T B D, or T D
        self.transposed = (query.shape[0], query.shape[1] if query.ndim == 3 else 1)
        with contextlib.ExitStack() as undo:
            for name in INNER:
                original = getattr(functional, name)
                undo.callback(setattr, functional, name, original)
                setattr(functional, name, watch(name, original))
            return func(*args, **kwargs)

    def see(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Set the attributes from the call of a PyTorch function in the layer, such as "softmax".

        A softmax or a fused attention discards the projection that was seen before.
        """
        first = _argument(args, kwargs, 0, "input")
        if name == "linear":
            self._see_linear(first, _argument(args, kwargs, 1, "weight"))
        elif name == "addmm":  # transformers' Conv1D: bias, input, weight
            weight = _argument(args, kwargs, 2, "mat2")
            self._see_linear(_argument(args, kwargs, 1, "mat1"), weight)
            self.flat = self.weight is weight or self.flat
        elif name == "scaled_dot_product_attention":
            self._see_fused(*args, result=result, **kwargs)
        elif name == "softmax" and result.ndim in (3, 4):
            logits, heads = first, self.scope.heads
            self.weights, self.product, self.projected = [result], None, None
            # No reference to `self`: the cycle would keep the tensors of each call until Python collects garbage.
            self.logits = lambda examples: by_head(logits, heads)[:examples]
        elif self.weights and any(first is x for x in self.weights):
            if name in DROPOUT and isinstance(result, torch.Tensor):
                self.weights.append(result)
            elif name in PRODUCTS:
                self.product, self.projected = by_head(result, self.scope.heads), None

    def _see_linear(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        if id(weight) in self.ignored:
            return
        if self.scope.projection is not None:
            chosen = weight is self.scope.projection.weight
        else:
            repeated = any(x is other or _same_storage(x, other) for other in self.inputs.values())
            settled = self.projected is not None and (self.product is not None or self.weights)
            chosen = not (repeated or settled) and self._fits(x.shape[-1])
            self.inputs[id(x)] = x
        if chosen:
            self.projected, self.weight = x, weight

    def _fits(self, width: int) -> bool:
        """Return True if a width can be heads x head dimension."""
        if self.product is not None and self.product.ndim == 4:
            _, heads, *sizes = self.product.shape
            return width in [heads * size for size in sizes]
        return not self.scope.heads or (width % self.scope.heads == 0 and width > self.scope.heads)

    def _see_fused(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, result: Any, scale: float | None = None, enable_gqa: bool = False,
    ) -> None:  # fmt: skip
        self.projected = None
        if query.ndim != 4:
            return
        self.product, self.queries, self.keys = result, query, key

        def logits(examples: int) -> torch.Tensor:
            q, k = query[:examples].float(), key[:examples].float()
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            products = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
            mask = attn_mask
            if is_causal:
                mask = torch.ones(products.shape[-2:], dtype=torch.bool, device=q.device).tril()
            if mask is None:
                return products
            mask = mask[:examples] if mask.ndim == 4 and len(mask) > 1 else mask
            return products.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else products + mask

        self.logits = logits

    def arrays(self, limit: int | None, names: Sequence[str]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Return arrays of the call by name, and notes about the layer.

        The arrays are "out" (B T N H; N = 1 if the number of heads is unknown) and, if `names` of measures need them
        and they were seen, "logits" (B N T S), "q" and "k" (B T N H, B S K H), of the first `limit` examples. There are
        none if no output projection was seen.
        """
        if self.projected is None:
            return {}, []
        if self.transposed is None:
            x = as_batch(self.projected, self.leading)
        else:
            x = self.projected.reshape(*self.transposed, -1).transpose(0, 1)
        notes, heads = [], self.scope.heads
        if self.product is not None and self.product.ndim == 4 and self.transposed is None:
            batch, _, tokens, _ = self.product.shape
            if tokens == 1 and self.projected.shape[:-1] == (batch,):  # one query pools the tokens of each image
                x = self.projected[:, None]
            self.tokens_first = (tokens, batch) == x.shape[:2] != (batch, tokens)
            x = x.transpose(0, 1) if self.tokens_first else x
        if self.product is not None and self.product.ndim == 4 and self._tokens_agree(x):
            joined = self.product.transpose(1, 2).flatten(2)
            if joined.shape == x.shape:
                if heads not in (None, self.product.shape[1]):
                    notes.append(f"heads={heads}, but the attention product has {self.product.shape[1]}, which count")
                heads = self.product.shape[1]
                if not torch.allclose(joined, x, rtol=0, atol=0, equal_nan=True):
                    x = joined
                    notes.append("a norm or gate stands between heads and output projection: measured before it")
        if heads and x.shape[-1] % heads:
            notes.append(f"the projection takes {x.shape[-1]} numbers, not a multiple of {heads} heads: pass heads=")
            heads = None
        if not heads:
            notes.append("the number of heads is unknown: pass heads=")
        x = x[:limit]
        arrays = {"out": x.reshape(*x.shape[:2], heads or 1, -1)}
        of_values = self.product is not None or self.transposed is not None  # else any softmax, such as of positions
        if not OF_LOGITS.isdisjoint(names) and self.logits is not None and of_values and heads:
            logits = self.logits(len(x))
            if logits.ndim == 4 and logits.shape[:3] == (len(x), heads, x.shape[1]):
                arrays["logits"] = logits
        if not OF_QUERIES.isdisjoint(names) and self.queries is not None and self.queries.shape[2] == x.shape[1]:
            arrays |= {"q": self.queries[:limit].transpose(1, 2), "k": self.keys[:limit].transpose(1, 2)}
        return {name: measurable(value) for name, value in arrays.items()}, notes

    def _tokens_agree(self, x: torch.Tensor) -> bool:
        """Return True if the product has a row per token: attention over channels has a column."""
        product = self.product
        over_channels = product.shape[2] == product.shape[3] and torch.equal(product.permute(0, 3, 1, 2).flatten(2), x)
        return product.shape[::2] == x.shape[:2] and not over_channels


def _argument(args: Any, kwargs: Mapping[str, Any], index: int, name: str) -> Any:
    """Return an argument of a function, given by its position or by its name; None if it is not given."""
    return args[index] if index < len(args) else kwargs.get(name)


def by_head(x: torch.Tensor, heads: int | None) -> torch.Tensor:
    """Split the first axis of B·N T S into B N T S, unless x has four axes or the number of heads is unknown."""
    return x if x.ndim == 4 or not heads else x.reshape(-1, heads, *x.shape[1:])


def as_batch(x: torch.Tensor, leading: tuple[int, ...] = ()) -> torch.Tensor:
    """Return (T, D), (B, T, D), (B, rows, columns, D), or x whose axes `leading` are flattened, as B T D."""
    if x.ndim == 2 and len(leading) > 1 and math.prod(leading) == len(x):
        x = x.reshape(*leading, x.shape[-1])
    return x[None] if x.ndim == 2 else x.flatten(1, -2)


def measurable(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor without gradients, on its device if that has float64."""
    return x.detach().to(device="cpu" if x.device.type == "mps" else None)


def _same_storage(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True for two views of all the same numbers."""
    return x.numel() == other.numel() and x.data_ptr() == other.data_ptr() and x.dtype == other.dtype
