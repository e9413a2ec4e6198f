"""
The sequential stage and the confidence head of a drafter (paper sections 2 and 4, equations 4 to
7).

Shapes: R rows, G block positions (γ), V vocabulary, V_d draft vocabulary (V unless it is reduced),
H hidden size, r Markov rank. Each Markov head has two methods that agree: `step` for drafting, one
position at a time, and `block` for teacher-forced training.
"""

import torch
from torch import nn

from .configuration_dspark import DSparkConfig


class VanillaMarkovHead(nn.Module):
    """First-order head, equation 5: `B(x, ·) = W1[x] W2`."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.num_draftable_tokens, bias=False)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """W1 rows of `token_ids`: (...) to (..., r)."""
        return self.markov_w1(token_ids)

    def step(
        self, previous_ids: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Bias of one position.

        Args:
            previous_ids (`torch.Tensor` of shape `(R,)`): the token before the position.
            hidden (`torch.Tensor` of shape `(R, H)`):
                backbone output at the position, after the final norm.
            state (`torch.Tensor`, *optional*):
                what the previous call returned; `None` at the first position.

        Returns:
            The logit bias of shape `(R, V_d)` and the state for the next position.
        """
        return self.markov_w2(self.embed(previous_ids)), None

    def latents(self, previous_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """
        What W2 turns into biases: `(..., G, r)` of whole blocks, given previous tokens `(..., G)`
        and hidden `(..., G, H)`.
        """
        return self.embed(previous_ids)

    def block(self, previous_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Biases `(..., G, V_d)` of whole blocks."""
        return self.markov_w2(self.latents(previous_ids, hidden))


class GatedMarkovHead(VanillaMarkovHead):
    """The vanilla head with the embedding gated by the position: `B = W2 (σ(G [h ; e]) ⊙ e)`."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def step(self, previous_ids, hidden, state):
        return self.block(previous_ids, hidden), None

    def latents(self, previous_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(previous_ids)
        gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), dim=-1)))
        return gate * embedded


class RNNMarkovHead(VanillaMarkovHead):
    """The recurrent head, equation 6. The state s starts at zero in every block."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.rank = config.markov_rank
        self.joint_proj = nn.Linear(2 * self.rank + config.hidden_size, 3 * self.rank)

    def step(self, previous_ids, hidden, state):
        output, state = self._advance(previous_ids, hidden, state)
        return self.markov_w2(output), state

    def latents(self, previous_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        outputs, state = [], None
        for k in range(previous_ids.shape[-1]):
            output, state = self._advance(previous_ids[..., k], hidden[..., k, :], state)
            outputs.append(output)
        return torch.stack(outputs, dim=-2)

    def _advance(
        self, previous_ids: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.embed(previous_ids)
        if state is None:
            state = torch.zeros_like(embedded)
        joint = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1))
        gate, candidate, output = joint.split(self.rank, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return torch.tanh(output), state


class ConfidenceHead(nn.Module):
    """
    Logit of the probability that a draft token survives, given that all earlier ones did (equation
    7).

    It reads the token *before* the position and never the drafted token itself, which is what makes
    cutting the block by confidence lossless.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1, bias=config.confidence_head_bias)

    def forward(
        self, hidden: torch.Tensor, previous_embeddings: torch.Tensor | None
    ) -> torch.Tensor:
        """
        Args:
            hidden (`torch.Tensor` of shape `(..., H)`):
                Backbone output after the final norm; before it for DeepSeek-V4 drafters.
            previous_embeddings (`torch.Tensor` of shape `(..., r)`, *optional*):
                W1 rows of the previous tokens.

        Returns:
            `torch.Tensor` of shape `(...)`: float32 confidence logits.
        """
        features = torch.cat((hidden, previous_embeddings), dim=-1) if self.with_markov else hidden
        return self.proj(features).squeeze(-1).float()


def build_markov_head(config: DSparkConfig) -> VanillaMarkovHead | None:
    """The Markov head that `config` describes, or `None` for a drafter without one."""
    if config.markov_head_type is None:
        return None
    heads = {"vanilla": VanillaMarkovHead, "gated": GatedMarkovHead, "rnn": RNNMarkovHead}
    return heads[config.markov_head_type](config)
