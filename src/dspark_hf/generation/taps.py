"""
Reading the tapped layers of a target.

Forward hooks give the raw output of a decoder layer on every host version and also for the last
layer, whose entry in `hidden_states` is normed. Only the tapped states are kept, and only until
they are taken.

A compiled forward is read through its `hidden_states` instead: hooks would break its graph into
pieces at every tapped layer, and stay compiled into it when they are gone from the module.
"""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from .compiling import is_compiled


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """
    The target's decoder layers.

    Raises:
        `ValueError`: no module list has as many entries as the text config has layers.
    """
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        (name.count("."), name, module)
        for name, module in target.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == depth
        and "vision" not in name
        and "visual" not in name
        and "audio" not in name
    ]
    if not found:
        raise ValueError(
            f"Found no list of {depth} decoder layers in {type(target).__name__}, so its layers "
            "cannot be tapped. DSpark needs a decoder-only target built from a list of layers."
        )
    return min(found, key=lambda entry: entry[:2])[2]


class TargetTaps:
    """
    Collects tap outputs of the forwards that the opening thread runs on a target.

    A context manager: hooks are installed on entering and removed on every way out. Other threads
    may use the same target at the same time; their forwards are not seen.

    Args:
        target (`PreTrainedModel`): the model to read.
        layer_ids (`list[int]`): layers whose output is read; -1 reads the input of the first layer.

    Attributes:
        reads_outputs (`bool`):
            Whether the taps are taken from the outputs of forwards, by `read`, and no hooks are
            installed. From the start with a target that `is_compiled`.
        keep (`int`, *optional*):
            So many positions from the end are all that will be asked for; all by default. What a
            long prompt has before them is not held.
        num_dropped (`int`): positions that were before those of the last `take`.

    Raises:
        `ValueError`: a compiled target, and the last layer is tapped, which only a hook can read.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: list[int]):
        layers = decoder_layers(target)
        self._target = target
        self._modules = [layers[max(layer, 0)] for layer in layer_ids]
        self._layer_ids = list(layer_ids)
        self._states: list[list[torch.Tensor]] = [[] for _ in layer_ids]
        self._lengths = [0 for _ in layer_ids]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._thread = threading.get_ident()
        self.keep: int | None = None
        self.num_dropped = 0
        self._num_states = len(layers) + 1
        # The host returns it behind the final norm.
        self.reach_the_last_layer = max(layer_ids) == len(layers) - 1
        self.reads_outputs = is_compiled(target)
        if self.reads_outputs and self.reach_the_last_layer:
            raise ValueError(
                f"The drafter reads the output of the last layer, {max(layer_ids)}, which a "
                "compiled target does not return as it is. Give the uncompiled target."
            )

    def __enter__(self) -> "TargetTaps":
        if self.reads_outputs:
            return self
        for tap, (layer, module) in enumerate(zip(self._layer_ids, self._modules, strict=True)):
            hook = self._input_hook(tap) if layer < 0 else self._output_hook(tap)
            if layer < 0:
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            else:
                self._handles.append(module.register_forward_hook(hook))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove_hooks()
        self.clear()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def read_outputs(self, kwargs: dict[str, Any]) -> None:
        """
        From now on take the taps from the outputs of forwards, and make `kwargs`, arguments of
        these, ask for what is tapped beside what the caller wants.
        """
        self._remove_hooks()
        self.reads_outputs = True
        # The host's own, which it would otherwise install inside of the compiled forward.
        maybe_install_capturing_hooks(self._target)
        asked = kwargs.get("output_hidden_states") or []
        if asked is not True:
            asked = [asked] if isinstance(asked, int) else asked
            kwargs["output_hidden_states"] = [*asked, *(layer + 1 for layer in self._layer_ids)]

    def read(self, outputs: ModelOutput) -> None:
        """Take the taps out of what a forward returned, if it is read through its outputs."""
        if not self.reads_outputs:
            return
        found = outputs.get("hidden_states") or ()
        if len(found) != self._num_states:
            raise ValueError(
                f"A compiled target is read through its hidden states; this one returns "
                f"{len(found)} of them and has {self._num_states - 1} layers. Give the uncompiled "
                "target."
            )
        for tap, layer in enumerate(self._layer_ids):
            self._read(tap, found[layer + 1])

    def clear(self) -> None:
        """Forget what was read."""
        for states in self._states:
            states.clear()
        self._lengths = [0 for _ in self._layer_ids]

    def take(self) -> torch.Tensor:
        """
        Hand over what was read since the last call: `(R, T, n·H)` in tap order, T positions of all
        forwards, or the last `keep` of them.
        """
        if not all(self._states):
            raise ValueError(
                "The target ran without its tapped layers being seen; a compiled forward skips "
                "hooks. Give the uncompiled target."
            )
        taps = [
            states[0] if len(states) == 1 else torch.cat(states, dim=1) for states in self._states
        ]
        lengths = self._lengths
        self.clear()
        if len(set(lengths)) > 1:
            raise ValueError(
                f"The tapped layers {self._layer_ids} returned {lengths} positions. The target "
                "shortens the sequence inside its layers, so their outputs cannot serve as context "
                "features."
            )
        device, kept = taps[-1].device, min(lengths[0], self.keep or lengths[0])
        self.num_dropped = lengths[0] - kept
        return torch.cat([tap[:, -kept:].to(device) for tap in taps], dim=-1)

    def _output_hook(self, tap: int) -> Callable:
        def hook(module, args, output):
            self._read(tap, output[0] if isinstance(output, tuple | list) else output)

        return hook

    def _input_hook(self, tap: int) -> Callable:
        def hook(module, args, kwargs):
            self._read(tap, args[0] if args else kwargs["hidden_states"])

        return hook

    def _read(self, tap: int, state: torch.Tensor) -> None:
        if threading.get_ident() != self._thread:
            return
        states, keep = self._states[tap], self.keep
        self._lengths[tap] += state.shape[1]
        if keep is None or state.shape[1] <= keep:
            states.append(_one_stream(state))
        else:
            # A copy: a part of it would hold the whole output.
            states.append(_one_stream(state[:, -keep:]).clone())
        while keep is not None and sum(later.shape[1] for later in states[1:]) >= keep:
            states.pop(0)


def _one_stream(hidden_states: torch.Tensor) -> torch.Tensor:
    """
    `(R, T, H)` of a layer's output. Of a residual of several streams `(R, T, S, H)`, as in
    DeepSeek-V4, drafters are trained on the plain mean and not on what the hyper-connections read.
    """
    return hidden_states.mean(dim=2) if hidden_states.dim() == 4 else hidden_states
