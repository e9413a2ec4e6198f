"""
What is refused before any compute because the target reads several tokens at a time otherwise than
it reads them one by one, so that a block cannot be verified in one forward.
"""

import math
import weakref
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from .cache_checks import cross_attention_layers, holds_images
from .cache_layers import is_static

# By target, and by whether the cache is static.
_PARTS_EQUAL_THE_WHOLE: "weakref.WeakKeyDictionary[PreTrainedModel, dict[bool, bool]]" = (
    weakref.WeakKeyDictionary()
)


def check_blocks(
    target: PreTrainedModel, model_kwargs: dict[str, Any], device: torch.device
) -> None:
    """
    Raise `ValueError` if a forward over several tokens is not what forwards over one are, so that a
    block cannot be verified in one.

    Args:
        target (`PreTrainedModel`): the target.
        model_kwargs (`dict`): for its forwards, the cache among them.
        device (`torch.device`): where it takes token ids; its own says nothing if it is offloaded.
    """
    _check_cross_attention(target, model_kwargs)
    _check_causality(target, device)
    _check_linear_attention(target, model_kwargs["cache"], device)


def _check_cross_attention(target: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    """
    Raise `ValueError` for images that Mllama is to look at without a `cross_attention_mask`: of
    several tokens at a time each would then see another part of them, and a single one all.
    """
    if not cross_attention_layers(target) or model_kwargs.get("cross_attention_mask") is not None:
        return
    given = model_kwargs.get("pixel_values") is not None
    if given or holds_images(target, model_kwargs["cache"]):
        raise ValueError(
            f"{type(target).__name__} gets images and no cross_attention_mask, and would show "
            "other parts of them to several tokens at a time than to one. Pass the mask that its "
            "processor makes, or generate without assistant_model."
        )


def _check_causality(target: PreTrainedModel, device: torch.device) -> None:
    """
    Raise `ValueError` for an encoder that was not made a decoder: in a block, tokens would see the
    drafts behind them. Some decoders (GPT-NeoX) have `is_decoder=False` as well, so it is measured,
    once per target.
    """
    text = target.config.get_text_config(decoder=True)
    if not getattr(text, "is_decoder", True) and not _parts_equal_the_whole(target, device):
        raise ValueError(
            f"{type(target).__name__} attends to what follows a token as well, so drafts would "
            "change what stands before them. Load it with is_decoder=True, or generate without "
            "assistant_model."
        )


def _check_linear_attention(target: PreTrainedModel, cache: Cache, device: torch.device) -> None:
    """
    Find out, once per target and kind of cache, whether recurrent and convolution states are the
    same after several tokens at a time.

    Raises:
        `ValueError`: they are not, so a block cannot be verified in one forward.
    """
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        return
    if all(cache.is_linear):
        raise ValueError(
            f"{type(target).__name__} has a recurrent state and no attention layer, so its cache "
            "does not know its length. Generate without assistant_model."
        )
    for module in target.modules():
        low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
        if low > 0 or high < math.inf:
            # Not measured: it shows only where a token's step is outside, and the host's forwards
            # over one token do not limit it.
            raise ValueError(
                f"{type(target).__name__} keeps time steps between {low} and {high} in forwards "
                "over several tokens and not in those over one, so its text would change with the "
                "drafts. Generate without assistant_model."
            )
    static = any(is_static(layer) for layer in cache.layers)
    if not _parts_equal_the_whole(target, device, static):
        kind = "static" if static else "dynamic"
        remedy = "Leave cache_implementation unset, or generate" if static else "Generate"
        raise ValueError(
            f"{type(target).__name__} loses its recurrent state, or its place, when it reads "
            f"several tokens at a time behind a text in a {kind} cache, so drafts cannot be "
            f"verified. {remedy} without assistant_model."
        )


def _parts_equal_the_whole(
    target: PreTrainedModel, device: torch.device, static: bool = False
) -> bool:
    verdicts = _PARTS_EQUAL_THE_WHOLE.setdefault(target, {})
    if static not in verdicts:
        verdicts[static] = _measure_parts(target, device, static)
    return verdicts[static]


@torch.no_grad()
def _measure_parts(target: PreTrainedModel, device: torch.device, static: bool) -> bool:
    config = target.config.get_text_config(decoder=True)
    ids = torch.arange(3, 9, device=device)[None] % config.vocab_size
    cache = StaticCache(config, ids.shape[1]) if static else DynamicCache(config=config)
    # Not the target: around the decoder, multimodal ones keep the positions of the batch at hand,
    # which the measurement would read and spoil.
    decoder = target.get_decoder()
    whole = decoder(ids)[0][:, -1].float()
    decoder(ids[:, :3], cache=cache)
    parts = decoder(ids[:, 3:], cache=cache)[0][:, -1].float()
    # Rounding stays far below the root of the precision; in float32 even a state that hardly
    # matters stands out.
    tolerance = torch.finfo(target.dtype).eps ** 0.5
    return float((whole - parts).norm()) < tolerance * float((whole - whole.mean()).norm())
