"""Model cards whose every figure comes from the drafter's config or from a result file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..configuration_dspark import DSparkConfig
from .layouts import DEEPSPEC, SPECULATORS

# Placeholders for what nobody stated; a card never invents it.
UNKNOWN = "not recorded"

_CITATION = (
    "Cheng et al., *DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive "
    "Generation*, arXiv 2607.05147."
)
_LIMITS = """\
- Greedy output in float32 equals plain decoding token for token; sampled output has the target's \
distribution. In bfloat16 and float16, forwards over one and over several tokens round \
differently, so a near-tie can fall the other way.
- A drafter learns one target in one mode. Quantising or fine-tuning the target, or another mode \
(thinking, another system prompt), lowers accepted length, not correctness."""


def read_result(path: str | os.PathLike) -> dict[str, Any]:
    """
    The JSON result of `dspark-hf bench`, `dspark-hf evaluate` or a training run.

    Raises:
        `ValueError`: not a JSON object.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}).") from error
    if not isinstance(result, dict):
        raise ValueError(f"{path} holds a JSON {type(result).__name__}, expected an object.")
    return result


def serve_commands(config: DSparkConfig, layout: str, repository: str, target: str) -> list[str]:
    """
    Commands that serve the pair, for vLLM and SGLang; the engines that read the layout.

    Args:
        config ([`DSparkConfig`]): the drafter's facts.
        layout (`str`): `"deepspec"` or `"speculators"`; other layouts have no engine.
        repository (`str`): Hub id or folder of the exported drafter.
        target (`str`): Hub id or folder of the target.
    """
    is_dspark = bool(config.markov_head_type or config.confidence_head)
    method = "dspark" if is_dspark else "dflash"
    speculative = json.dumps(
        {"method": method, "model": repository, "num_speculative_tokens": config.block_size}
    )
    long_form = f"vllm serve {target} --speculative-config '{speculative}'"
    if layout == SPECULATORS:
        return [f"vllm serve {repository}", long_form]
    if layout == DEEPSPEC:
        # vLLM and SGLang take a `dflash` draft for one of infill blocks, which DeepSpec's are not.
        if not is_dspark:
            return []
        sglang = (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DSPARK "
            f"--speculative-draft-model-path {repository}"
        )
        return [long_form, sglang]
    return []


