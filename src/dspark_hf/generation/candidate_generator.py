"""
`DSparkCandidateGenerator`: drafts behind the committed tokens and decides how many of them to
submit.
"""

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ..scheduling.round_scheduler import RoundScheduler
from .path_processors import DraftPathProcessors, read_the_text
from .settings import DraftSettings
from .taps import TargetTaps

logger = logging.getLogger(__name__)


@dataclass
class Proposal:
    """
    Draft tokens to submit to the target. R rows, L submitted tokens, γ drafted ones.

    Attributes:
        tokens (`torch.Tensor` of shape `(R, L)`): the tokens.
        logits (`torch.Tensor` of shape `(R, L, V)`, *optional*):
            What they were sampled from; `None` if they were chosen without chance.
        lengths (`torch.Tensor` of shape `(R,)`): tokens submitted per row.
        num_drafted (`int`): tokens drafted per row.
        confidences (`torch.Tensor` of shape `(R, γ)`, *optional*):
            conditional confidence of the drafted tokens, calibrated.
        ends_text (`bool`): whether the last submitted token is known to be a stop token.
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None
    lengths: torch.Tensor
    num_drafted: int
    confidences: torch.Tensor | None
    ends_text: bool = False

    @classmethod
    def empty(cls, anchor_ids: torch.Tensor) -> "Proposal":
        """Nothing to submit: the round is one step of plain decoding."""
        rows = anchor_ids.shape[0]
        return cls(anchor_ids.new_zeros(rows, 0), None, anchor_ids.new_zeros(rows), 0, None)


class DSparkCandidateGenerator(CandidateGenerator):
    """
    Candidate generator for one `generate` call. A context manager: it reads the target's taps while
    it is open.

    Args:
        target (`PreTrainedModel`): the model whose output is kept.
        drafter ([`DSparkDrafter`] or [`Eagle3Drafter`]):
            the draft model; `drafter.draft` makes every proposal.
        settings ([`DraftSettings`]): how many tokens to submit, and how they are drawn.
        logits_processor (`LogitsProcessorList`):
            the target's processors, applied along the drafted path as well.
        do_sample (`bool`): whether the target samples.
        batch_size (`int`): R.
        start_position (`int`, *optional*, defaults to 0):
            positions in the target's cache before this call.
        prompt_mask (`torch.Tensor` of shape `(R, P)`, *optional*):
            Which positions of the prompt are text; padding is no context. All of them by default.
        stop_ids (`frozenset[int]`, *optional*): tokens behind which the text is over.
    """

    requires_model_outputs = True
    model_kwargs_overrides: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Any,
        settings: DraftSettings,
        logits_processor: LogitsProcessorList,
        do_sample: bool,
        batch_size: int,
        start_position: int = 0,
        prompt_mask: torch.Tensor | None = None,
        stop_ids: frozenset[int] = frozenset(),
    ):
        self.drafter = drafter
        self.settings = settings
        self.context = drafter.new_context(batch_size, start_position=start_position, target=target)
        self.taps = TargetTaps(target, drafter.config.target_layer_ids)
        self.scheduler = RoundScheduler(settings.scheduling, target, drafter, batch_size)
        self._logits_processor = logits_processor
        self._processors_read_text = read_the_text(logits_processor)
        self._stop_ids = stop_ids
        self._do_sample = do_sample and not settings.greedy_drafts
        self._prompt_mask = prompt_mask
        self._is_text: torch.Tensor | None = None
        self._captured: torch.Tensor | None = None
        self._pending: torch.Tensor | None = None

    def __enter__(self) -> "DSparkCandidateGenerator":
        self.taps.__enter__()
        self.scheduler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.scheduler.__exit__(*error)
        self.taps.__exit__(*error)

    def capture(self, last: int | None = None) -> None:
        """
        Take what the taps read in the target's last forward, before anything else runs it.

        Args:
            last (`int`, *optional*):
                so many positions from the end are new to the drafter; all by default (prefill).
        """
        if self.settings.num_draft_tokens == 0:
            self.taps.clear()
            return
        features = self.taps.take()
        if self._prompt_mask is not None:
            self._is_text = self._prompt_mask[0].to(features.device, torch.bool)
            features, self._prompt_mask = features[:, self._is_text], None
        self._captured = features if last is None else features[:, -last:]

    def commit(self, num_positions: int | None = None) -> None:
        """
        Remember the features of the positions that the last target forward settled.

        Args:
            num_positions (`int`, *optional*):
                the first so many of its input positions; all by default (prefill).
        """
        if self._captured is None:
            return
        features, self._captured = self._captured[:, :num_positions], None
        if num_positions is not None:
            self.scheduler.record(num_positions * features.shape[0], features.shape[0])
        # Whether the drafter runs again is known only later; projecting these rows can wait until
        # then.
        self._pending = (
            features if self._pending is None else torch.cat((self._pending, features), dim=1)
        )

    def propose(self, input_ids: torch.Tensor, limit: int) -> Proposal:
        """
        Draft behind the last committed token and choose how much of it to submit.

        Args:
            input_ids (`torch.Tensor` of shape `(R, length)`): all committed tokens.
            limit (`int`): most tokens that can be used; 0 skips drafting.
        """
        limit = min(limit, self.settings.num_draft_tokens)
        if limit <= 0 or not self.scheduler.should_draft():
            self.scheduler.submit(input_ids.shape[0], drafted=False)
            return Proposal.empty(input_ids[:, -1])
        self._extend(input_ids)
        self.context.limit = limit
        processors = self._logits_processor
        if self._processors_read_text:
            processors = DraftPathProcessors(processors, input_ids.shape[1], limit, self._stop_ids)
        block = self.drafter.draft(
            self.context,
            input_ids[:, -1],
            do_sample=self._do_sample,
            logits_processor=processors,
            input_ids=input_ids,
        )
        num_drafted = block.tokens.shape[1]
        usable, ends_text = self._usable(block.tokens, min(limit, num_drafted))
        logits = block.confidence_logits
        if logits is not None:
            logits = self.scheduler.calibrated(logits)
        limits = block.tokens.new_full((block.tokens.shape[0],), usable)
        lengths = self.scheduler.verify_lengths(logits, limits)
        # Reading a tensor waits for the device.
        width = usable if lengths is limits else int(lengths.max())
        self.scheduler.submit(lengths.shape[0] * (1 + width), drafted=True)
        device = input_ids.device
        return Proposal(
            tokens=block.tokens[:, :width].to(device),
            logits=block.logits[:, :width].to(device) if self._do_sample else None,
            lengths=lengths.to(device),
            num_drafted=num_drafted,
            confidences=None if logits is None else logits.double().sigmoid(),
            ends_text=ends_text and width == usable,
        )

    def _extend(self, input_ids: torch.Tensor) -> None:
        """Hand the features of newly committed positions to the drafter."""
        if self._pending is None:
            return
        features, self._pending = self._pending, None
        if not self.drafter.is_autoregressive:
            self.drafter.extend(self.context, features)
            return
        text = input_ids
        if self._is_text is not None and input_ids.shape[1] > len(self._is_text):
            is_text = self._is_text.to(input_ids.device)
            length, self._is_text = len(is_text), None
            text = torch.cat((input_ids[:, :length][:, is_text], input_ids[:, length:]), dim=1)
        following = text[:, -features.shape[1] :]
        unknown = features.shape[1] - following.shape[1]
        if unknown:
            # The prompt was given as embeddings: the drafter starts with the text behind it.
            self.context.skip(unknown)
            logger.warning(
                "An Eagle3 drafter reads the prompt's token ids, and %d positions were given as "
                "inputs_embeds alone; it drafts without them and gets fewer tokens accepted. Pass "
                "input_ids as well.",
                unknown,
            )
        self.drafter.extend(self.context, features[:, unknown:], token_ids=following)

    def _usable(self, tokens: torch.Tensor, width: int) -> tuple[int, bool]:
        """
        Draft tokens up to a stop token, and whether there is one.

        Looked at only where processors read the text: they must not be asked about what lies
        behind. Whether token k is submitted depends on tokens before k alone, so the cut is
        lossless.
        """
        if self._processors_read_text and self._stop_ids:
            for k, token in enumerate(tokens[0, :width].tolist()):
                if token in self._stop_ids:
                    return k + 1, True
        return width, False

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        The host's protocol, for its own assisted-decoding loop. The first call proposes nothing, so
        that the target's prefill yields the features.

        Returns:
            Committed and drafted tokens `(R, length + L)`, and logits `(R, L, V)` whose softmax is
            exactly what the drafted tokens were drawn from (one-hot for argmax drafts); `None`
            where nothing was drafted.
        """
        if is_first_iteration:
            return input_ids, None
        is_prefill = self._pending is None and int(self.context.lengths[0]) == 0
        self.capture()
        self.commit(None if is_prefill else n_last_matches + 1)
        proposal = self.propose(input_ids, self.settings.num_draft_tokens)
        if proposal.tokens.shape[1] == 0:
            return input_ids, None
        logits = proposal.logits
        if logits is None:
            vocabulary = self.drafter.config.vocab_size
            logits = torch.full(
                (*proposal.tokens.shape, vocabulary), -torch.inf, device=input_ids.device
            )
            logits.scatter_(-1, proposal.tokens[..., None], 0.0)
        return torch.cat((input_ids, proposal.tokens), dim=1), logits

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """Part of the host's protocol; the number of drafted tokens is fixed by the settings."""
