"""
What is refused before any compute because of the target's cache, its positions or its state: what
cannot be rolled back exactly, and what does not fit.
"""

import math
import weakref
from typing import Any

import torch
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedModel,
    StaticCache,
)
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from .cache_layers import can_roll_back, is_static, rows_held

# By target, and by whether the cache is static.
_PARTS_EQUAL_THE_WHOLE: "weakref.WeakKeyDictionary[PreTrainedModel, dict[bool, bool]]" = (
    weakref.WeakKeyDictionary()
)


def check_cache(cache: Cache | None, after_prefill: bool) -> None:
    """
    Raise `ValueError` if rejected tokens could not be taken out of the target's cache again.

    Layers with a recurrent state know only after the prefill whether they have one.
    """
    if not isinstance(cache, Cache):
        raise ValueError(
            "Speculation needs a cache object of the host library, and this target works with "
            f"{'none or one of its own' if cache is None else type(cache).__name__}. Generate "
            "without assistant_model."
        )
    if isinstance(cache, EncoderDecoderCache) or (
        all(layer.is_croppable for layer in cache.layers) and not cache.is_croppable
    ):
        raise ValueError(
            f"{type(cache).__name__} keeps more than its layers, which cannot be rolled back after "
            "a rejected draft. Give a DynamicCache or none, or generate without assistant_model."
        )
    for layer in cache.layers:
        is_linear = isinstance(layer, LinearAttentionCacheLayerMixin)
        if is_linear and not after_prefill and not is_static(layer):
            continue
        if not can_roll_back(layer):
            raise ValueError(
                f"{type(layer).__name__} of the target's cache cannot be rolled back after a "
                "rejected draft. Use the default dynamic cache (leave cache_implementation "
                "unset), or generate without assistant_model."
            )


def cross_attention_layers(target: PreTrainedModel) -> frozenset[int]:
    """Cache layers that hold images and no column of the text (Mllama): a rollback spares them."""
    text = target.config.get_text_config(decoder=True)
    return frozenset(getattr(text, "cross_attention_layers", None) or ())


