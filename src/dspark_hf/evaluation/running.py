"""
The evaluation loop: plain decoding and every drafter take turns on every prompt.

Protocol of the paper (section 4.1 and the reference evaluator): one sequence at a time, first user
turn, chat template without a system prompt of ours, thinking off, temperature only (no top-k,
top-p or penalties, whatever the target's own generation config says), seed + prompt index before
every call, whole blocks verified.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from .. import __version__
from ..generation.checks import check_pairing
from ..generation.statistics import RoundRecord, collect_statistics
from ..scheduling.settings import THRESHOLD, everything_verified
from .metrics import summarise
from .prompts import PromptSet, encode_prompt
from .provenance import drafter_facts, fingerprint, machine_facts, text_digest
from .records import PLAIN, Record, RecordFolder, RecordKey

PAPER_SEED = 980406
PAPER_NEW_TOKENS = 2048
_WARM_UP_TOKENS = 8

# What the host fills in by itself.
_UNCUT: dict[str, Any] = {"top_k": 0, "top_p": 1.0}
# Of the target's generation config: what ends a text, and how the target runs.
_KEPT_OF_THE_TARGET = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "cache_implementation",
    "cache_config",
    "disable_compile",
    "prefill_chunk_size",
)


@dataclass(frozen=True)
class EvaluationSettings:
    """
    How prompts are answered.

    Args:
        temperatures (`tuple[float, ...]`, *optional*, defaults to the paper's 1): 0 is greedy.
        max_new_tokens (`int`, *optional*, defaults to the paper's 2048): at least 2.
        seed (`int`, *optional*, defaults to the reference evaluator's):
            the prompt's index within its set is added.
        confidence_threshold (`float`, *optional*, defaults to 0):
            cut blocks at the first confidence below it; 0 verifies whole blocks.
        with_plain (`bool`, *optional*, defaults to `True`):
            whether plain decoding runs as well, for the speed-up.
    """

    temperatures: tuple[float, ...] = (1.0,)
    max_new_tokens: int = PAPER_NEW_TOKENS
    seed: int = PAPER_SEED
    confidence_threshold: float = 0.0
    with_plain: bool = True

    def __post_init__(self) -> None:
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(
                f"temperatures are {self.temperatures}; give at least one, each 0 (greedy) or more."
            )
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures are {self.temperatures}; give each one once.")
        if self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens}; the first token comes from the prefill, "
                "so there is nothing to draft below 2."
            )
        if not 0 <= self.confidence_threshold <= 1:
            raise ValueError(
                f"confidence_threshold is {self.confidence_threshold}; it is a probability between "
                "0 and 1 (0 is off)."
            )

    def generate_options(self, temperature: float) -> dict[str, Any]:
        """Keywords of `generate`, the same for plain decoding and for drafters."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens}
        if temperature == 0:
            return {**options, "do_sample": False}
        return {**options, "do_sample": True, "temperature": temperature, **_UNCUT}

    def drafter_options(self, drafter: Any) -> dict[str, Any]:
        """What comes on top with a drafter; its own verification policy is overruled."""
        options = {"assistant_model": drafter, **everything_verified()}
        if self.confidence_threshold:
            options["dspark_verification"] = THRESHOLD
            options["dspark_confidence_threshold"] = self.confidence_threshold
        return options


def evaluate(
    target: Any,
    tokenizer: Any,
    drafters: Mapping[str, Any],
    prompt_sets: Sequence[PromptSet],
    output: Path,
    settings: EvaluationSettings,
    target_name: str,
    on_step: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """
    Answer every prompt with every drafter at every temperature, and sum up.

    What `output` already holds of it is not run again; each new answer is on the disk before the
    next one starts.

    Args:
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizer`): the model and its tokenizer.
        drafters (`Mapping[str, PreTrainedModel]`): by the name they have in reports.
        prompt_sets (`Sequence[PromptSet]`): what to answer.
        output (`Path`): folder for records and settings; see [`RecordFolder`].
        settings ([`EvaluationSettings`]): how to answer.
        target_name (`str`): for the reports.
        on_step (callable, *optional*): called with (done, total, name of the set) after each call.

    Returns:
        The results of [`summarise`], ready for JSON.

    Raises:
        `ValueError`: nothing to do, a drafter of another target, a prompt that is empty or does not
            fit into the target's context, or an `output` with results of something else. Nothing
            has been computed then.
    """
    facts = _check_drafters(target, drafters)
    _check_sets(prompt_sets)
    inputs = _encode(target, tokenizer, prompt_sets, settings.max_new_tokens)
    fixed = _fixed_settings(target, target_name, settings)
    folder = RecordFolder(output, fixed)
    runners = {fact["id"]: drafters[fact["name"]] for fact in facts}
    modes = [*([PLAIN] if settings.with_plain else []), *runners]
    plan = list(_plan(prompt_sets, settings.temperatures, modes))
    digests = {s.name: [text_digest(prompt) for prompt in s.prompts] for s in prompt_sets}
    _check_texts(folder, plan, digests)
    missing = [key for key in plan if key not in folder.records]
    with _temperature_alone(target):
        for mode in modes if missing else ():  # Every path is warm before anything is timed.
            _warm_up(target, tokenizer, runners.get(mode), settings)
        for done, key in enumerate(missing, start=len(plan) - len(missing)):
            mode, temperature, name, index = key
            if on_step is not None:
                on_step(done, len(plan), name)
            answer = _answer(
                target, inputs[name][index], runners.get(mode), settings, temperature, index
            )
            folder.append(Record(*key, prompt_digest=digests[name][index], **answer))
    if on_step is not None:
        on_step(len(plan), len(plan), "")
    records = [folder.records[key] for key in plan]
    return summarise(records, facts, {**fixed, "temperatures": list(settings.temperatures)})


def timed_generate(
    target: Any, inputs: Mapping[str, torch.Tensor], options: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """Output of `generate` and the seconds it took, to the end of the work on the device."""
    started = time.perf_counter()
    output = target.generate(**inputs, **options)
    if output.device.type != "cpu":
        torch.accelerator.synchronize()
    return output, time.perf_counter() - started


def _plan(
    prompt_sets: Sequence[PromptSet], temperatures: Sequence[float], modes: Sequence[str]
) -> Iterator[RecordKey]:
    """Every call to be made. The modes take turns to be first: drift of the machine cancels."""
    for prompt_set in prompt_sets:
        for index in range(len(prompt_set.prompts)):
            for temperature in temperatures:
                for turn in range(len(modes)):
                    mode = modes[(index + turn) % len(modes)]
                    yield (mode, temperature, prompt_set.name, index)


def _answer(
    target: Any,
    inputs: Mapping[str, torch.Tensor],
    drafter: Any,
    settings: EvaluationSettings,
    temperature: float,
    index: int,
) -> dict[str, Any]:
    """One call: the measured fields of a [`Record`]. `drafter` is `None` for plain decoding."""
    options = settings.generate_options(temperature)
    if drafter is not None:
        options |= settings.drafter_options(drafter)
    rounds: list[RoundRecord] = []
    with _seeded(target, settings.seed + index), collect_statistics(rounds.append) as statistics:
        output, seconds = timed_generate(target, inputs, options)
    prompt_tokens = inputs["input_ids"].shape[1]
    has_confidences = any(record.confidences is not None for record in rounds)
    return {
        "prompt_tokens": prompt_tokens,
        "tokens": output[0, prompt_tokens:].tolist(),
        "seconds": seconds,
        "draft_seconds": statistics.draft_seconds,
        "verify_seconds": statistics.verify_seconds,
        "rounds": [
            [len(record.tokens), record.num_drafted, record.num_verified, record.num_accepted]
            for record in rounds
        ],
        # Six digits: a tenth of what half a million rounds could resolve.
        "confidences": [
            [round(c, 6) for c in (record.confidences or [])[: record.num_verified]]
            for record in rounds
        ]
        if has_confidences
        else None,
    }


def _warm_up(target: Any, tokenizer: Any, drafter: Any, settings: EvaluationSettings) -> None:
    inputs = encode_prompt(tokenizer, "Hello", target.device)
    options = {**settings.generate_options(0), "max_new_tokens": _WARM_UP_TOKENS}
    if drafter is not None:
        options |= settings.drafter_options(drafter)
    timed_generate(target, inputs, options)


@contextmanager
def _temperature_alone(target: Any) -> Iterator[None]:
    """
    Without what else the target's own generation config does to a distribution. The host fills
    what a call leaves out from there, so it stands aside; how the target runs is kept.
    """
    own = target.generation_config
    kept = {name: getattr(own, name, None) for name in _KEPT_OF_THE_TARGET}
    target.generation_config = GenerationConfig(**kept)
    try:
        yield
    finally:
        target.generation_config = own


@contextmanager
def _seeded(target: Any, seed: int) -> Iterator[None]:
    """Seed every draw inside, and leave the caller's random state as it was."""
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def _fixed_settings(target: Any, target_name: str, settings: EvaluationSettings) -> dict[str, Any]:
    """What the records of one folder have in common; other settings need another folder."""
    return {
        "target": target_name,
        "target_fingerprint": fingerprint(target),
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "confidence_threshold": settings.confidence_threshold,
        "thinking": False,
        "dspark_hf": __version__,
        **machine_facts(target),
    }


def _check_drafters(target: Any, drafters: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not drafters:
        raise ValueError("There is no drafter to evaluate; give at least one.")
    facts = []
    for name, drafter in drafters.items():
        try:
            check_pairing(target, drafter)
        except ValueError as error:
            raise ValueError(f"Drafter {name!r}: {error}") from error
        facts.append(drafter_facts(name, drafter))
    names: dict[str, str] = {}
    for fact in facts:
        if fact["id"] in names:
            raise ValueError(
                f"Drafters {names[fact['id']]!r} and {fact['name']!r} are the same: equal weights "
                "and equal configs. Give each one once."
            )
        names[fact["id"]] = fact["name"]
    return facts


def _check_sets(prompt_sets: Sequence[PromptSet]) -> None:
    names = [prompt_set.name for prompt_set in prompt_sets]
    empty = [prompt_set.name for prompt_set in prompt_sets if not prompt_set.prompts]
    if not names or empty or len(set(names)) < len(names):
        raise ValueError(
            f"Prompt sets are {names}, without prompts: {empty}. Give at least one set, each with "
            "a name of its own and some prompts."
        )


def _encode(
    target: Any, tokenizer: Any, prompt_sets: Sequence[PromptSet], max_new_tokens: int
) -> dict[str, list[dict[str, torch.Tensor]]]:
    """All prompts, before the first one is run: one that cannot be answered shows at once."""
    limit = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    inputs: dict[str, list[dict[str, torch.Tensor]]] = {}
    for prompt_set in prompt_sets:
        inputs[prompt_set.name] = []
        for index, prompt in enumerate(prompt_set.prompts):
            encoded = encode_prompt(tokenizer, prompt, target.device)
            length = encoded["input_ids"].shape[1]
            if limit is not None and length + max_new_tokens > limit:
                raise ValueError(
                    f"Set {prompt_set.name!r}, prompt {index + 1}: {length} prompt tokens and "
                    f"{max_new_tokens} new ones do not fit into the target's context of {limit}. "
                    "Lower max_new_tokens, or leave the prompt out."
                )
            inputs[prompt_set.name].append(encoded)
    return inputs


def _check_texts(
    folder: RecordFolder, plan: Sequence[RecordKey], digests: Mapping[str, Sequence[str]]
) -> None:
    for key in plan:
        _, _, name, index = key
        if key in folder.records and folder.records[key].prompt_digest != digests[name][index]:
            raise ValueError(
                f"{folder.folder} holds an answer to another text as prompt {index + 1} of set "
                f"{name!r}. The set has changed; use another output folder."
            )
