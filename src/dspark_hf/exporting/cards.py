"""Model cards whose every figure comes from the drafter's config or from a result file."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..configuration_drafter import DrafterConfig
from ..configuration_dspark import DSparkConfig
from .layouts import CHAIN_EAGLE3, DEEPSPEC, SPECULATORS
from .results import Result

# Placeholders for what nobody stated; a card never invents it.
UNKNOWN = "not recorded"

_CITATIONS = {
    "DSpark": (
        "Cheng et al., *DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive "
        "Generation*, arXiv 2607.05147."
    ),
    "Eagle3": (
        "Li et al., *EAGLE-3: Scaling up Inference Acceleration of Large Language Models via "
        "Training-Time Test*, arXiv 2503.01840."
    ),
}
_LIMITS = """\
- Greedy output in float32 equals plain decoding token for token; sampled output has the target's \
distribution. In bfloat16 and float16, forwards over one and over several tokens round \
differently, so a near-tie can fall the other way.
- A drafter learns one target in one mode. Quantising or fine-tuning the target, or another mode \
(thinking, another system prompt), lowers accepted length, not correctness."""


def kind_of(config: DrafterConfig) -> str:
    """The method of a drafter, as people name it: DSpark, DFlash or Eagle3."""
    if not isinstance(config, DSparkConfig):
        return "Eagle3"
    return "DSpark" if config.markov_head_type or config.confidence_head else "DFlash"


def serve_commands(config: DrafterConfig, layout: str, repository: str, target: str) -> list[str]:
    """
    Commands that serve the pair, for vLLM and SGLang; the engines that read the layout.

    Args:
        config ([`DrafterConfig`]): the drafter's facts.
        layout (`str`): `"deepspec"`, `"speculators"` or `"eagle3"`; other layouts have no engine.
        repository (`str`): Hub id or folder of the exported drafter.
        target (`str`): Hub id or folder of the target.
    """
    kind, gamma = kind_of(config), config.block_size
    speculative = json.dumps(
        {"method": kind.lower(), "model": repository, "num_speculative_tokens": gamma}
    )
    long_form = f"vllm serve {target} --speculative-config '{speculative}'"
    sglang = (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm "
        f"{kind.upper()} --speculative-draft-model-path {repository}"
    )
    if layout == SPECULATORS:
        return [f"vllm serve {repository}", long_form] if _runs_in_vllm(config) else []
    # vLLM and SGLang take a `dflash` draft for one of infill blocks, which DeepSpec's are not;
    # their Eagle3 classes have three taps, and DeepSpec's has five.
    if layout == DEEPSPEC and kind == "DSpark":
        return [long_form, sglang] if _runs_in_vllm(config) else [sglang]
    if layout == CHAIN_EAGLE3:
        # One chain of γ tokens and not a tree. vLLM counts the tap ids of this layout otherwise.
        chain = f"--speculative-num-steps {gamma} --speculative-eagle-topk 1"
        return [f"{sglang} {chain} --speculative-num-draft-tokens {gamma + 1}"]
    return []


def _runs_in_vllm(config: DrafterConfig) -> bool:
    """vLLM's classes know the vanilla Markov head alone, and headless drafters of infill blocks."""
    if not isinstance(config, DSparkConfig):
        return True
    if kind_of(config) == "DFlash":
        return not config.anchor_predicts
    return config.markov_head_type in (None, "vanilla")


def build_card(
    config: DrafterConfig,
    layout: str,
    repository: str,
    target: str | None,
    stored: Mapping[str, tuple[int, ...]],
    results: Sequence[Result] = (),
    license: str | None = None,
) -> ModelCard:
    """
    The card of an exported drafter.

    Args:
        config ([`DrafterConfig`]): the drafter's facts.
        layout (`str`): layout of the files.
        repository (`str`): Hub id or folder that the card's snippets load.
        target (`str`, *optional*): Hub id of the target.
        stored (mapping of `str` to shape): the tensors written.
        results (list, *optional*): see [`read_results`]; without one, the card gives no figures.
        license (`str`, *optional*): the drafter's licence.
    """
    data = ModelCardData(
        library_name="dspark_hf",
        pipeline_tag="text-generation",
        base_model=_hub_id(target),
        tags=["speculative-decoding", kind_of(config).lower()],
        license=license or "other",
        license_name=None if license else UNKNOWN,
    )
    name = repository.rstrip("/").rsplit("/", 1)[-1]
    sections = {
        "What it is": _what(config, layout, target),
        "Use it": _use(config, layout, repository, target),
        "Facts": _table(["", ""], _facts(config, layout, target, stored)),
        "Measured figures": _figures(results),
        "Training data and mode": _training(results),
        "Limits": _LIMITS,
        "Citation": _CITATIONS["Eagle3" if kind_of(config) == "Eagle3" else "DSpark"],
    }
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n# {name}\n\n{body}\n")


