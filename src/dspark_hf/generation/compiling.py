"""
Targets that run compiled: found out, read and kept to few shapes.

A compiled target is compiled anew for every number of columns that it meets, so their number is
bounded (`compiled_widths`), and its taps are read from its outputs (`taps.py`).
"""

import copy
import logging
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

logger = logging.getLogger(__name__)


def is_compiled(target: PreTrainedModel) -> bool:
    """Whether the caller has compiled the target, its forward or one of its modules."""
    return any(
        module._compiled_call_impl is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in target.modules()
    )


def will_compile(
    target: PreTrainedModel, kwargs: dict[str, Any], config: GenerationConfig, taps_last_layer: bool
) -> bool:
    """Whether the host would compile the forwards behind the prefill, and the taps allow it."""
    if not target._valid_auto_compile_criteria(kwargs, config):
        return False
    if taps_last_layer:
        logger.warning(
            "The drafter reads the output of the target's last layer, which a compiled target does "
            "not return as it is; the target runs uncompiled."
        )
    return not taps_last_layer


def prefill_config(config: GenerationConfig, caller_compiled: bool) -> GenerationConfig:
    """
    The generation config for the prefill.

    Raises:
        `ValueError`: a prefill in chunks on a target that the caller compiled.
    """
    if config.prefill_chunk_size is None:
        return config
    if caller_compiled:
        raise ValueError(
            f"prefill_chunk_size={config.prefill_chunk_size} returns the hidden states of the last "
            "chunk only, and a compiled target is read through them. Remove it, or give the "
            "uncompiled target."
        )
    # The host would compile the chunks, and the hooks that read them along.
    config = copy.copy(config)
    config.disable_compile = True
    return config


def compiled_widths(block_size: int) -> tuple[int, ...]:
    """
    Numbers of draft tokens that a compiled target is run with: none, all γ, and in between those
    that make the whole forward, anchor included, a power of two.
    """
    powers = (2**i - 1 for i in range(block_size.bit_length()))
    return (*(width for width in powers if width < block_size), block_size)


def fitting_width(widths: tuple[int, ...], wanted: int, most: int) -> int:
    """The smallest of `widths` that carries `wanted` columns, or else the largest that fits."""
    fitting = [width for width in widths if width <= most]
    return next((width for width in fitting if width >= wanted), max(fitting, default=0))
