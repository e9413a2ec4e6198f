"""What is done to weights after the host has loaded them, so that they are in our normal form."""

from typing import Any

import torch

from .reading import Reading


def adapt_weights(drafter: Any, reading: Reading, source: str) -> None:
    """
    Bring loaded weights into the normal form, in place.

    Raises:
        `ValueError`: a weight that has to change was offloaded to disk.
    """
    if reading.vocabulary_offsets:
        ids = drafter.draft_to_target
        ids += torch.arange(len(ids), device=ids.device)
    if reading.interleaved_rotary:
        for layer in drafter.layers:
            _pair_by_halves(layer.self_attn, source)


def halves_first(head_dim: int) -> torch.Tensor:
    """
    Order `(head_dim,)` that turns rotary pairs (2i, 2i + 1) into pairs (i, i + head_dim / 2).

    Queries and keys may be reordered along the head alike: their products, and the norms over the
    head, do not change. So a drafter that was trained with interleaved rotary pairs becomes one for
    the host's rotation, with the same attention.
    """
    return torch.arange(head_dim).view(-1, 2).T.reshape(-1)


@torch.no_grad()
def _pair_by_halves(attention: Any, source: str) -> None:
    order = halves_first(attention.head_dim)
    for projection in (attention.q_proj, attention.k_proj):
        for parameter in (projection.weight, projection.bias):
            if parameter is None:
                continue
            _refuse_offloaded(parameter, source)
            heads = parameter.view(-1, attention.head_dim, *parameter.shape[1:])
            parameter.copy_(heads[:, order].reshape(parameter.shape))
    for norm in (attention.q_norm, attention.k_norm):
        _refuse_offloaded(norm.weight, source)
        norm.weight.copy_(norm.weight[order])


def _refuse_offloaded(parameter: torch.Tensor, source: str) -> None:
    if parameter.is_meta:
        raise ValueError(
            f"{source} stores its rotary pairs interleaved, so its weights are reordered on "
            "loading, and device_map put some on disk. Load it without disk offload."
        )
