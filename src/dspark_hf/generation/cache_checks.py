"""
What is refused because of the target's cache or its positions: what cannot be rolled back exactly,
and what does not fit.
"""

from typing import Any

import torch
from transformers import (
    Cache,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from .cache_layers import can_roll_back, is_static, rows_held


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


def holds_images(target: PreTrainedModel, cache: Cache) -> bool:
    """Whether any of these layers has been filled."""
    apart = cross_attention_layers(target)
    return any(layer.is_initialized for i, layer in enumerate(cache.layers) if i in apart)


def check_columns(
    target: PreTrainedModel,
    cache: Cache,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """
    Raise `ValueError` after a prefill if a layer holds anything but the columns of the prompt.

    Args:
        target (`PreTrainedModel`): the target.
        cache (`Cache`): what its prefill returned.
        input_ids, config, model_kwargs: as of `check_cache_fits`.
    """
    length, apart = prompt_columns(input_ids, config, model_kwargs), cross_attention_layers(target)
    for i, layer in enumerate(cache.layers):
        if i in apart or not isinstance(layer, CacheLayerMixin) or not layer.is_initialized:
            continue
        held = int(layer.get_seq_length())
        if held != length:
            raise ValueError(
                f"Layer {i} of the cache of {type(target).__name__} holds {held} positions after a "
                f"prompt of {length}, and only what stands in the prompt can be told from rejected "
                "drafts. Generate without assistant_model."
            )


def check_cache_fits(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """
    Raise `ValueError` for a cache made for another batch, or too short for the text, and for a mask
    that is not as wide as the prompt.

    Args:
        target (`PreTrainedModel`): the target.
        input_ids (`torch.Tensor` of shape `(R, n)`):
            What `max_length` counts from; the prompt, except for what a cache or embeddings hold.
        config (`GenerationConfig`): of the call.
        model_kwargs (`dict`): for the target's forwards, the cache among them.
    """
    num_rows, new_tokens = input_ids.shape[0], config.max_length - input_ids.shape[1]
    length = prompt_columns(input_ids, config, model_kwargs)
    # Behind a cache or beside embeddings, input_ids may be the shorter ones.
    if (
        length != input_ids.shape[1]
        and model_kwargs.get("inputs_embeds") is None
        and int(model_kwargs["cache"].get_seq_length()) == 0
    ):
        raise ValueError(
            f"attention_mask has {length} columns and the prompt has {input_ids.shape[1]}. Give "
            "one for each token of input_ids."
        )
    # The last token is not cached.
    needed, apart = length + new_tokens - 1, cross_attention_layers(target)
    for i, layer in enumerate(model_kwargs["cache"].layers):
        if i in apart:
            continue
        rows = rows_held(layer)
        if rows not in (None, num_rows):
            raise ValueError(
                f"The cache holds {rows} rows and the batch has {num_rows}. Give the cache that "
                "belongs to this batch, or none."
            )
        if is_static(layer) and not layer.is_sliding and layer.max_cache_len < needed:
            raise ValueError(
                f"The static cache holds {layer.max_cache_len} positions, and a prompt of {length} "
                f"with {new_tokens} new tokens needs {needed}. Make it longer, or ask for fewer "
                "new tokens."
            )


def prompt_columns(
    input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> int:
    """Columns of the prompt; `input_ids` may lack those that a cache or embeddings hold."""
    mask, embeddings = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    if mask is not None and mask.dim() == 2:
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
    Raise `ValueError` for a prompt that leaves no room in the target's learned table of positions,
    and for a text longer than a window that blocks would look past. Arguments as of
    `check_cache_fits`.
    """
    table, mask = position_table(target, learned_only=True), model_kwargs.get("attention_mask")
    length = prompt_columns(input_ids, config, model_kwargs)
    new_tokens = config.max_length - input_ids.shape[1]
    text, longest = target.config.get_text_config(decoder=True), length + new_tokens
    # The host's mask for it is causal and no more; only its cache forgets what left the window,
    # and that behind a forward, not between the tokens of one.
    if text.model_type == "moshi" and longest > text.sliding_window:
        raise ValueError(
            f"{type(target).__name__} looks past its window of {text.sliding_window} when it reads "
            f"several tokens at a time, and the text may get {longest} long. Ask "
            "for fewer new tokens, or generate without assistant_model."
        )
    if mask is not None and mask.dim() == 2:
        length = int(mask.sum(dim=-1).max())
    needed = length + (new_tokens > 1)
    if table is not None and needed > table:
        raise ValueError(
            f"The prompt has {length} tokens, and {type(target).__name__} has {table} positions "
            "for it and for what is generated. Shorten the prompt."
        )


def rows_are_coupled(
    target: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]
) -> bool:
    """
    Whether what a row of a batch gets depends on how far other rows are, or on the column it stands
    in: positions not given to the target as `(R, n)`, or attention over chunks of columns.

    Args:
        target (`PreTrainedModel`): the target.
        input_ids (`torch.Tensor` of shape `(R, n)`): the texts behind the prefill.
        model_kwargs (`dict`): for the next forward, which may drop the positions in there.
    """
    if input_ids.shape[0] == 1:
        return False
    inputs = target.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **model_kwargs)
    positions = inputs.get("position_ids")
    layer_types = getattr(target.config.get_text_config(decoder=True), "layer_types", None) or ()
    return positions is None or positions.dim() != 2 or "chunked_attention" in layer_types
