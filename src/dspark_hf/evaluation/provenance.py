"""What a figure depends on: machine, versions, and which weights were run."""

import hashlib
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedConfig

from ..configuration_drafter import DrafterConfig
from ..generation.settings import resolve_settings

_VALUES_PER_TENSOR = 4096
# What the host keeps in every config (labels, paths, versions), and what only training reads.
_BOOKKEEPING = frozenset(PreTrainedConfig().to_dict()) - {"model_type"} | {
    "initializer_range",
    "use_cache",
}
# Generation fields of a drafter that count in an evaluation.
_KEPT_FIELDS = (
    "num_assistant_tokens",
    "dspark_draft_sampling",
    "dspark_sts_temperatures",
    "dspark_confidence_offsets",
)


def machine_facts(target: Any) -> dict[str, Any]:
    """Device, threads, precision, attention and versions that a target runs with."""
    return {
        "device": str(target.device),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": target.config._attn_implementation,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def processor_name() -> str:
    """The accelerator, or the model of the CPU."""
    if torch.accelerator.is_available():
        return str(torch.accelerator.current_accelerator())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def code_revision() -> str | None:
    """Commit of this package's checkout, with `+` if it was changed since; `None` if installed."""

    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(
                ("git", "-C", str(Path(__file__).parent), *arguments),
                capture_output=True,
                text=True,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return result.stdout.strip()

    # An installed copy can lie inside a checkout of something else, which does not track it.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{git('rev-parse', 'HEAD')}{'+' if changed else ''}"


def fingerprint(model: Any, precision: torch.dtype | None = None) -> str:
    """
    Twelve hex digits that tell one set of weights from another: the hash of every tensor's name,
    shape, type and 4096 values spread over it. Training changes all tensors, so this is enough to
    notice. With a `precision` to round to, the same checkpoint loaded in others is the same.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {precision or tensor.dtype}".encode())
        if tensor.device.type != "meta":
            values = tensor.detach().flatten()
            values = values[:: max(len(values) // _VALUES_PER_TENSOR, 1)].cpu().contiguous()
            values = values.to(precision or values.dtype)
            digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def weights_of(model: Any) -> str:
    """
    [`fingerprint`] of a checkpoint, loaded in float32 or bfloat16. Loaded in float16 it holds other
    values, unless it was saved so.
    """
    return fingerprint(model, torch.bfloat16)


def text_digest(text: str) -> str:
    """Twelve hex digits that tell one prompt from another."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def drafter_facts(name: str, drafter: Any) -> dict[str, Any]:
    """
    What a report says about a drafter.

    `id` identifies what it answers with: its weights, what its config says of their use, and those
    of its generation fields that an evaluation does not overrule. The same folder after more
    training is another drafter; one that was only saved again, elsewhere or by another version, is
    not. `weights` is about the weights alone, see [`weights_of`], `drafting` about what is proposed
    with them.
    """
    config = drafter.config.to_dict()
    settings = {field: getattr(drafter.generation_config, field, None) for field in _KEPT_FIELDS}
    identity = json.dumps([_facts_of(config), settings], sort_keys=True, default=str)
    backbone = config.get("backbone_config") or {}
    return {
        "name": name,
        "id": text_digest(f"{fingerprint(drafter)} {identity}"),
        "weights": weights_of(drafter),
        "drafting": _drafting(drafter),
        "method": method_of(drafter.config),
        "block_size": drafter.config.block_size,
        "num_layers": backbone.get("num_hidden_layers"),
        "num_parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "confidence_head": bool(config.get("confidence_head")),
    }


def _drafting(drafter: Any) -> str:
    own = drafter.generation_config
    found = resolve_settings(GenerationConfig(), own, drafter.config.block_size)
    return f"{found.num_draft_tokens} tokens, {'greedy' if found.greedy_drafts else 'sampled'}"


def _facts_of(config: dict[str, Any]) -> dict[str, Any]:
    """A config without what says nothing of a drafter's answers, nested configs likewise."""
    return {
        key: _facts_of(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _BOOKKEEPING
    }


def method_of(config: DrafterConfig) -> str:
    """`"DSpark (vanilla)"` and its like by the Markov head, `"DFlash"` without, or `"Eagle3"`."""
    if config.model_type != "dspark":
        return config.model_type.removeprefix("dspark_").capitalize()
    head = getattr(config, "markov_head_type", None)
    return f"DSpark ({head})" if head else "DFlash"
