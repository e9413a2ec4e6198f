"""Measuring a `ThroughputProfile` on a real target, and keeping it."""

import hashlib
import json
import logging
import statistics as stats
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from huggingface_hub import constants
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from ..evaluation.provenance import processor_name
from ..generation.checks import check_pairing
from ..generation.compiling import is_compiled
from ..generation.v4_cache import rewindable
from .throughput_profile import ThroughputProfile

if TYPE_CHECKING:
    from ..modeling_drafter import DrafterModel

logger = logging.getLogger(__name__)

CONTEXT_LENGTH = 256
# What `"auto"` measures: enough for a verification of one row and a load of a few dozen tokens.
AUTO_MAX_TOKENS, AUTO_REPEATS = 64, 5
_WARM_UP = 2

_measured: dict[str, ThroughputProfile] = {}
# Two measurements at once would measure each other.
_measuring = threading.Lock()


def default_token_counts(max_tokens: int, rows: int = 1) -> list[int]:
    """
    B to measure: every number up to 16, then six to a doubling, as multiples of `rows`; below
    `rows`, powers of two.
    """
    if max_tokens < rows:
        raise ValueError(f"A ceiling of {max_tokens} tokens holds no step of {rows} rows.")
    counts = {2**i for i in range(rows.bit_length()) if 2**i < rows}
    widths = [*range(1, 17), *(round(16 * 2 ** (i / 6)) for i in range(1, 80))]
    counts.update(rows * width for width in widths if rows * width <= max_tokens)
    return sorted(counts | {1, max_tokens // rows * rows})


@torch.no_grad()
def measure_throughput(
    target: PreTrainedModel,
    drafter: "DrafterModel | None" = None,
    *,
    token_counts: list[int] | None = None,
    context_length: int = CONTEXT_LENGTH,
    rows: int = 1,
    repeats: int = 7,
    clock: Callable[[], float] = time.perf_counter,
    on_forward: Callable[[], None] | None = None,
) -> ThroughputProfile:
    """
    Time forwards of the target on B new tokens behind a context.

    All B take turns in every repetition, in alternating direction, so that drift of the machine
    cancels; the median over the repetitions counts. Two repetitions warm up and are not counted. No
    random number generator of the caller is touched.

    Args:
        target (`PreTrainedModel`): the model, where it will run.
        drafter ([`DrafterModel`], *optional*):
            also time one block of it, context update included: `draft_seconds`.
        token_counts (`list[int]`, *optional*):
            B to measure, 1 among them; `default_token_counts(64, rows)` by default.
        context_length (`int`, *optional*, defaults to 256): positions in each row's cache.
        rows (`int`, *optional*, defaults to 1):
            B tokens are spread over `min(rows, B)` rows; B must divide evenly.
        repeats (`int`, *optional*, defaults to 7): repetitions that count.
        clock (callable, *optional*, defaults to `time.perf_counter`):
            Seconds. `time.process_time` counts this process's work only: right on one thread of a
            CPU that others use as well, wrong with several threads or an accelerator.
        on_forward (callable, *optional*): called after every forward, for progress bars.

    Raises:
        `ValueError`: counts that cannot be measured, or more positions than the target has.
    """
    if drafter is not None:
        check_pairing(target, drafter)
    for name, value in (("context_length", context_length), ("rows", rows), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, found {value}.")
    counts = default_token_counts(max(64, rows), rows) if token_counts is None else token_counts
    if min(counts, default=0) != 1 or any(c > rows and c % rows for c in counts):
        raise ValueError(
            f"token_counts must begin with 1 and be multiples of rows={rows} above it, found "
            f"{counts}."
        )
    text = target.config.get_text_config(decoder=True)
    _check_positions(text, context_length + max(counts) // rows)
    vocabulary = text.vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (rows, max(context_length, *counts)), generator=generator).to(
        target.device
    )
    runs: dict[int, Callable[[], None]] = {}
    caches: dict[int, DynamicCache] = {}
    with ExitStack() as stack:
        for count in sorted(set(counts)):
            num_rows = min(rows, count)
            if num_rows not in caches:
                cache = DynamicCache(config=text)
                stack.enter_context(rewindable(cache))
                target(ids[:num_rows, :context_length], cache=cache)
                cache.activate_past_recording()
                caches[num_rows] = cache
            runs[count] = _target_run(target, ids[:num_rows, : count // num_rows], caches[num_rows])
        if drafter is not None:
            runs[0] = _draft_run(target, drafter, ids[:, 0], context_length, generator)
        seconds = _time_interleaved(runs, repeats, target.device, clock, on_forward)
    drafting = seconds.pop(0, 0.0)
    return ThroughputProfile(
        tokens=tuple(seconds),
        steps_per_second=tuple(1 / value for value in seconds.values()),
        draft_seconds=drafting,
        context_length=context_length,
        rows=rows,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        **profile_facts(target, drafter),
    )


def profile_facts(
    target: PreTrainedModel, drafter: "DrafterModel | None" = None
) -> dict[str, str | None]:
    """
    What throughput depends on and two profiles are compared by. Sizes, not names: a fine-tuned copy
    takes the same time. A quantisation stands as its method and a digest of its settings: bits,
    number format and layers left out all change what a step costs.
    """
    text = target.config.get_text_config(decoder=True)
    quantised = getattr(target.config, "quantization_config", None)
    described = f"{type(target).__name__}, {target.num_parameters():,} parameters"
    if quantised is not None:
        settings = dict(quantised if isinstance(quantised, dict) else quantised.to_dict())
        method = settings.pop("quant_method")
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
        described += f", {getattr(method, 'value', method)} {digest.hexdigest()[:8]}"
    if is_compiled(target):
        described += ", compiled"
    return {
        "target": described,
        "device": _device_description(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": text._attn_implementation,
        "drafter": None
        if drafter is None
        else (
            f"{type(drafter).__name__}, γ = {drafter.config.block_size}, "
            f"{drafter.num_parameters():,} parameters, {str(drafter.dtype).removeprefix('torch.')}"
        ),
    }


def automatic_profile(target: PreTrainedModel, drafter: "DrafterModel") -> ThroughputProfile:
    """
    The profile of `dspark_throughput_profile="auto"`: measured once for what it depends on and kept
    in the cache folder of the Hub library.
    """
    facts = profile_facts(target, drafter)
    depends_on = {
        **facts,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "measurement": [AUTO_MAX_TOKENS, AUTO_REPEATS, CONTEXT_LENGTH],
    }
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
    with _measuring:
        if digest not in _measured:
            _measured[digest] = _kept_or_measured(target, drafter, digest, facts)
        return _measured[digest]


def _kept_or_measured(
    target: PreTrainedModel, drafter: "DrafterModel", digest: str, facts: dict[str, str | None]
) -> ThroughputProfile:
    path = Path(constants.HF_HOME) / "dspark-hf" / "profiles" / f"{digest}.json"
    profile = _read_kept(path, facts)
    if profile is None:
        logger.warning(
            "Measuring the throughput of this target once, for dspark_throughput_profile='auto'; "
            "it is kept in %s.",
            path,
        )
        positions = _most_positions(target.config.get_text_config(decoder=True))
        profile = measure_throughput(
            target,
            drafter,
            token_counts=default_token_counts(min(AUTO_MAX_TOKENS, positions // 2)),
            context_length=min(CONTEXT_LENGTH, positions // 2),
            repeats=AUTO_REPEATS,
        )
        _keep(profile, path)
    return profile


def _device_description(device: torch.device) -> str:
    """The accelerator by name, or the CPU and its threads."""
    if device.type == "cpu":
        return f"cpu, {processor_name()}, {torch.get_num_threads()} thread(s)"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else f"{device.type}, {name(device)}"


def _most_positions(text_config: PreTrainedConfig) -> int:
    return getattr(text_config, "max_position_embeddings", None) or sys.maxsize


def _check_positions(text_config: PreTrainedConfig, needed: int) -> None:
    if needed > _most_positions(text_config):
        raise ValueError(
            f"Measuring needs {needed} positions (context and new tokens of a row), and this "
            f"target has {_most_positions(text_config)}. Use a shorter context_length, fewer "
            "tokens or more rows."
        )


def _read_kept(path: Path, facts: dict[str, str | None]) -> ThroughputProfile | None:
    try:
        profile = ThroughputProfile.load(path)
        profile.check(facts)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        logger.warning(
            "A kept throughput profile cannot be used and is measured again: %s (%s).", path, error
        )
        return None
    return profile


def _keep(profile: ThroughputProfile, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(path)
    except OSError as error:
        logger.warning("The throughput profile could not be kept (%s).", error)


def _target_run(
    target: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache
) -> Callable[[], None]:
    def run() -> None:
        target(ids, cache=cache)
        cache.crop(-ids.shape[1])

    return run


def _draft_run(
    target: PreTrainedModel,
    drafter: "DrafterModel",
    anchor_ids: torch.Tensor,
    context_length: int,
    generator: torch.Generator,
) -> Callable[[], None]:
    rows = anchor_ids.shape[0]
    width = len(drafter.config.target_layer_ids) * drafter.config.target_hidden_size
    features = torch.randn(rows, context_length, width, generator=generator)
    features = features.to(target.device, target.dtype)
    context = drafter.new_context(rows, target=target)

    def extend(length: int) -> None:
        # An autoregressive drafter reads the tokens that follow each position as well.
        paired = {"token_ids": anchor_ids[:, None].expand(rows, length)}
        drafter.extend(
            context, features[:, :length], **(paired if drafter.is_autoregressive else {})
        )

    def run() -> None:
        # A round hands the drafter the features of what it committed: two tokens here.
        extend(2)
        drafter.draft(context, anchor_ids)

    extend(context_length)

    return run


def _time_interleaved(
    runs: dict[int, Callable[[], None]],
    repeats: int,
    device: torch.device,
    clock: Callable[[], float],
    on_forward: Callable[[], None] | None,
) -> dict[int, float]:
    """Median seconds of each run, in the order of its key."""
    seconds: dict[int, list[float]] = {key: [] for key in runs}
    for repeat in range(-_WARM_UP, repeats):
        for key in sorted(runs, reverse=bool(repeat % 2)):
            started = clock()
            runs[key]()
            _wait(device)
            if repeat >= 0:
                seconds[key].append(clock() - started)
            if on_forward is not None:
                on_forward()
    return {key: stats.median(values) for key, values in sorted(seconds.items())}


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
