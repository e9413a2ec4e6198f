"""Training runs the layers as drafting does, whatever a published layout asks of them."""

import pytest
import torch

from dspark_hf.training.block_forward import block_hidden_states
from published import make_block_drafter
from tiny import VOCAB, make_target


@pytest.mark.parametrize(
    "options",
    [
        {"causal_layers": [0, 1]},
        {"causal_layers": [0], "windows": (5, None)},
        {"causal_layers": [1], "anchor_predicts": False},
        {"unscaled_input_embeddings": True},
    ],
    ids=str,
)
def test_layers_and_embeddings(options):
    """B090, T13, T14: hidden states of two anchors at once equal those of drafting behind each."""
    # Its embedding scales what it looks up.
    drafter, target = make_block_drafter(**options), make_target("gemma3")
    embedding = target.get_input_embeddings()
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, VOCAB - 1, (1, 14), generator=generator)
    features = torch.randn(1, 14, drafter.fc.in_features, generator=generator)
    anchors = torch.tensor([[4, 9]])
    everything = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        trained = block_hidden_states(
            drafter, embedding, features, ids, everything, anchors, everything[:, :2]
        )
    for i, anchor in enumerate(anchors[0].tolist()):
        context = drafter.new_context(1, target=target)
        drafter.extend(context, features[:, :anchor])
        drafted = drafter.draft(context, ids[:, anchor]).hidden_states
        torch.testing.assert_close(trained[:, i], drafted, rtol=0, atol=2e-5)


def test_windows_of_each_slot_are_not_trained():
    """They are read, and training would silently mean another window."""
    drafter = make_block_drafter((5, None), sliding_window_per_slot=True)
    embedding = make_target().get_input_embeddings()
    ids = torch.ones(1, 8, dtype=torch.long)
    with pytest.raises(ValueError, match="measures its sliding windows from each slot"):
        block_hidden_states(
            drafter,
            embedding,
            torch.zeros(1, 8, drafter.fc.in_features),
            ids,
            ids.bool(),
            torch.tensor([[3]]),
            torch.ones(1, 1, dtype=torch.bool),
        )
