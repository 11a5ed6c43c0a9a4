"""Watch of a PyTorch model: one recorder per attention layer, active while the layer runs.

During a measured call, a recorder sees the functions that its layer calls (`TorchFunctionMode`): the attention product
and the linear layers. So the fast paths of `torch.nn`, which skip hooks, are not taken, and layers of any name are
found. Calls that are not measured cost one Python function per attention layer.

Module `torch_layers` finds the attention layers and the number of heads that they state. Module `torch_recorder` finds
the arrays and splits them into heads; the number of heads of an attention product that it sees counts before the
stated one.
"""

import dataclasses
import fnmatch
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from leanformer.conditioning.spectrum import to_numpy
from leanformer.errors import ConfigError
from leanformer.watching import torch_layers
from leanformer.watching.measures import Layer, find_roundoffs
from leanformer.watching.session import Watch
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
    """Register the hooks of a watch on its PyTorch model, and return the function that removes them.

    Args:
        watch: watch whose model is measured; attention layers are added to it.

    Raises:
        ConfigError: no attention layer is found, `at` matches no linear layer, or an error of `check_supported`.
    """
    check_supported(watch.model)
    layers, watch.unmatched = torch_layers.find_scopes(watch.model)
    if watch.options.at is not None:
        layers = _select(watch.model, watch.options.at, layers)
    if not layers:
        raise ConfigError(_describe_missing(watch.model, watch.unmatched))
    hooks = Hooks(watch, layers)
    initial = _open_reference(watch)
    handles = hooks.register(initial)

    def detach() -> None:
        for handle in handles:
            handle.remove()
        if initial is not None:
            initial.__exit__()
        for layer in watch.layers.values():
            if hooks.skipped:
                layer.note(TRACED)
            elif not layer.calls and hooks.calls:
                layer.note(DIRECT)

    return detach


def _open_reference(watch: Watch) -> Watch | None:
    """Return an open watch of the model to compare with, which takes its place as the watch's reference, if it is one.

    It is called with the arguments of each measured call, in its own mode and without gradients.
    """
    if not isinstance(watch.reference, nn.Module):
        return None
    options = dataclasses.replace(watch.options, reference=None, every=1)
    watch.reference = Watch(watch.reference, options, attach)
    return watch.reference.__enter__()


