"""
What the trainer needs of the target, computed as it is needed: tap outputs, final states, its head.

The published recipe stores these for every token of the corpus, about 38 TB. Here the target runs
beside the drafter, and a folder keeps them only if it is asked for (`feature_cache.py`).
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from ..generation.taps import TargetTaps
from .objective import TargetStates
from .vocabulary_loss import Teacher

# Positions whose logits are compared once with the target's own.
_PROBE_POSITIONS = 16


class TargetReader:
    """
    Runs a frozen target on training batches.

    Args:
        target (`PreTrainedModel`): decoder-only; put into evaluation mode and frozen.
        target_layer_ids (`list[int]`): the drafter's taps.
        with_normaliser (`bool`, *optional*, defaults to `False`):
            Also compute the log-sum-exp of the logits of every position, which a reduced draft
            vocabulary makes use of when it is kept.

    Raises:
        `ValueError`: the target's logits are not its head applied to its last hidden states, or the
            head is quantised or has a bias.
    """

    def __init__(
        self, target: PreTrainedModel, target_layer_ids: list[int], with_normaliser: bool = False
    ):
        self.target = target.eval().requires_grad_(False)
        self.layer_ids = list(target_layer_ids)
        self.with_normaliser = with_normaliser
        config = target.config.get_text_config(decoder=True)
        scaling = getattr(config, "logits_scaling", None)
        self.softcapping = getattr(config, "final_logit_softcapping", None)
        self.scale = 1 / scaling if scaling else getattr(config, "logit_scale", None) or 1.0
        self._check_head()

    @property
    def head(self) -> nn.Module:
        """The target's output head."""
        return self.target.get_output_embeddings()

    def teacher(self, hidden: torch.Tensor) -> Teacher:
        """The distributions that follow `hidden` `(N, D)`."""
        return Teacher(hidden, self.head.weight, self.softcapping, self.scale)

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> TargetStates:
        """
        States of a batch that is padded on the right, `(B, S)` tokens. No logits of whole sequences
        are formed.
        """
        with TargetTaps(self.target, self.layer_ids) as taps:
            last_hidden = self.target.base_model(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False
            ).last_hidden_state
            features = taps.take()
        normaliser = self._log_normaliser(last_hidden) if self.with_normaliser else None
        return TargetStates(features, last_hidden, normaliser)

    def _log_normaliser(self, last_hidden: torch.Tensor, chunk_rows: int = 512) -> torch.Tensor:
        rows = last_hidden.flatten(0, 1)
        parts = [self._logits(part).logsumexp(dim=-1) for part in rows.split(chunk_rows)]
        return torch.cat(parts).view(last_hidden.shape[:-1])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.scale * self.head(hidden).float()
        cap = self.softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.no_grad()
    def _check_head(self) -> None:
        name = type(self.target).__name__
        weight = getattr(self.head, "weight", None)
        bias = getattr(self.head, "bias", None)
        if weight is None or not weight.is_floating_point() or bias is not None:
            raise ValueError(
                f"The output head of {name} ({type(self.head).__name__}) is not a plain weight "
                "without bias, so a drafter cannot be trained on it here. Load the target with an "
                "unquantised head."
            )
        size = self.target.config.get_text_config(decoder=True).vocab_size
        device = self.target.get_input_embeddings().weight.device
        probe = torch.arange(_PROBE_POSITIONS, device=device)[None] % size
        own = self.target(input_ids=probe, use_cache=False).logits.float()
        hidden = self.target.base_model(input_ids=probe, use_cache=False).last_hidden_state
        difference = (self._logits(hidden).to(own.device) - own).abs().max().item()
        if difference > 0.02 * own.abs().max().item():
            raise ValueError(
                f"The logits of {name} are not its output head applied to "
                f"its last hidden states (they differ by up to {difference:.3g}), so a drafter "
                "cannot be trained on them here. Soft-capping, `logits_scaling` and `logit_scale` "
                "of the config are understood; this target does something else."
            )
