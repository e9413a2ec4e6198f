"""
The decoding loop: draft, verify, commit, until a stopping criterion holds.

R rows (one for now), P prompt positions, L submitted draft tokens, V vocabulary. The prefill is the
host's own, so that the first token comes from the same arithmetic as in plain decoding. The
target's cache always holds every committed token but the last, the anchor, which enters with the
next verification.
"""

import copy
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
from .candidate_generator import DSparkCandidateGenerator, Proposal
from .checks import (
    check_batch,
    check_cache,
    check_generation_mode,
    check_pairing,
    check_processors,
    warn_if_useless,
)
from .outputs import DSparkDecoderOnlyOutput, OutputRecorder
from .rotary_limits import RotaryLimits
from .settings import resolve_settings
from .statistics import CallRecorder, RoundRecord
from .stopping import TokenwiseStopping
from .v4_cache import rewindable
from .verification import Verification, verify_greedy, verify_sampling

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

    from ..modeling_dspark import DSparkDrafter

_NO_TOKEN = (
    "The target's logits contain NaN or allow no token, so there is nothing to choose from. "
    "Check the target in this dtype with a plain forward, and the logits processors; float16 "
    "overflow and damaged weights are the usual causes."
)


def make_custom_generate(drafter: "DSparkDrafter", streamer: "BaseStreamer | None") -> Callable:
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
    drafter: "DSparkDrafter",
    synced_gpus: bool = False,
    streamer: "BaseStreamer | None" = None,
    **model_kwargs: Any,
) -> DSparkDecoderOnlyOutput | torch.Tensor:
    """
    Generate with a drafter. Arguments are those of the host's decoding methods, prepared by its
    `generate`.

    Returns:
        `torch.Tensor` of shape `(R, P + new tokens)`, or [`DSparkDecoderOnlyOutput`] if the
        generation config asks for a dict.
    """
    check_batch(input_ids)
    check_processors(logits_processor)
    with rewindable(model_kwargs.get("cache")):
        check_cache(model_kwargs.get("cache"), after_prefill=False)
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

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        drafter: "DSparkDrafter",
        streamer: "BaseStreamer | None",
        model_kwargs: dict[str, Any],
    ):
        self.started = time.perf_counter()
        self.model = model
        self.input_ids = input_ids
        self.logits_processor = logits_processor
        self.config = generation_config
        self.drafter = drafter
        self.streamer = streamer
        self.kwargs = model_kwargs
        self.cache = model_kwargs["cache"]
        self.stopping = TokenwiseStopping(stopping_criteria)
        self.rotary_limits = RotaryLimits(model.config.get_text_config(decoder=True))
        self.outputs = OutputRecorder.from_config(generation_config)
        self.recorder = CallRecorder()
        self.settings = resolve_settings(
            generation_config, drafter.generation_config, drafter.config.block_size
        )
        past_length = self.cache.get_seq_length()
        # Cache positions that survive if the call fails: what the caller has seen, and no drafts.
        self.settled = past_length
        self.generator = DSparkCandidateGenerator(
            model,
            drafter,
            self.settings,
            logits_processor,
            generation_config.do_sample,
            batch_size=input_ids.shape[0],
            start_position=past_length,
            stop_ids=frozenset(self.stopping.stop_ids),
            prompt_mask=None if past_length else model_kwargs.get("attention_mask"),
        )
        self.forward = (
            model.get_compiled_call(generation_config.compile_config)
            if model._valid_auto_compile_criteria(model_kwargs, generation_config)
            else model.__call__
        )

    def run(self, synced_gpus: bool) -> DSparkDecoderOnlyOutput | torch.Tensor:
        """Prefill, then rounds until done."""
        try:
            is_done = self._prefill()
            with self.model._optimize_model_for_decode():
                while self.model._has_unfinished_sequences(
                    is_done, synced_gpus, device=self.input_ids.device
                ):
                    if is_done:
                        self._idle_forward()
                    else:
                        is_done = self._round()
        except BaseException:
            self._roll_back()
            raise
        finally:
            # The cache may live on with the caller, who does not crop after every forward.
            for layer in self.cache.layers:
                if hasattr(layer, "record_past"):
                    layer.record_past = False
        return self._finish()

    def _roll_back(self) -> None:
        """Crop the cache to what is settled, each layer by itself: a forward can fail midway."""
        for layer in self.cache.layers:
            if getattr(layer, "is_croppable", False) and hasattr(layer, "get_seq_length"):
                surplus = int(layer.get_seq_length()) - int(self.settled)
                if surplus > 0 and getattr(layer, "record_past", True):
                    layer.crop(-surplus)

    def _prefill(self) -> bool:
        if getattr(self.model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
            # Such targets shorten the prompt inside their last layers when few logits are asked
            # for.
            self.kwargs["logits_to_keep"] = 0
        outputs = self.model._prefill(self.input_ids, self.config, self.kwargs)
        self.cache = outputs.cache
        check_cache(self.cache, after_prefill=True)
        # From here on every forward is followed by a crop, which lets sliding layers roll back past
        # their window.
        self.cache.activate_past_recording()
        self.settled = self.cache.get_seq_length()
        self.generator.capture()
        self.generator.commit()
        logits = outputs.logits[:, -1].to(
            copy=True, dtype=torch.float32, device=self.input_ids.device
        )
        # Processors may write in place, and raw logits are an output of their own.
        scores = self.logits_processor(self.input_ids, logits.clone())
        has_token = not self.config.do_sample or bool((scores.amax(dim=-1) > -torch.inf).all())
        if bool(scores.isnan().any()) or not has_token:
            raise ValueError(_NO_TOKEN)
        token = sample(probabilities(scores)) if self.config.do_sample else scores.argmax(dim=-1)
        self.outputs.add_prefill(outputs, logits, scores)
        self.kwargs = self.model._update_model_kwargs_for_generation(outputs, self.kwargs)
        _, is_done = self._emit(token[:, None], token.tolist())
        return is_done

    def _round(self) -> bool:
        """Draft, verify, commit. Returns whether generation is over."""
        started = time.perf_counter()
        # One token always comes from the target itself, so drafts for the last one would be thrown
        # away.
        proposal = self.generator.propose(self.input_ids, self._room())
        drafted = time.perf_counter()
        past_length = self.cache.get_seq_length()
        outputs, proposal = self._target_forward(proposal)
        submitted = proposal.tokens.shape[1]
        # At once: processors and criteria may run the target themselves.
        self.generator.capture(last=submitted + 1)
        verified = time.perf_counter()
        logits, scores = self._scores(outputs.logits, proposal)
        verification = self._verify(scores, proposal)
        tokens, num_accepted, confidences = self._read(verification, proposal)

        # The anchor is settled by now; `_emit` settles the run as it reaches the caller.
        self.settled = past_length + 1
        run = tokens[: num_accepted + 1]
        self.outputs.add_run(logits, scores, len(run))
        num_kept, is_done = self._emit(verification.tokens[:, : len(run)], run)
        self.outputs.drop(len(run) - num_kept)
        self.outputs.add_states(outputs, past_length, submitted, num_kept, self.cache)

        self.cache.crop(-(submitted + 1 - num_kept))
        self.settled = past_length + num_kept
        self.generator.commit(num_kept)
        self.kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.kwargs, num_new_tokens=num_kept
        )
        self._count(proposal, run[:num_kept], num_accepted, confidences)
        self.recorder.statistics.draft_seconds += drafted - started
        self.recorder.statistics.verify_seconds += verified - drafted
        return is_done

    def _room(self) -> int:
        """Draft tokens that can be of use behind the anchor."""
        room = self.config.max_length - self.input_ids.shape[1] - 1
        if self.rotary_limits:
            positions = self.kwargs.get("position_ids")
            length = self.input_ids.shape[1] if positions is None else int(positions.max()) + 1
            room = self.rotary_limits.limit(length - 1, room)
        return room

    def _target_inputs(self, drafts: torch.Tensor) -> dict[str, Any]:
        """What the target is run with to score `[anchor, drafts]`."""
        length = drafts.shape[1]
        kwargs = copy.copy(self.kwargs)
        if length:
            kwargs = self.model._update_model_kwargs_for_generation(
                {}, kwargs, num_new_tokens=length
            )
        inputs = self.model.prepare_inputs_for_generation(
            torch.cat((self.input_ids, drafts), dim=1), next_sequence_length=length + 1, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = length + 1
        return inputs

    def _target_forward(self, proposal: Proposal) -> tuple[ModelOutput, Proposal]:
        """
        The target on `[anchor, drafts]`, `(R, L + 1)` positions, and the proposal it verified.

        Some targets (Phi-3) give up their cache at a certain length and read the whole text again.
        In such a round nothing is verified: it is the step that plain decoding makes.
        """
        inputs = self._target_inputs(proposal.tokens)
        if inputs.get("cache") is not self.cache and proposal.tokens.shape[1]:
            proposal = Proposal.empty(self.input_ids[:, -1])
            inputs = self._target_inputs(proposal.tokens)
        self.generator.taps.clear()
        outputs = self.forward(**inputs, return_dict=True)
        if outputs.cache is not self.cache:
            self.cache = outputs.cache
            self.cache.activate_past_recording()
        return outputs, proposal

    def _scores(self, raw: torch.Tensor, proposal: Proposal) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Raw and processed float32 logits `(R, L + 1, V)`; processors see the drafted path up to each
        position.
        """
        length = proposal.tokens.shape[1] + 1
        logits = raw[:, -length:].to(dtype=torch.float32, device=self.input_ids.device)
        if not self.logits_processor:
            return logits, logits
        path = torch.cat((self.input_ids, proposal.tokens), dim=1)
        start = self.input_ids.shape[1]
        # Nothing follows a stop token, so nobody is asked what may follow it.
        asked = length - proposal.ends_text
        scores = [
            self.logits_processor(path[:, : start + i], logits[:, i].clone()) for i in range(asked)
        ]
        scores += [logits[:, i] for i in range(asked, length)]
        return logits, torch.stack(scores, dim=1)

    def _verify(self, scores: torch.Tensor, proposal: Proposal) -> Verification:
        if not self.config.do_sample:
            return verify_greedy(scores, proposal.tokens, proposal.lengths)
        draft_probs = None if proposal.logits is None else probabilities(proposal.logits)
        return verify_sampling(
            probabilities(scores), proposal.tokens, draft_probs, proposal.lengths
        )

    def _read(
        self, verification: Verification, proposal: Proposal
    ) -> tuple[list[int], int, list[float] | None]:
        """Everything the host needs to know about a round, in one transfer."""
        device = verification.tokens.device
        parts = [
            verification.num_accepted[:, None],
            verification.is_valid[:, None],
            verification.tokens,
        ]
        if proposal.confidences is not None:
            parts.append(proposal.confidences.to(device))
        (num_accepted, is_valid, *rest), *_ = torch.cat(
            [part.double() for part in parts], dim=1
        ).tolist()
        if not is_valid:
            raise ValueError(_NO_TOKEN)
        width = verification.tokens.shape[1]
        confidences = rest[width:] if proposal.confidences is not None else None
        return [int(token) for token in rest[:width]], int(num_accepted), confidences

    def _emit(self, run: torch.Tensor, tokens: list[int]) -> tuple[int, bool]:
        """
        Commit a run up to where it stops, and stream it token by token. Returns the number kept.
        """
        num_kept, is_done = self.stopping.count(
            self.input_ids, run, tokens, self.outputs.scores_so_far()
        )
        self.input_ids = torch.cat((self.input_ids, run[:, :num_kept]), dim=1)
        self.recorder.statistics.new_tokens += num_kept
        if self.streamer is not None:
            for i, token in enumerate(tokens[:num_kept]):
                self.settled += i > 0
                self.streamer.put(torch.tensor([token]))
        return num_kept, is_done

    def _count(
        self,
        proposal: Proposal,
        tokens: list[int],
        num_accepted: int,
        confidences: list[float] | None,
    ) -> None:
        num_verified = proposal.tokens.shape[1]
        if len(tokens) <= num_accepted:
            # Stopped inside the accepted run: the drafts behind the stop were never in question.
            num_accepted = num_verified = len(tokens)
        self.recorder.add_round(
            RoundRecord(tokens, proposal.num_drafted, num_verified, num_accepted, confidences)
        )

    def _idle_forward(self) -> None:
        """Keep step with other processes that still generate."""
        self._target_forward(Proposal.empty(self.input_ids[:, -1]))
        self.cache.crop(-1)

    def _finish(self) -> DSparkDecoderOnlyOutput | torch.Tensor:
        if self.streamer is not None:
            self.streamer.end()
        self.recorder.statistics.total_seconds = time.perf_counter() - self.started
        statistics = self.recorder.finish()
        warn_if_useless(self.drafter, statistics)
        if not self.config.return_dict_in_generate:
            return self.input_ids
        return DSparkDecoderOnlyOutput(
            sequences=self.input_ids,
            scores=self.outputs.scores_so_far(),
            logits=None if self.outputs.logits is None else tuple(self.outputs.logits),
            attentions=None if self.outputs.attentions is None else tuple(self.outputs.attentions),
            hidden_states=None
            if self.outputs.hidden_states is None
            else tuple(self.outputs.hidden_states),
            cache=self.cache,
            statistics=statistics,
        )