def build_card(
    config: DSparkConfig,
    layout: str,
    repository: str,
    target: str | None,
    stored: Mapping[str, tuple[int, ...]],
    result: Mapping[str, Any] | None = None,
    license: str | None = None,
) -> ModelCard:
    """
    The card of an exported drafter.

    Args:
        config ([`DSparkConfig`]): the drafter's facts.
        layout (`str`): layout of the files.
        repository (`str`): Hub id or folder that the card's snippets load.
        target (`str`, *optional*): Hub id of the target.
        stored (mapping of `str` to shape): the tensors written.
        result (mapping, *optional*): see [`read_result`]; without one, the card gives no figures.
        license (`str`, *optional*): the drafter's licence.
    """
    data = ModelCardData(
        library_name="dspark_hf",
        pipeline_tag="text-generation",
        base_model=_hub_id(target),
        tags=["speculative-decoding", "dspark" if config.markov_head_type else "dflash"],
        license=license or "other",
        license_name=None if license else UNKNOWN,
    )
    name = repository.rstrip("/").rsplit("/", 1)[-1]
    sections = {
        "What it is": _what(config, layout, target),
        "Use it": _use(config, layout, repository, target),
        "Facts": _table(["", ""], _facts(config, layout, target, stored)),
        "Measured figures": _figures(result),
        "Training data and mode": _training(result),
        "Limits": _LIMITS,
        "Citation": _CITATION,
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


def _what(config: DSparkConfig, layout: str, target: str | None) -> str:
    kind = "DSpark" if config.markov_head_type or config.confidence_head else "DFlash"
    return (
        f"A {kind} drafter for `{target or UNKNOWN}`. It proposes {config.block_size} tokens at a "
        "time, which the target verifies in one forward; the output is the target's own. The files "
        f"are in the {layout} layout."
    )


def _use(config: DSparkConfig, layout: str, repository: str, target: str | None) -> str:
    name = target or "the-target"
    python = f'''```python
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter

tokenizer = AutoTokenizer.from_pretrained("{name}")
target = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto", device_map="auto")
drafter = DSparkDrafter.from_pretrained("{repository}", dtype="auto", device_map="auto")
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
    config: DSparkConfig, layout: str, target: str | None, stored: Mapping[str, tuple[int, ...]]
) -> list[list[str]]:
    body = config.backbone_config
    markov = f"{config.markov_head_type}, rank {config.markov_rank}"
    reads = "hidden state and Markov embedding"
    confidence = reads if config.confidence_head_with_markov else "hidden state"
    slot = "predicts the first draft token" if config.anchor_predicts else "is context only"
    matrices = [name for name in ("embed_tokens.weight", "lm_head.weight") if name in stored]
    elements = 0
    for shape in stored.values():
        size = 1
        for length in shape:
            size *= length
        elements += size
    return [
        ["target", f"`{target or UNKNOWN}`"],
        [
            "target depth and width",
            f"{config.num_target_layers or UNKNOWN} layers, hidden size "
            f"{config.target_hidden_size:,}, vocabulary {config.vocab_size:,}",
        ],
        ["draft vocabulary", f"{config.num_draftable_tokens:,}"],
        ["γ", str(config.block_size)],
        ["layout", f"{layout}; the anchor slot {slot}; {config.block_width} block slots"],
        ["taps", f"{', '.join(map(str, config.target_layer_ids))} (layer outputs, from 0)"],
        ["mask token id", str(config.mask_token_id)],
        [
            "draft layers",
            f"{body.num_hidden_layers} {body.model_type} layers, hidden size {body.hidden_size:,}",
        ],
        ["Markov head", markov if config.markov_head_type else "none"],
        ["confidence head", f"reads {confidence}" if config.confidence_head else "none"],
        ["stored matrices of the target", ", ".join(matrices) or "none: the target lends them"],
        ["tensors and elements", f"{len(stored)} tensors, {elements:,} elements"],
    ]


def _figures(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "None: this export was made without a result file."
    runs = result.get("results")
    if not isinstance(runs, list):
        runs = [result] if isinstance(result.get("sets"), list) else []
    if not runs:
        return "None: the result file of this export has no evaluation in it."
    setting = result.get("settings") or result.get("machine") or {}
    rows = []
    for run in runs:
        total = run.get("macro") or run.get("total")
        temperature = run.get("temperature", result.get("temperature"))
        for figures in [*run["sets"], *([{**total, "name": "all"}] if total else [])]:
            speedup = figures.get("speedup", figures.get("drafter_speedup"))
            rows.append(
                [
                    str(run.get("drafter", "this drafter")),
                    f"{temperature:g}" if isinstance(temperature, int | float) else UNKNOWN,
                    str(figures.get("name", UNKNOWN)),
                    _number(figures.get("accepted_length")),
                    _number(speedup),
                ]
            )
    facts = ", ".join(f"{key} {value}" for key, value in sorted(setting.items()))
    header = ["drafter", "temperature", "set", "accepted length τ", "speed-up over plain"]
    note = "τ counts tokens committed per round, bonus token included; ratio of sums."
    return f"{note}\n\n{_table(header, rows)}\n\nMeasured with: {facts or UNKNOWN}."


def _training(result: Mapping[str, Any] | None) -> str:
    training = (result or {}).get("training")
    if not isinstance(training, Mapping):
        return "Not recorded in the result file of this export (data, mode, thinking or not)."
    return _table(["", ""], [[str(key), str(value)] for key, value in training.items()])


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else "–"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
