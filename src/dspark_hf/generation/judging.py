"""What the target says about a proposal: scores, verdict, and the one transfer to the host."""

import torch

from ..drafting import probabilities
from .candidate_generator import Proposal
from .path_processors import PathProcessors
from .ranks import Ranks
from .rows import Rows
from .verification import Verification, verify_greedy, verify_sampling

NO_TOKEN = (
    "The target's logits contain NaN or allow no token, so there is nothing to choose from. "
    "Check the target in this dtype with a plain forward, and the logits processors; float16 "
    "overflow and damaged weights are the usual causes."
)


class Judge:
    """
    Judges the proposals of one call. R active rows, L submitted draft tokens, V vocabulary.

    Args:
        paths ([`PathProcessors`]): the target's processors.
        rows ([`Rows`]): the texts.
        ranks ([`Ranks`]): processes that have to come to the same verdict.
        do_sample (`bool`): whether the target samples.
    """

    def __init__(self, paths: PathProcessors, rows: Rows, ranks: Ranks, do_sample: bool):
        self._paths = paths
        self._rows = rows
        self._ranks = ranks
        self._do_sample = do_sample

    def scores(self, raw: torch.Tensor, proposal: Proposal) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Raw and processed float32 logits `(R, L + 1, V)` of the active rows; processors see the
        drafted path up to each position.
        """
        length = proposal.tokens.shape[1] + 1
        logits = raw[:, -length:].to(dtype=torch.float32, device=self._rows.device)
        if not self._paths:
            return logits, logits
        ids = self._rows.followed_by(proposal.tokens, proposal.lengths)
        scores = []
        for k in range(length):
            # Nothing follows a stop token, so nobody is asked what may follow it.
            asked = [
                k < submitted + (not ends)
                for submitted, ends in zip(proposal.lengths, proposal.ends_text, strict=True)
            ]
            scores.append(self._paths.scores(ids, logits[:, k], k, asked))
        return logits, torch.stack(scores, dim=1)

    def verify(self, scores: torch.Tensor, proposal: Proposal) -> Verification:
        """The verdict on processed scores `(R, L + 1, V)`, the same on every rank."""
        lengths = torch.tensor(proposal.lengths, device=scores.device)
        if not self._do_sample:
            verification = verify_greedy(scores, proposal.tokens, lengths)
        else:
            draft_probs = None if proposal.logits is None else probabilities(proposal.logits)
            verification = verify_sampling(
                probabilities(scores), proposal.tokens, draft_probs, lengths
            )
        verification.tokens = self._ranks.agree(verification.tokens)
        verification.num_accepted = self._ranks.agree(verification.num_accepted)
        return verification

    def read(
        self, verification: Verification, proposal: Proposal, lock_step: bool
    ) -> tuple[list[list[int]], list[int], list[list[float]] | None]:
        """
        Everything the host needs to know about a round, in one transfer: committed tokens, accepted
        drafts and confidences of each row.
        """
        device, width = verification.tokens.device, verification.tokens.shape[1]
        parts = [
            verification.num_accepted[:, None],
            verification.is_valid[:, None],
            verification.tokens,
        ]
        if proposal.confidences is not None:
            parts.append(proposal.confidences.to(device))
        read = torch.cat([part.double() for part in parts], dim=1).tolist()
        if not all(row[1] for row in read):
            raise ValueError(NO_TOKEN)
        accepted = [int(row[0]) for row in read]
        # Under lock-step all rows commit as many tokens as the row with the fewest.
        most = min(accepted) if lock_step else width
        runs = [
            [int(token) for token in row[2 : min(count, most) + 3]]
            for row, count in zip(read, accepted, strict=True)
        ]
        confidences = None
        if proposal.confidences is not None:
            confidences = [row[2 + width :] for row in read]
        return runs, accepted, confidences
