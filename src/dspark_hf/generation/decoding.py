"""
The decoding loop: draft, verify, commit, until a stopping criterion holds for every row.

R rows, P prompt positions, L submitted draft tokens, V vocabulary. The prefill is the host's own,
so that the first token comes from the same arithmetic as in plain decoding. The target's cache
always holds every committed token but the last, the anchor, which enters with the next
verification.

Rows accept different numbers of tokens: `rows.py` keeps their texts, `frame.py` their cache.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.utils import ModelOutput

from ..drafting import probabilities, sample
from .block_checks import check_blocks
from .cache_checks import (
    check_cache,
    check_cache_fits,
    check_columns,
    check_context_fits,
    prompt_columns,
    rows_are_coupled,
)
from .candidate_generator import DSparkCandidateGenerator, Proposal
from .checks import (
    check_batch,
    check_generation_mode,
    check_padding,
    check_pairing,
    check_processors,
    warn_if_useless,
)
from .compiling import compiled_widths, prefill_config, will_compile
from .frame import Frame, crop_to, extended
from .judging import NO_TOKEN, Judge
from .outputs import DSparkDecoderOnlyOutput, OutputRecorder
from .path_processors import PathProcessors
from .ranks import Ranks
from .rotary_limits import RotaryLimits
from .rows import Rows, pad_token_id
from .settings import resolve_settings
from .statistics import CallRecorder, RoundRecord
from .stopping import TokenwiseStopping
from .v4_cache import rewindable

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

    from ..modeling_drafter import DrafterModel


def make_custom_generate(drafter: "DrafterModel", streamer: "BaseStreamer | None") -> Callable:
    """A callable for `generate(custom_generate=…)` that runs this loop."""

    def custom_generate(
        model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
    ):
        check_generation_mode(generation_config, generation_config.get_generation_mode())
        check_pairing(model, drafter)
        return decode(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            drafter,
            streamer=streamer,
            **model_kwargs,
        )

    return custom_generate


def decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: "DrafterModel",
    synced_gpus: bool = False,
    streamer: "BaseStreamer | None" = None,
    **model_kwargs: Any,
) -> DSparkDecoderOnlyOutput | torch.Tensor:
    """
    Generate with a drafter. Arguments are those of the host's decoding methods, prepared by its
    `generate`.

    Random numbers come from the global generator of the target's device, independent ones for every
    row: the same `torch.manual_seed` and the same batch give the same texts, a batch of other rows
    other ones. A row that a criterion ends is padded from there on, also where the host, for lack
    of a stop token, would let it run on until all rows have ended.

    Returns:
        `torch.Tensor` of shape `(R, P + new tokens)`, shorter rows padded behind their end, or
        [`DSparkDecoderOnlyOutput`] if the generation config asks for a dict.
    """
    check_batch(input_ids, model_kwargs.get("attention_mask"))
    check_padding(model, model_kwargs.get("attention_mask"))
    check_processors(logits_processor)
    with rewindable(model_kwargs.get("cache")):
        check_cache(model_kwargs.get("cache"), after_prefill=False)
        check_cache_fits(model, input_ids, generation_config, model_kwargs)
        check_context_fits(model, input_ids, generation_config, model_kwargs)
        check_blocks(model, model_kwargs, input_ids.device)
        loop = _DecodingLoop(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            drafter,
            streamer,
            model_kwargs,
        )
        with loop.generator:
            return loop.run(synced_gpus)


class _DecodingLoop:
    """State of one call."""

    frame: Frame

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        drafter: "DrafterModel",
        streamer: "BaseStreamer | None",
        model_kwargs: dict[str, Any],
    ):
        self.started = time.perf_counter()
        self.model = model
        self.logits_processor = logits_processor
        self.config = generation_config
        self.drafter = drafter
        self.streamer = streamer
        self.kwargs = model_kwargs
        self.cache = model_kwargs["cache"]
        num_rows = input_ids.shape[0]
        self.rows = Rows(input_ids, pad_token_id(generation_config))
        self.stopping = TokenwiseStopping(stopping_criteria)
        self.rotary_limits = RotaryLimits(model.config.get_text_config(decoder=True))
        self.outputs = OutputRecorder(generation_config, num_rows)
        self.recorder = CallRecorder()
        self.ranks = Ranks(model)
        self.judge = Judge(
            PathProcessors(logits_processor, self.rows),
            self.rows,
            self.ranks,
            generation_config.do_sample,
        )
        self.settings = resolve_settings(
            generation_config, drafter.generation_config, drafter.config.block_size
        )
        past_length = int(self.cache.get_seq_length())
        mask = model_kwargs.get("attention_mask")
        # Cache positions that survive if the call fails: what the caller has seen, and no drafts.
        self.settled = past_length
        self.num_streamed = 0
        self.generator = DSparkCandidateGenerator(
            model,
            drafter,
            self.settings,
            logits_processor,
            generation_config.do_sample,
            batch_size=num_rows,
            start_position=past_length
            if mask is None
            else mask[:, :past_length].sum(dim=1).long().cpu(),
            stop_ids=frozenset(self.stopping.stop_ids),
            prompt_mask=mask,
            ranks=self.ranks,
        )
        self.forward = model.__call__
        self.compiles = will_compile(
            model, model_kwargs, generation_config, self.generator.taps.reach_the_last_layer
        )
        if self.compiles or self.generator.taps.reads_outputs:
            self.generator.widths = compiled_widths(drafter.config.block_size)

    def run(self, synced_gpus: bool) -> DSparkDecoderOnlyOutput | torch.Tensor:
        """Prefill, then rounds until done."""
        try:
            self._prefill()
            with self.model._optimize_model_for_decode():
                while self.model._has_unfinished_sequences(
                    not self.rows.active, synced_gpus, device=self.rows.device
                ):
                    if self.rows.active:
                        self._round(synced_gpus)
                    else:
                        self._idle_forwards(2 if self.frame.replays else 1)
            if not self.frame.finish(self.forward, self.rows) and synced_gpus:
                self._idle_forwards()
        except BaseException:
            if hasattr(self, "frame"):
                self.frame.roll_back(self.settled)
            else:
                crop_to(self.model, self.cache, self.settled)
            raise
        finally:
            if hasattr(self, "frame"):
                self.frame.stop_recording()
        return self._finish()

    def _prefill(self) -> None:
        taps = self.generator.taps
        config = prefill_config(self.config, caller_compiled=taps.reads_outputs)
        if taps.reads_outputs:
            taps.read_outputs(self.kwargs)
        if getattr(self.model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
            # Such targets shorten the prompt inside their last layers when few logits are asked
            # for.
            self.kwargs["logits_to_keep"] = 0
        input_ids = self.rows.text(self.rows.prompt_length)
        columns = prompt_columns(input_ids, self.config, self.kwargs) - self.settled
        self.generator.scheduler.read_prompts(input_ids.shape[0] * columns)
        outputs = self.model._prefill(input_ids, config, self.kwargs)
        taps.read(outputs)
        check_cache(outputs.get("cache"), after_prefill=True)
        self.cache = outputs.cache
        check_columns(self.model, self.cache, input_ids, self.config, self.kwargs)
        self.settled = int(self.cache.get_seq_length())
        self.generator.capture()
        self.generator.commit()
        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
        # Processors may write in place, and raw logits are an output of their own.
        scores = self.logits_processor(input_ids, logits.clone())
        has_token = not self.config.do_sample or bool((scores.amax(dim=-1) > -torch.inf).all())
        if bool(scores.isnan().any()) or not has_token:
            raise ValueError(NO_TOKEN)
        token = sample(probabilities(scores)) if self.config.do_sample else scores.argmax(dim=-1)
        token = self.ranks.agree(token)
        self.outputs.add_prefill(outputs, logits, scores)
        kwargs = extended(self.model, outputs, self.kwargs, 1)
        if self.compiles:
            self.forward = self.model.get_compiled_call(self.config.compile_config)
            taps.read_outputs(kwargs)
        self.frame = Frame(
            self.model,
            kwargs,
            self.cache,
            num_rows=len(self.rows.counts),
            device=self.rows.device,
            lock_step=rows_are_coupled(
                self.model, torch.cat((input_ids, token[:, None]), dim=1), kwargs
            )
            or bool(self.rotary_limits),
            keeps_cache=self.config.return_dict_in_generate
            or getattr(self.cache, "_is_user_defined", False),
        )
        _, over = self._emit(token[:, None], [[token] for token in token.tolist()])
        self._leave(outputs, [0] * len(over), over)

    def _round(self, synced_gpus: bool) -> None:
        """Draft, verify, commit."""
        started = time.perf_counter()
        proposal = self.generator.propose(
            self.rows, self._rooms(), self.frame.room(), len(self.frame.rows)
        )
        drafted = time.perf_counter()
        active, rows = self.frame.active, self.rows.active
        past, lags = self.frame.length, self.frame.lags
        outputs, proposal = self._target_forward(proposal)
        # At once: processors and criteria may run the target themselves.
        self.generator.capture(last=proposal.tokens.shape[1] + 1, rows=self._those(active))
        verified = time.perf_counter()
        texts, drafts, _ = self._present(proposal, proposal.tokens.shape[1])
        raw = outputs.logits if len(active) == len(self.frame.rows) else outputs.logits[active]
        logits, scores = self.judge.scores(raw, proposal)
        verification = self.judge.verify(scores, proposal)
        runs, accepted, confidences = self.judge.read(verification, proposal, self.frame.lock_step)

        # The anchor is settled by now; `_emit` settles the run as it reaches the caller.
        self.settled = past + 1
        for i, row in enumerate(rows):
            self.outputs.add_run(row, logits[i, : len(runs[i])], scores[i, : len(runs[i])])
        kept, over = self._emit(verification.tokens, runs)
        for i, row in enumerate(rows):
            self.outputs.drop(row, len(runs[i]) - kept[i])
            entry = active[i]
            self.outputs.add_states(
                row, outputs, entry, past, lags[entry], drafts.shape[1], kept[i], self.frame.cache
            )
        if self.frame.replays:
            self.frame.replay(self.forward, texts, drafts[:, : max(kept) - 1], always=synced_gpus)
            self.generator.taps.clear()
        self.generator.commit(kept)
        self._leave(outputs, kept, over)
        self.settled = self.frame.length
        self._count(proposal, runs, kept, over, accepted, confidences)
        self.recorder.statistics.draft_seconds += drafted - started
        self.recorder.statistics.verify_seconds += verified - drafted

    def _those(self, active: list[int]) -> list[int] | None:
        return None if len(active) == len(self.frame.rows) else active

    def _rooms(self) -> list[int]:
        """Draft tokens that can be of use behind each anchor."""
        # One token always comes from the target itself, so drafts for the last one would be thrown
        # away.
        rooms = [self.config.max_length - self.rows.length(row) - 1 for row in self.rows.active]
        if self.rotary_limits:
            positions = self.frame.kwargs.get("position_ids")
            length = max(map(self.rows.length, self.rows.active))
            length = length if positions is None else int(positions.max()) + 1
            rooms = [self.rotary_limits.limit(length - 1, room) for room in rooms]
        return rooms

    def _present(
        self, proposal: Proposal, num_drafts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Texts, drafts and used draft columns of all rows that the target runs."""
        frame, drafts = self.frame, proposal.tokens[:, :num_drafts]
        input_ids = self.rows.anchored(frame.rows)
        lengths = proposal.lengths
        if len(frame.active) < len(frame.rows):
            placed = drafts.new_full((len(frame.rows), num_drafts), self.rows.pad_token_id)
            placed[frame.active] = drafts
            # Under lock-step finished rows go on in the positions of plain decoding.
            filled = [num_drafts if frame.lock_step else 0] * len(frame.rows)
            for i, length in zip(frame.active, lengths, strict=True):
                filled[i] = length
            drafts, lengths = placed, filled
        if min(lengths) >= num_drafts:
            return input_ids, drafts, None
        return input_ids, drafts, torch.tensor(lengths, device=drafts.device)

    def _target_forward(self, proposal: Proposal) -> tuple[ModelOutput, Proposal]:
        """
        The target on `[anchor, drafts]`, `(rows, L + 1)` positions, and the proposal it verified.

        Some targets (Phi-3) give up their cache at a certain length and read the whole text again.
        In such a round nothing is verified: it is the step that plain decoding makes.
        """
        num_drafts = proposal.tokens.shape[1]
        inputs = self.frame.inputs(*self._present(proposal, num_drafts))
        if inputs.get("cache") is not self.frame.cache and num_drafts:
            proposal, num_drafts = Proposal.empty(proposal.tokens[:, 0]), 0
            inputs = self.frame.inputs(*self._present(proposal, num_drafts))
        self.generator.taps.clear()
        outputs = self.frame.run(self.forward, inputs, num_drafts)
        self.generator.taps.read(outputs)
        return outputs, proposal

    def _emit(self, tokens: torch.Tensor, runs: list[list[int]]) -> tuple[list[int], list[bool]]:
        """
        Commit each row's run up to where it stops, and stream it. Returns how many tokens of each
        are kept and whether that row is over.
        """
        self.rows.put(tokens, [len(run) for run in runs])
        kept, over = self.stopping.count(self.rows, runs, self.outputs.scores)
        decided = self.ranks.agree_on([*kept, *map(int, over)], self.rows.device)
        kept, over = decided[: len(kept)], [bool(flag) for flag in decided[len(kept) :]]
        self.rows.keep(kept, over)
        self.recorder.statistics.new_tokens += sum(kept)
        if self.streamer is not None:
            self._stream(self.streamer)
        return kept, over

    def _stream(self, streamer: "BaseStreamer") -> None:
        """Hand on every new column that all rows have, in the order of plain decoding."""
        counts = self.rows.counts
        ready = min((counts[row] for row in self.rows.active), default=max(counts))
        for i in range(ready - self.num_streamed):
            self.settled += i > 0
            self.num_streamed += 1
            column = self.rows.text(self.rows.prompt_length + self.num_streamed)[:, -1]
            streamer.put(column.cpu())

    def _leave(self, outputs: ModelOutput, kept: list[int], over: list[bool]) -> None:
        """Cache, mask and drafting context go on with what was kept and the rows that go on."""
        frame = self.frame
        # Rows that finished before keep nothing, except that lock-step has one number for all.
        columns = [max(kept) if frame.lock_step else 0] * len(frame.rows)
        for entry, count in zip(frame.active, kept, strict=True):
            columns[entry] = max(kept) if frame.lock_step else count
        ended = [entry for entry, ends in zip(frame.active, over, strict=True) if ends]
        frame.settle(outputs, columns, ended)
        if ended and self.rows.active:
            self.generator.select([i for i, ends in enumerate(over) if not ends])

    def _count(
        self,
        proposal: Proposal,
        runs: list[list[int]],
        kept: list[int],
        over: list[bool],
        accepted: list[int],
        confidences: list[list[float]] | None,
    ) -> None:
        for i, run in enumerate(runs):
            num_verified, num_accepted = proposal.lengths[i], accepted[i]
            if over[i] and kept[i] <= num_accepted:
                # Cut inside the accepted run by a stop: the drafts behind it were never in
                # question. What lock-step cuts was, and leaving it out would make a row that was
                # wrong before the cut speak for positions where one that was right is silent.
                num_accepted = num_verified = kept[i]
            self.recorder.add_round(
                RoundRecord(
                    run[: kept[i]],
                    proposal.num_drafted,
                    num_verified,
                    num_accepted,
                    None if confidences is None else confidences[i],
                )
            )

    def _idle_forwards(self, count: int = 1) -> None:
        """
        Keep step with other processes, which run their part of every forward of a sharded target:
        one in each round, a second one to replay, and one at the end. Beside the cache.
        """
        for _ in range(count):
            self.model(self.rows.text(1), use_cache=False)
        self.generator.taps.clear()

    def _finish(self) -> DSparkDecoderOnlyOutput | torch.Tensor:
        if self.streamer is not None:
            self.streamer.end()
        self.recorder.statistics.total_seconds = time.perf_counter() - self.started
        statistics = self.recorder.finish()
        warn_if_useless(self.drafter, statistics)
        sequences = self.rows.sequences()
        if not self.config.return_dict_in_generate:
            return sequences
        return DSparkDecoderOnlyOutput(
            sequences=sequences,
            cache=self.frame.cache,
            statistics=statistics,
            **self.outputs.as_dict(),
        )