def check_supported(model: nn.Module) -> None:
    """Raise ConfigError if layers of a PyTorch model run without hooks (compiled, TorchScript) or in threads."""
    for name, module in model.named_modules():
        where = f"{type(module).__name__} {name}".strip()
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise ConfigError(
                f"{where} is compiled: its layers run without hooks. Watch and call the model before torch.compile."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(f"{where} is a TorchScript module: its layers run without hooks. Watch the Python model.")
        if isinstance(module, nn.DataParallel):
            raise ConfigError(f"{where} runs copies of the model in threads. Watch the model inside: model.module.")


def _select(model: nn.Module, pattern: str, layers: list[Scope]) -> list[Scope]:
    """Return a layer for each linear layer whose name matches a pattern."""
    modules = dict(model.named_modules())
    chosen = [name for name in modules if name and fnmatch.fnmatchcase(name, pattern)]
    linear = [name for name in chosen if getattr(modules[name], "weight", None) is not None]
    if not linear:
        candidates = [name for name, module in modules.items() if torch_layers.is_linear(module)]
        what = f"{', '.join(chosen[:3])} has no weight" if chosen else "no module has such a name"
        raise ConfigError(f"at={pattern}: {what}. Linear layers are {_some(candidates)}.")
    result = []
    for name in linear:
        # The layer that was found around it sees the attention product; otherwise only the projection's input.
        inside = [scope for scope in layers if scope.name == "" or name.startswith(f"{scope.name}.")]
        outer = inside[0].name if inside else name.rpartition(".")[0]
        heads = inside[0].heads if inside else torch_layers.find_heads(modules, outer)
        result.append(Scope(name, modules[outer], inside[0].block if inside else None, heads, modules[name]))
    return result


def _describe_missing(model: nn.Module, unmatched: Mapping[str, str]) -> str:
    linear = [name for name, module in model.named_modules() if torch_layers.is_linear(module)]
    reasons = "".join(f" {name}: {reason}." for name, reason in list(unmatched.items())[:SHOWN])
    return (
        f"watch: no attention layer was found in {type(model).__name__}: no module with a number of heads "
        f"({', '.join(torch_layers.HEADS[:3])}, ...) or a class named attention has a linear layer.{reasons} Select "
        f'the output projections with at="...". Linear layers are {_some(linear)}.'
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "") or "none"


class PassThrough(TorchFunctionMode):
    """Mode of PyTorch that changes no function, but whose presence disables fast paths, which would skip hooks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Hooks:
    """Hooks of one watch on one PyTorch model.

    Args:
        watch: watch that collects the results.
        layers: attention layers to measure, which are added to the watch.
    """

    def __init__(self, watch: Watch, layers: list[Scope]):
        self.watch, self.options = watch, watch.options
        self.active: dict[int, list[Recorder]] = {}  # recorders of running layers, by layer
        self.modes: list[TorchFunctionMode] = []
        self.tokens: dict[int, torch.Tensor] = {}  # input of running blocks
        self.running = self.measured = False  # a call of the model; it is one to measure
        self.calls, self.skipped = 0, False
        self.valid: np.ndarray | None = None
        self.masked: nn.Module | None = None  # part of the model whose call had the mask
        self.unreadable = self.unmasked = ""  # what to note if a layer has a mask that is not read, or has none
        self.seen: set[str] = set()  # layers that ran in this call of the model
        self.outside: list[tuple[Any, ...]] = []  # parts with masks of their own that run, and the masks outside
        self.frozen = any(p.requires_grad for p in watch.model.parameters())
        self.weights: dict[int, str] = {}  # projections seen, and the layer they belong to
        self.scopes = []
        for scope in layers:
            scope.heads = self.options.heads or scope.heads
            name = scope.name or type(watch.model).__name__
            self.scopes.append((scope, watch.add_layer(name, heads=scope.heads), [0]))

    def register(self, initial: Watch | None) -> list[Any]:
        """Register all hooks on the model and its layers, and return their handles, which have `remove()`.

        Args:
            initial: open watch of a model to call with the same arguments; None for none.
        """
        model, handles = self.watch.model, []

        def before(module: nn.Module, hook: Callable[..., None], prepend: bool = True) -> None:
            hook = self._untraced(hook)
            handles.append(module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=True))

        def after(module: nn.Module, hook: Callable[..., None]) -> None:
            handles.append(module.register_forward_hook(self._untraced(hook), always_call=True))

        if initial is not None:
            before(model, lambda _, args, kwargs: self._call_initial(initial.model, args, kwargs))
        before(model, self._begin)  # runs before the one above
        for block in {id(scope.block): scope.block for scope, _, _ in self.scopes if scope.block is not None}.values():
            before(block, self._enter_block, prepend=False)
        for encoder in (m for m in model.modules() if isinstance(m, nn.TransformerEncoder)):
            before(encoder, self._enter_encoder, prepend=False)
            after(encoder, self._leave_encoder)
        for scope, layer, count in self.scopes:
            enter, leave = self._hooks(scope, layer, count)
            before(scope.module, enter)
            after(scope.module, leave)
        # After those of the layers, which may themselves be such parts and still need their mask.
        for part in (m for m in model.modules() if m is not model and (_takes_mask(m) or _has_own_masks(m))):
            before(part, self._enter_part)
            after(part, self._leave_part)
        after(model, self._end)
        return handles

    def _untraced(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return a hook that does nothing under a tracer, compiler or functional transform, which know no numbers."""

        def call(*args: Any) -> None:
            if torch.compiler.is_compiling() or _is_transformed():
                self.skipped = True
            else:
                hook(*args)

        return call

    def _call_initial(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.measured and not _recomputing():
            with torch.no_grad(), torch.random.fork_rng():
                model(*args, **kwargs)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _recomputing():
            return
        self.running, self.measured = True, self.calls % self.options.every == 0
        self.calls += 1
        self.seen.clear()
        if self.measured and self.options.mask is None:
            self.valid, self.unreadable = _read_mask(model, args, kwargs)
            if _has_own_masks(model):
                self.unmasked = OWN if self.valid is not None or self.unreadable else ""
                self.valid, self.unreadable = None, ""

    def _end(self, *_: object) -> None:
        if not _recomputing():
            self.running = self.measured = False
            self.valid, self.masked, self.unreadable, self.unmasked = None, None, "", ""
            self.outside.clear()
            self.tokens.clear()

    def _enter_part(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the mask of a part, for its layers, unless the model's or an outer part's call had one."""
        if not self.measured or self.options.mask is not None:
            return
        if _has_own_masks(part):
            self.outside.append((part, self.valid, self.masked, self.unmasked))
            given = self.valid is not None or _read_mask(part, args, kwargs)[0] is not None
            self.valid, self.masked = None, None
            self.unmasked = OWN if _takes_mask(part) and (given or self.unmasked) else ""
        elif self.valid is None and not self.unreadable:
            # A mask of more axes was made by the model, from one that it does not pass on.
            self.valid, _ = _read_mask(part, args, kwargs)
            self.masked = None if self.valid is None else part

    def _leave_part(self, part: nn.Module, *_: object) -> None:
        if self.masked is part:
            self.valid = self.masked = None
        if self.outside and self.outside[-1][0] is part:
            _, self.valid, self.masked, self.unmasked = self.outside.pop()

    def _enter_encoder(self, *_: object) -> None:
        """Have the encoder of PyTorch, which asks for it, keep padding instead of packing the tokens of its layers."""
        if self.measured or not self.running:
            mode = PassThrough()
            mode.__enter__()
            self.modes.append(mode)

    def _leave_encoder(self, *_: object) -> None:
        if self.modes:
            self.modes.pop().__exit__(None, None, None)

    def _enter_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.measured:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.is_floating_point()]
            if given:
                self.tokens[id(block)] = given[0]

    def _hooks(self, scope: Scope, layer: Layer, count: list[int]) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.running:
                due = self.measured
            else:  # a part of the model is called by itself
                due, count[0] = count[0] % self.options.every == 0, count[0] + 1
            if due and not _recomputing():
                recorder = Recorder(scope, args, kwargs)
                recorder.__enter__()
                self.active.setdefault(id(scope), []).append(recorder)

        def leave(*_: object) -> None:
            if running := self.active.get(id(scope)):
                recorder = running.pop()
                recorder.__exit__(None, None, None)
                with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                    self._collect(scope, layer, recorder)

        return enter, leave

    def _collect(self, scope: Scope, layer: Layer, recorder: Recorder) -> None:
        arrays, dtype, notes = recorder.arrays(self.options.examples, layer.names)
        for sentence in notes:
            layer.note(sentence)
        if not arrays:
            layer.note("no output projection was seen while the layer ran: choose it with at=")
            return
        examples, tokens, layer.heads, layer.head_dim = arrays["out"].shape
        if recorder.scope.heads is None and layer.heads == 1:
            layer.heads, layer.head_dim = None, None
            layer.names = tuple(name for name in layer.names if name != "head_output")
        stored = self._add_tokens(scope, layer, recorder, arrays)
        self._note_weight(layer, recorder.weight)
        valid = self.options.valid_for(examples, tokens, layer.name)
        if self.unreadable or (self.unmasked and self.valid is None):
            layer.note(self.unreadable or self.unmasked)
        elif self.valid is not None:
            if self.valid[:examples].shape == (examples, tokens):
                valid = self.valid[:examples]
            else:
                layer.note(f"the call's mask {self.valid.shape} does not fit {examples} x {tokens} tokens: not used")
        self.watch.collect(layer, arrays, valid, find_roundoffs(layer.names, dtype, stored))

    def _add_tokens(
        self, scope: Scope, layer: Layer, recorder: Recorder, arrays: dict[str, torch.Tensor]
    ) -> torch.dtype | None:
        """Add the tokens entering the block, B T D, where D is the width that the output projection returns.

        Returns their type; None if there are none.
        """
        x = self.tokens.get(id(scope.block))
        if x is None or "tokens" not in layer.names:
            return None
        width = recorder.weight.shape[1 if recorder.flat else 0]
        if x.ndim == 4 and x.shape[1] == width != x.shape[-1]:  # channels before the grid
            x = x.permute(0, 2, 3, 1)
        elif x.ndim not in (2, 3, 4) or x.shape[-1] != width or (x.ndim == 4 and x.shape[1] == width):
            layer.unseen["tokens",] = f"the block takes {tuple(x.shape)}, not tokens of width {width}"
            return None
        x = as_batch(x if scope.batch_first or x.ndim != 3 else x.transpose(0, 1))
        arrays["tokens"] = measurable(x[: self.options.examples])
        return x.dtype

    def _note_weight(self, layer: Layer, weight: torch.Tensor | None) -> None:
        if weight is None:
            return
        first = self.weights.setdefault(id(weight), layer.name)
        if first != layer.name:
            layer.note(f"output projection tied to that of {first}")
        if self.frozen and not weight.requires_grad:
            layer.note("output projection frozen")
        if self.running and layer.name in self.seen:
            layer.note("called several times per call of the model: all are counted together")
        self.seen.add(layer.name)


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
    """Return whether the call of a module has an argument of MASKS."""
    return not MASKS.keys().isdisjoint(_parameters(module))


def _has_own_masks(module: nn.Module) -> bool:
    """Return whether a mask outside is not that of a module's layers: an encoder-decoder, or a model of images alone.

    It is known by the arguments of its call.
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


def _read_mask(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[np.ndarray | None, str]:
    """Return the padding mask of a call, B T, True: not padding; and a sentence if it cannot be read."""
    try:
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None, ""
    given = given | given.get("kwargs", {})
    if given.get("query") is not given.get("key"):
        return None, ""  # cross-attention: the mask is that of other tokens
    for name, padding in MASKS.items():
        mask = given.get(name)
        if not isinstance(mask, torch.Tensor):
            continue
        if mask.ndim != 2:
            return (
                None,
                f"{name} of shape {tuple(mask.shape)} is not examples x tokens: padding counts unless mask= is passed",
            )
        valid = to_numpy(mask) == 0 if padding else to_numpy(mask) != 0
        return valid, ""
    return None, ""
