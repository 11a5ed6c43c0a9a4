"""Watch of a PyTorch model: one recorder per attention layer, active while the layer runs.

During a measured call, a recorder sees the functions that its layer calls (`TorchFunctionMode`): the attention product
and the linear layers. So the fast paths of `torch.nn`, which skip hooks, are not taken, and layers of any name are
found. Calls that are not measured cost one Python function per attention layer.

Module `torch_layers` finds the attention layers and the number of heads that they state. Module `torch_recorder` finds
the arrays and splits them into heads; the number of heads of an attention product that it sees counts before the
stated one.
"""

import contextlib
import copy
import dataclasses
import fnmatch
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from leanformer.conditioning.spectrum import to_numpy
from leanformer.errors import ConfigError
from leanformer.watching import Watch, torch_layers
from leanformer.watching.measures import WINDOWS, Layer, reduce
from leanformer.watching.torch_layers import Scope
from leanformer.watching.torch_recorder import Recorder, as_batch, measurable


# Arguments of a model's call that mark padding, and whether True means padding.
MASKS = {"attention_mask": False, "src_key_padding_mask": True, "tgt_key_padding_mask": True, "key_padding_mask": True}
# Arguments of an encoder-decoder, whose call has masks of two sides: encoder and decoder are called with their own.
SOURCE, TARGET = {"src_key_padding_mask", "attention_mask"}, {"tgt", "decoder_input_ids", "decoder_attention_mask"}
OWN = "no padding mask was read from the call of this part of the model: padding counts. Pass the model its mask"
SHOWN = 12  # candidates in a message
TRACED = "calls inside torch.compile, torch.export, torch.func or another tracer are not measured"
DIRECT = "its forward may have been called directly, which hooks do not see"


def attach(watch: Watch) -> Callable[[], None]:
    """Register the hooks of a watch on its PyTorch model, and return the function that removes them."""
    check_supported(watch.model)
    layers, watch.unmatched = torch_layers.find_scopes(watch.model)
    if watch.options.at is not None:
        layers = _select(watch.model, watch.options.at, layers)
    if not layers:
        raise ConfigError(_describe_missing(watch.model, watch.options.at))
    initial = None
    if isinstance(watch.reference, nn.Module):  # called along, so that its watch is the reference
        options = dataclasses.replace(watch.options, reference=None, every=1)
        initial = watch.reference = Watch(watch.reference, options, attach).__enter__()
    hooks = Hooks(watch, initial, layers)

    def detach() -> None:
        for handle in hooks.handles:
            handle.remove()
        if initial is not None:
            initial.__exit__()
        for layer in watch.layers.values():
            if hooks.skipped:
                layer.note(TRACED)
            elif not layer.calls and hooks.calls:
                layer.note(DIRECT)

    return detach


def check_supported(model: nn.Module) -> None:
    """Raise ConfigError if layers run without hooks, or in threads."""
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            reason = "is compiled: its layers run without hooks. Watch and call the model before torch.compile."
        elif isinstance(module, nn.DataParallel):
            reason = "runs copies of the model in threads. Watch the model inside: model.module."
        else:
            continue
        raise ConfigError(f"{type(module).__name__} {name} {reason}")


def _select(model: nn.Module, pattern: str, layers: list[Scope]) -> list[Scope]:
    """Return a layer for each layer with a weight whose name matches a pattern."""
    modules = dict(model.named_modules())
    chosen = [
        name
        for name, module in modules.items()
        if name and fnmatch.fnmatchcase(name, pattern) and getattr(module, "weight", None) is not None
    ]
    result = []
    for name in chosen:
        # The layer that was found around it sees the attention product; otherwise only the projection's input.
        inside = [scope for scope in layers if scope.name == "" or name.startswith(f"{scope.name}.")]
        outer = inside[0].name if inside else name.rpartition(".")[0]
        block = inside[0].block if inside else torch_layers.find_block(modules, name)
        heads = inside[0].heads if inside else torch_layers.find_heads(modules, outer)
        result.append(Scope(name, modules[outer], block, heads, modules[name]))
    return result


def _describe_missing(model: nn.Module, pattern: str | None) -> str:
    linear = [name for name, module in model.named_modules() if torch_layers.is_linear(module)]
    names = ", ".join(name or "the model itself" for name in linear[:SHOWN])
    candidates = f"Its {len(linear)} linear layers: {names}{', ...' * (len(linear) > SHOWN)}"
    if pattern is not None:
        return f"at={pattern}: no module with a weight has such a name in {type(model).__name__}. {candidates}"
    return (
        f"watch: no attention layer was found in {type(model).__name__}: no module with a number of heads "
        f"({', '.join(torch_layers.HEADS[:3])}, ...) or a class named attention has a linear layer. Select the output "
        f'projections with at="...". {candidates}'
    )


