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
from .compiling import fitting_width
from .path_processors import DraftPathProcessors, PathProcessors
from .ranks import Ranks
from .rows import Rows
from .settings import DraftSettings
from .taps import TargetTaps

logger = logging.getLogger(__name__)


@dataclass
class Proposal:
    """
    Draft tokens to submit to the target. R rows, L submitted columns, γ drafted tokens.

    Attributes:
        tokens (`torch.Tensor` of shape `(R, L)`): the tokens.
        logits (`torch.Tensor` of shape `(R, L, V)`, *optional*):
            What they were sampled from; `None` if they were chosen without chance.
        lengths (`list[int]`):
            Tokens submitted per row; what stands behind them in `tokens` only fills the columns.
        num_drafted (`int`): tokens drafted per row.
        confidences (`torch.Tensor` of shape `(R, γ)`, *optional*):
            conditional confidence of the drafted tokens, calibrated.
        ends_text (`list[bool]`): rows whose last submitted token is known to be a stop token.
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None
    lengths: list[int]
    num_drafted: int
    confidences: torch.Tensor | None
    ends_text: list[bool]

    @classmethod
    def empty(cls, anchor_ids: torch.Tensor) -> "Proposal":
        """Nothing to submit: the round is one step of plain decoding."""
        rows = anchor_ids.shape[0]
        return cls(anchor_ids.new_zeros(rows, 0), None, [0] * rows, 0, None, [False] * rows)


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
        start_position (`int` or `torch.Tensor` of shape `(R,)`, *optional*, defaults to 0):
            positions in the target's cache before this call.
        prompt_mask (`torch.Tensor` of shape `(R, P)`, *optional*):
            Which positions of the prompt are text; padding is no context. All of them by default.
        stop_ids (`frozenset[int]`, *optional*): tokens behind which the text is over.
        ranks ([`Ranks`], *optional*): processes that have to make the same proposal.

    Attributes:
        widths (`tuple[int, ...]`, *optional*):
            Ascending numbers of columns that may be submitted; any by default. A compiled target is
            compiled for each width it meets.
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
        start_position: int | torch.Tensor = 0,
        prompt_mask: torch.Tensor | None = None,
        stop_ids: frozenset[int] = frozenset(),
        ranks: Ranks | None = None,
    ):
        self.drafter = drafter
        self.settings = settings
        self.context = drafter.new_context(batch_size, start_position=start_position, target=target)
        self.taps = TargetTaps(target, drafter.config.target_layer_ids)
        self.scheduler = RoundScheduler(settings.scheduling, target, drafter, batch_size)
        self.widths: tuple[int, ...] | None = None
        self._logits_processor = logits_processor
        self._stop_ids = stop_ids
        self._do_sample = do_sample and not settings.greedy_drafts
        self._prompt_mask = prompt_mask
        windows = [layer.window for layer in self.context.cache.layers]
        if all(windows) and (prompt_mask is None or bool(prompt_mask.all())):
            # Of the prompt, no block sees more.
            self.taps.keep = max(windows)
        self._is_text: torch.Tensor | None = None
        self._captured: torch.Tensor | None = None
        self._pending: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._ranks = Ranks(target) if ranks is None else ranks

    def __enter__(self) -> "DSparkCandidateGenerator":
        self.taps.__enter__()
        self.scheduler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.scheduler.__exit__(*error)
        self.taps.__exit__(*error)

    def capture(self, last: int | None = None, rows: list[int] | None = None) -> None:
        """
        Take what the taps read in the target's last forward, before anything else runs it.

        Args:
            last (`int`, *optional*):
                so many positions from the end are new to the drafter; all by default (prefill).
            rows (`list[int]`, *optional*): rows of that forward that this object drafts for.
        """
        if self.settings.num_draft_tokens == 0:
            self.taps.clear()
            return
        features = self.taps.take()
        # Only of a prompt: what a round adds is never longer than it has to be.
        self.taps.keep = None
        self.context.skip(self.taps.num_dropped)
        features = features if rows is None else features[rows]
        self._captured = features if last is None else features[:, -last:]

    def commit(self, kept: list[int] | None = None) -> None:
        """
        Remember the features of the positions that the last target forward settled.

        Args:
            kept (`list[int]`, *optional*):
                of each row the first so many of its input positions; all by default (prefill).
        """
        if self._captured is None:
            return
        features, self._captured, mask = self._captured, None, None
        if kept is not None:
            self.scheduler.record(sum(kept), len(kept))
            features = features[:, : max(kept)]
            if min(kept) < max(kept):
                counts = torch.tensor(kept, device="cpu")[:, None]
                mask = torch.arange(max(kept), device="cpu")[None] < counts
        elif self._prompt_mask is not None:
            self._is_text = self._prompt_mask.cpu().bool()
            mask, self._prompt_mask = self._prompt_mask[:, -features.shape[1] :].cpu().bool(), None
        # Whether the drafter runs again is known only later; projecting these rows can wait until
        # then.
        self._pending.append((features, mask))

    def select(self, rows: list[int]) -> None:
        """Go on with these of the rows."""
        self.context.select(rows)
        self.scheduler.select(rows)
        self._pending = [
            (features[rows], mask if mask is None else mask[rows])
            for features, mask in self._pending
        ]

    def propose(
        self,
        rows: Rows,
        limits: list[int],
        columns: int | None = None,
        num_held: int | None = None,
    ) -> Proposal:
        """
        Draft behind the last committed tokens and choose how much of it to submit.

        Args:
            rows ([`Rows`]): the texts; only active ones are drafted for.
            limits (`list[int]`): of each active row, most tokens that can be used.
            columns (`int`, *optional*): most tokens that one forward may carry.
            num_held (`int`, *optional*):
                rows in the target's forward, finished ones included; the active ones by default.
        """
        rooms = (columns, self.scheduler.begin(len(limits) if num_held is None else num_held))
        most = min([self.settings.num_draft_tokens, *(room for room in rooms if room is not None)])
        limits = [min(limit, most) for limit in limits]
        input_ids = rows.anchored(rows.active)
        if max(limits) <= 0 or not self._should_draft(input_ids.device):
            self.scheduler.submit(1, drafted=False)
            return Proposal.empty(input_ids[:, -1])
        self._extend_context(rows)
        self.context.limit = max(limits)
        processors: Any = self._logits_processor
        path_processors = PathProcessors(processors, rows)
        if path_processors.read_the_text:
            processors = DraftPathProcessors(
                path_processors, rows, input_ids.shape[1], limits, self._stop_ids
            )
        block = self.drafter.draft(
            self.context,
            input_ids[:, -1],
            do_sample=self._do_sample,
            logits_processor=processors,
            input_ids=input_ids,
        )
        block.tokens = self._ranks.agree(block.tokens)
        num_drafted = block.tokens.shape[1]
        limits = [max(min(limit, num_drafted), 0) for limit in limits]
        usable, ends_text = limits, [False] * len(limits)
        if path_processors.read_the_text and self._stop_ids:
            usable, ends_text = self._usable(block.tokens, limits)
        logits = block.confidence_logits
        if logits is not None:
            logits = self.scheduler.calibrated(logits)
        most_useful = torch.tensor(usable, device=block.tokens.device)
        chosen = self.scheduler.verify_lengths(logits, most_useful)
        # Reading a tensor waits for the device.
        lengths = usable if chosen is most_useful else chosen.tolist()
        lengths = self._ranks.agree_on(lengths, block.tokens.device)
        width = max(lengths)
        if self.widths is not None:
            width = fitting_width(self.widths, width, min(most, num_drafted))
            lengths = [min(length, width) for length in lengths]
        self.scheduler.submit(1 + width, drafted=True)
        device = input_ids.device
        return Proposal(
            tokens=block.tokens[:, :width].to(device),
            logits=block.logits[:, :width].to(device) if self._do_sample else None,
            lengths=lengths,
            num_drafted=num_drafted,
            confidences=None if logits is None else logits.double().sigmoid(),
            ends_text=[
                ends and length == whole
                for ends, length, whole in zip(ends_text, lengths, usable, strict=True)
            ],
        )

    def _should_draft(self, device: torch.device) -> bool:
        """Whether drafting pays now. Ranks measure their own profiles, so they have to agree."""
        return bool(self._ranks.agree_on([int(self.scheduler.should_draft())], device)[0])

    def _extend_context(self, rows: Rows) -> None:
        """Hand the features of newly committed positions to the drafter."""
        if not self._pending:
            return
        features = torch.cat([part for part, _ in self._pending], dim=1)
        mask = None
        if any(part_mask is not None for _, part_mask in self._pending):
            masks = [
                torch.ones(part.shape[:2], dtype=torch.bool, device="cpu") if mask is None else mask
                for part, mask in self._pending
            ]
            mask = torch.cat(masks, dim=1)
        self._pending = []
        if self.drafter.is_autoregressive:
            self._extend_with_tokens(features, mask, rows)
        elif mask is None:
            self.drafter.extend(self.context, features)
        else:
            self.drafter.extend(self.context, features, mask=mask)

    def _extend_with_tokens(
        self, features: torch.Tensor, mask: torch.Tensor | None, rows: Rows
    ) -> None:
        """As `extend` wants it of a drafter that reads the token behind each position as well."""
        if mask is None:
            mask = torch.ones(features.shape[:2], dtype=torch.bool, device="cpu")
        texts = [self._text(rows, row) for row in rows.active]
        self._is_text = None
        lengths = torch.tensor([len(text) for text in texts], device="cpu")
        unknown = (mask.sum(dim=1) - lengths).clamp(min=0)
        if bool(unknown.any()):
            # The prompt was given as embeddings: the drafter starts with the text behind it.
            self.context.skip(unknown)
            mask = mask & (mask.cumsum(dim=1) > unknown[:, None])
            logger.warning(
                "An Eagle3 drafter reads the prompt's token ids, and %d positions were given as "
                "inputs_embeds alone; it drafts without them and gets fewer tokens accepted. Pass "
                "input_ids as well.",
                int(unknown.max()),
            )
        following = texts[0].new_zeros(mask.shape)
        for i, (text, committed) in enumerate(zip(texts, mask, strict=True)):
            count = int(committed.sum())
            following[i, committed.to(following.device)] = text[len(text) - count :]
        if bool(mask.all()):
            self.drafter.extend(self.context, features, token_ids=following)
        else:
            self.drafter.extend(self.context, features, token_ids=following, mask=mask)

    def _text(self, rows: Rows, row: int) -> torch.Tensor:
        """Token ids of a row, without those that the prompt's mask takes out."""
        ids = rows.text(rows.length(row))[row, : rows.length(row)]
        if self._is_text is None or rows.prompt_length < self._is_text.shape[1]:
            # A prompt of embeddings has no ids to take out.
            return ids
        is_text = torch.ones(len(ids), dtype=torch.bool, device="cpu")
        is_text[: self._is_text.shape[1]] = self._is_text[row]
        return ids[is_text.to(ids.device)]

    def _usable(self, tokens: torch.Tensor, limits: list[int]) -> tuple[list[int], list[bool]]:
        """
        Draft tokens of each row up to a stop token, and whether there is one.

        Looked at only where processors read the text: they must not be asked about what lies
        behind. Whether token k is submitted depends on tokens before k alone, so the cut is
        lossless.
        """
        usable, ends_text = list(limits), [False] * len(limits)
        for i, row in enumerate(tokens.tolist()):
            for k, token in enumerate(row[: limits[i]]):
                if token in self._stop_ids:
                    usable[i], ends_text[i] = k + 1, True
                    break
        return usable, ends_text

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
        is_prefill = not self._pending and int(self.context.lengths[0]) == 0
        self.capture()
        self.commit(None if is_prefill else [n_last_matches + 1])
        limit = self.settings.num_draft_tokens
        proposal = self.propose(Rows(input_ids, 0), [limit] * input_ids.shape[0])
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