def check_cross_attention(target: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    """
    Raise `ValueError` for images that Mllama is to look at without a `cross_attention_mask`: several
    tokens at a time would then each see another part of them, and a single one all.
    """
    layers = [model_kwargs["cache"].layers[i : i + 1] for i in cross_attention_layers(target)]
    has_images = model_kwargs.get("pixel_values") is not None or any(
        layer.is_initialized for held in layers for layer in held
    )
    if layers and has_images and model_kwargs.get("cross_attention_mask") is None:
        raise ValueError(
            f"{type(target).__name__} gets images and no cross_attention_mask, and would show "
            "other parts of them to several tokens at a time than to one. Pass the mask that its "
            "processor makes, or generate without assistant_model."
        )


def check_columns(target: PreTrainedModel, cache: Cache) -> None:
    """Raise `ValueError` after a prefill if a layer holds anything but the columns of the text."""
    length, apart = int(cache.get_seq_length()), cross_attention_layers(target)
    for i, layer in enumerate(cache.layers):
        if i in apart or not isinstance(layer, CacheLayerMixin) or not layer.is_initialized:
            continue
        if int(layer.get_seq_length()) != length:
            raise ValueError(
                f"Layer {i} of the target's cache holds {int(layer.get_seq_length())} positions "
                f"after a text of {length}, so what a rejected draft left in it is not known. "
                "Generate without assistant_model."
            )


def check_cache_fits(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """
    Raise `ValueError` for a cache made for another batch, or too short for the text.

    Args:
        target (`PreTrainedModel`): the target.
        input_ids (`torch.Tensor` of shape `(R, n)`):
            What `max_length` counts from; the prompt, except for what a cache or embeddings hold.
        config (`GenerationConfig`): of the call.
        model_kwargs (`dict`): for the target's forwards, the cache among them.
    """
    num_rows, new_tokens = input_ids.shape[0], config.max_length - input_ids.shape[1]
    length = _prompt_length(input_ids, config, model_kwargs)
    # The last token is not cached.
    needed, apart = length + new_tokens - 1, cross_attention_layers(target)
    for i, layer in enumerate(model_kwargs["cache"].layers):
        if i in apart:
            continue
        held = rows_held(layer)
        if held not in (None, num_rows):
            raise ValueError(
                f"The cache holds {held} rows and the batch has {num_rows}. Give the cache that "
                "belongs to this batch, or none."
            )
        if is_static(layer) and not layer.is_sliding and layer.max_cache_len < needed:
            raise ValueError(
                f"The static cache holds {layer.max_cache_len} positions, and a prompt of {length} "
                f"with {new_tokens} new tokens needs {needed}. Make it longer, or ask for fewer "
                "new tokens."
            )


def _prompt_length(
    input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> int:
    """Columns of the prompt; `input_ids` may lack those that a cache or embeddings hold."""
    mask, embeddings = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    if mask is not None:
        return mask.shape[1]
    # What the host notes when it drops a mask that hides nothing.
    shape = (input_ids if embeddings is None else embeddings).shape
    return getattr(config, "_mask_length", shape[1])


def position_table(target: PreTrainedModel, learned_only: bool = False) -> int | None:
    """
    Positions that a target has a table of (GPT-2, OPT), `None` for one that computes them as they
    come. Tables that were not learned (GPT-J) can be left out: some grow when they have to.
    """
    context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    tables = [
        module.weight
        for module in target.modules()
        if isinstance(module, torch.nn.Embedding) and module is not target.get_input_embeddings()
    ]
    if not learned_only:
        tables += target.buffers()
    # Some keep up to two rows for padding.
    found = any(t.dim() == 2 and context <= t.shape[0] <= context + 2 for t in tables if context)
    return context if found else None


def check_context_fits(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """
    Raise `ValueError` for a prompt that leaves no room in the target's learned table of positions.
    Arguments as of `check_cache_fits`.
    """
    table, mask = position_table(target, learned_only=True), model_kwargs.get("attention_mask")
    length = _prompt_length(input_ids, config, model_kwargs)
    if mask is not None and mask.dim() == 2:
        length = int(mask.sum(dim=-1).max())
    needed = length + (config.max_length - input_ids.shape[1] > 1)
    if table is not None and needed > table:
        raise ValueError(
            f"The prompt has {length} tokens, and {type(target).__name__} has {table} positions "
            "for it and for what is generated. Shorten the prompt."
        )


def rows_are_coupled(target: PreTrainedModel, inputs: dict[str, Any]) -> bool:
    """
    Whether what a row of a batch gets depends on how far other rows are, or on the column it stands
    in: positions not given to the target as `(R, n)`, or attention over chunks of columns.

    Args:
        target (`PreTrainedModel`): the target.
        inputs (`dict`): what one of its forwards gets; some targets drop the positions they have.
    """
    positions = inputs.get("position_ids")
    layer_types = getattr(target.config.get_text_config(decoder=True), "layer_types", None) or ()
    return positions is None or positions.dim() != 2 or "chunked_attention" in layer_types


def check_causality(target: PreTrainedModel, device: torch.device) -> None:
    """
    Raise `ValueError` for an encoder that was not made a decoder: in a block, tokens would see the
    drafts behind them. Some decoders (GPT-NeoX) have `is_decoder=False` as well, so it is measured,
    once per target, with ids on `device`.
    """
    text = target.config.get_text_config(decoder=True)
    if not getattr(text, "is_decoder", True) and not _parts_equal_the_whole(target, device):
        raise ValueError(
            f"{type(target).__name__} attends to what follows a token as well, so drafts would "
            "change what stands before them. Load it with is_decoder=True, or generate without "
            "assistant_model."
        )


def check_linear_attention(target: PreTrainedModel, cache: Cache, device: torch.device) -> None:
    """
    Find out, once per target and kind of cache and with ids on `device`, whether recurrent and
    convolution states are the same after several tokens at a time.

    Raises:
        `ValueError`: it is not, so a block cannot be verified in one forward.
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