class PassThrough(TorchFunctionMode):
    """Mode of PyTorch that changes no function, but whose presence disables fast paths, which would skip hooks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Hooks:
    """Hooks of one watch on one PyTorch model and its attention layers, which are added to the watch.

    Args:
        initial: open watch of a model to call with the same arguments; None for none.
    """

    def __init__(self, watch: Watch, initial: Watch | None, layers: list[Scope]):
        self.watch, self.options, self.initial = watch, watch.options, initial
        self.handles: list[Any] = []
        self.running = self.measured = False  # a call of the model; it is one to measure
        self.calls, self.skipped = 0, False
        self.tokens: dict[nn.Module, torch.Tensor | None] = {}  # input of running blocks
        # Masks of the running parts of the model (True: not padding), and what to note if there is none.
        self.masks: list[tuple[np.ndarray | None, str]] = []
        self.seen: set[str] = set()  # layers that ran in this call of the model
        model = watch.model
        for block in {scope.block for scope in layers} - {None}:
            self._during(block, functools.partial(self._enter_block, block), prepend=False)
        for encoder in (m for m in model.modules() if isinstance(m, nn.TransformerEncoder)):
            self._during(encoder, self._enter_encoder, prepend=False)
        for scope in layers:
            scope.heads = self.options.heads or scope.heads
            layer = watch.add_layer(scope.name or type(model).__name__, scope.heads)
            self._during(scope.module, functools.partial(self._enter_layer, scope, layer, itertools.count()))
        # The later registered, the earlier entered and the later left: these around layers, the model around all.
        for part in (m for m in model.modules() if m is not model and (_takes_mask(m) or _has_own_masks(m))):
            self._during(part, functools.partial(self._enter_part, part))
        self._during(model, self._enter_model)

    def _during(self, module: nn.Module, make: Callable[..., Any], prepend: bool = True) -> None:
        """Have the context manager `make(args, kwargs)`, if there is one, entered and left around calls of a module.

        Nothing happens under a tracer, compiler or functional transform, which know no numbers.
        """
        entered: list[Any] = []

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling() or _is_transformed():
                self.skipped = True
            else:
                context = make(args, kwargs) or contextlib.nullcontext()
                context.__enter__()
                entered.append(context)

        def leave(*_: object) -> None:
            if entered:
                entered.pop().__exit__(None, None, None)

        self.handles.append(module.register_forward_pre_hook(enter, prepend=prepend, with_kwargs=True))
        self.handles.append(module.register_forward_hook(leave, always_call=True))

    def _enter_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if _recomputing() else self._call(args, kwargs)

    @contextlib.contextmanager
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        counts = self.watch.model.training or not self.watch.training_only
        self.running, self.measured = True, counts and self.calls % self.options.every == 0
        self.calls += counts
        self.seen.clear()
        self.masks.clear()
        try:
            with self._enter_part(self.watch.model, args, kwargs) or contextlib.nullcontext():
                if self.initial is not None and self.measured:
                    with torch.no_grad(), torch.random.fork_rng():
                        self.initial.model(*args, **{name: _own_cache(x) for name, x in kwargs.items()})
                yield
        finally:
            self.running = self.measured = False
            self.tokens.clear()

    def _enter_part(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Find the mask of the layers inside: the mask of an outer part, or else of this part's call."""
        if not self.measured or self.options.mask is not None:
            return None
        (valid, note), sentence = self.masks[-1] if self.masks else (None, ""), ""
        if valid is None:
            valid, sentence = _read_mask(part, args, kwargs)
        if part is self.watch.model:  # otherwise made by the model, from a mask that it does not pass on
            note = sentence
        if _has_own_masks(part):
            note = OWN if _takes_mask(part) and (note or valid is not None) else ""
            valid = None
        return self._masked(valid, note)

    @contextlib.contextmanager
    def _masked(self, valid: np.ndarray | None, note: str) -> Iterator[None]:
        self.masks.append((valid, note))
        try:
            yield
        finally:
            self.masks.pop()

    def _enter_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.measured:
            given = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.is_floating_point())
            self.tokens[block] = next(given, None)

    def _enter_encoder(self, *_: object) -> Any:
        """PyTorch's encoder looks for a mode: with one, it keeps padding instead of packing tokens."""
        return PassThrough() if self.measured or not self.running else None

    def _enter_layer(self, scope: Scope, layer: Layer, alone: Iterator[int], args: Any, kwargs: Any) -> Any:
        """`alone` counts calls of a part of the model by itself."""
        due = self.measured if self.running else next(alone) % self.options.every == 0
        return self._recorded(scope, layer, args, kwargs) if due and not _recomputing() else None

    @contextlib.contextmanager
    def _recorded(self, scope: Scope, layer: Layer, args: Any, kwargs: Any) -> Iterator[None]:
        with Recorder(scope, args, kwargs) as recorder:
            yield
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            self._collect(scope, layer, recorder)

    def _collect(self, scope: Scope, layer: Layer, recorder: Recorder) -> None:
        arrays, notes = recorder.arrays(self.options.examples, layer.names)
        for sentence in notes:
            layer.note(sentence)
        if not arrays:
            layer.note("no output projection was seen while the layer ran: choose it with at=")
            return
        if self.running and layer.name in self.seen:
            layer.note("called several times per call of the model: all are counted together")
        self.seen.add(layer.name)
        examples, tokens, layer.heads, layer.head_dim = arrays["out"].shape
        if scope.heads is None and layer.heads == 1:
            layer.heads, layer.head_dim = None, None
            layer.names = tuple(name for name in layer.names if name != "head_output")
        batch = recorder.projected.numel() // recorder.projected.shape[-1] // tokens
        self._add_tokens(scope, layer, recorder, arrays, batch)
        valid = self.options.valid_for(examples, tokens, layer.name)
        mask, note = self.masks[-1] if self.masks else (None, "")
        if mask is not None and mask.shape == (batch, tokens):
            valid = mask[:examples]
        elif mask is not None:
            layer.note(f"the call's mask {mask.shape} does not fit {examples} x {tokens} tokens: not used")
        elif note:
            layer.note(note)
        rows = np.full(examples, tokens) if valid is None else valid.sum(axis=1)
        padded = None if valid is None or valid.all() else torch.tensor(valid, device=arrays["out"].device)
        if padded is not None and "tokens" in arrays and arrays["tokens"].shape[:2] != padded.shape:
            del arrays["tokens"]
        measured = {name: to_numpy(x) for name, x in reduce(arrays, padded, layer.names).items()}
        layer.add_call(measured, rows)

    def _add_tokens(
        self, scope: Scope, layer: Layer, recorder: Recorder, arrays: dict[str, torch.Tensor], batch: int
    ) -> None:
        """Add the tokens entering the block, B T D, where D is the width that the output projection returns."""
        x = self.tokens.get(scope.block)
        if x is None or "tokens" not in layer.names:
            return
        width = recorder.weight.shape[1 if recorder.flat else 0]
        if x.ndim == 4 and x.shape[1] == width != x.shape[-1]:  # channels before the grid
            x = x.permute(0, 2, 3, 1)
        elif x.ndim not in (2, 3, 4) or x.shape[-1] != width or (x.ndim == 4 and x.shape[1] == width):
            layer.unseen["tokens",] = f"the block takes {tuple(x.shape)}, not tokens of width {width}"
            return
        x = as_batch(x.transpose(0, 1) if x.ndim == 3 and (recorder.tokens_first or not scope.batch_first) else x)
        if batch > len(x):
            layer.note(WINDOWS)
        arrays["tokens"] = measurable(x[: self.options.examples])