def _hub_id(name: str | None) -> str | None:
    """The name of a Hub repository; a folder of this machine is nobody else's base model."""
    if name is None or os.path.isdir(name):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _what(config: DrafterConfig, layout: str, target: str | None) -> str:
    kind = {"Eagle3": "An Eagle3"}.get(kind_of(config), f"A {kind_of(config)}")
    return (
        f"{kind} drafter for `{target or UNKNOWN}`. It proposes {config.block_size} tokens at a "
        "time, which the target verifies in one forward; the output is the target's own. The files "
        f"are in the {layout} layout."
    )


def _use(config: DrafterConfig, layout: str, repository: str, target: str | None) -> str:
    name = target or "the-target"
    drafter = "DSparkDrafter" if isinstance(config, DSparkConfig) else "Eagle3Drafter"
    python = f'''```python
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import {drafter}

tokenizer = AutoTokenizer.from_pretrained("{name}")
target = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto", device_map="auto")
drafter = {drafter}.from_pretrained("{repository}", dtype="auto", device_map="auto")
inputs = tokenizer("How many primes are there below 30?", return_tensors="pt").to(target.device)
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=128)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```'''
    commands = serve_commands(config, layout, repository, name)
    if not commands:
        return python
    lines = "\n".join(commands)
    return f"{python}\n\nAs a server:\n\n```bash\n{lines}\n```"


def _facts(
    config: DrafterConfig, layout: str, target: str | None, stored: Mapping[str, tuple[int, ...]]
) -> list[list[str]]:
    body = config.backbone_config
    matrices = [name for name in ("embed_tokens.weight", "lm_head.weight") if name in stored]
    elements = sum(math.prod(shape) for shape in stored.values())
    is_block = isinstance(config, DSparkConfig)
    return [
        ["target", f"`{target or UNKNOWN}`"],
        [
            "target depth and width",
            f"{config.num_target_layers or UNKNOWN} layers, hidden size "
            f"{config.target_hidden_size:,}, vocabulary {config.vocab_size:,}",
        ],
        ["draft vocabulary", f"{config.num_draftable_tokens:,}"],
        ["γ", str(config.block_size)],
        *(_block_facts(config, layout) if is_block else [["layout", layout]]),
        ["taps", f"{', '.join(map(str, config.target_layer_ids))} (layer outputs, from 0)"],
        [
            "draft layers",
            f"{body.num_hidden_layers} {body.model_type} layers, hidden size {body.hidden_size:,}",
        ],
        *(_head_facts(config) if is_block else []),
        ["stored matrices of the target", ", ".join(matrices) or "none: the target lends them"],
        ["tensors and elements", f"{len(stored)} tensors, {elements:,} elements"],
    ]


def _block_facts(config: DSparkConfig, layout: str) -> list[list[str]]:
    slot = "predicts the first draft token" if config.anchor_predicts else "is context only"
    return [
        ["layout", f"{layout}; the anchor slot {slot}; {config.block_width} block slots"],
        ["mask token id", str(config.mask_token_id)],
    ]


def _head_facts(config: DSparkConfig) -> list[list[str]]:
    markov = f"{config.markov_head_type}, rank {config.markov_rank}"
    reads = "hidden state and Markov embedding"
    confidence = reads if config.confidence_head_with_markov else "hidden state"
    return [
        ["Markov head", markov if config.markov_head_type else "none"],
        ["confidence head", f"reads {confidence}" if config.confidence_head else "none"],
    ]


def _figures(results: Sequence[Result]) -> str:
    if not results:
        return "None: this export was made without a result file."
    tables = [text for text in map(_figures_of, results) if text]
    if not tables:
        return "None: the result file of this export has no evaluation in it."
    note = "τ counts tokens committed per round, bonus token included; ratio of sums."
    return "\n\n".join([note, *tables])


def _figures_of(result: Result) -> str | None:
    """The table of an evaluation or a bench, and what it was measured with."""
    runs = result.get("results")
    if not isinstance(runs, list):
        runs = [result] if isinstance(result.get("sets"), list) else []
    if not runs:
        return None
    setting = result.get("settings") or result.get("machine") or {}
    rows = []
    for run in runs:
        total = run.get("macro") or run.get("total")
        temperature = run.get("temperature", result.get("temperature"))
        for figures in [*run["sets"], *([{**total, "name": "all"}] if total else [])]:
            speedup = figures.get("speedup", figures.get("drafter_speedup"))
            rows.append(
                [
                    f"{temperature:g}" if isinstance(temperature, int | float) else UNKNOWN,
                    str(figures.get("name", UNKNOWN)),
                    _number(figures.get("accepted_length")),
                    _number(speedup),
                ]
            )
    facts = ", ".join(f"{key} {value}" for key, value in sorted(setting.items()))
    header = ["temperature", "set", "accepted length τ", "speed-up over plain"]
    return f"{_table(header, rows)}\n\nMeasured with: {facts or UNKNOWN}."


def _training(results: Sequence[Result]) -> str:
    for result in results:
        if isinstance(training := result.get("training"), Mapping):
            return _table(["", ""], [[str(key), str(value)] for key, value in training.items()])
    return "Not recorded in a result file of this export (data, mode, thinking or not)."


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else "–"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