def _own_cache(x: Any) -> Any:
    """Return a copy of a cache of transformers, to which a call appends; other arguments as they are."""
    return copy.deepcopy(x) if hasattr(x, "get_seq_length") else x


def _recomputing() -> bool:
    """Return True in a backward pass, where checkpointed layers run a second time."""
    return torch._C._current_graph_task_id() != -1


def _is_transformed() -> bool:
    """Return True within torch.func, torch.jit.trace, or a mode of tensors without numbers."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.jit.is_tracing()
        or any(type(mode).__name__ in ("FakeTensorMode", "ProxyTorchDispatchMode") for mode in modes)
    )


def _takes_mask(module: nn.Module) -> bool:
    return not MASKS.keys().isdisjoint(_parameters(module))


def _has_own_masks(module: nn.Module) -> bool:
    """Return, from the arguments of its call, whether a mask outside is not for the layers of a module.

    This holds for an encoder-decoder, and for a model of images alone.
    """
    names = _parameters(module)
    both = not (SOURCE.isdisjoint(names) or TARGET.isdisjoint(names))
    return both or ("pixel_values" in names and not _takes_mask(module))


def _parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module's call; none if it does not tell them."""
    try:
        return tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return ()


def _read_mask(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[np.ndarray | None, str]:
    """Return the padding mask of a call, B T, True: not padding; and a sentence if it cannot be read."""
    given = {**dict(zip(_parameters(module), args, strict=False)), **kwargs}
    if given.get("query") is not given.get("key"):
        return None, ""  # cross-attention: the mask is for other tokens
    for name, padding in MASKS.items():
        mask = given.get(name)
        if not isinstance(mask, torch.Tensor):
            continue
        if mask.ndim == 2:
            values = to_numpy(mask)
            added = values.dtype.kind == "f" and (values.min() < 0 or not values.any())  # to logits
            valid = values > -1 if added else (values == 0) == padding
            if len(valid) == 1 or not np.array_equal(valid, np.tri(len(valid))):  # a triangle is causal
                return valid, ""
        return None, f"{name} of shape {tuple(mask.shape)} is not examples x tokens: padding counts without mask="
    return None, ""
