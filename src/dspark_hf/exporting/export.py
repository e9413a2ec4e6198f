"""`export_drafter`: files, card and upload in one go."""

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, save_torch_state_dict
from transformers import PreTrainedModel

from ..generation.checks import check_pairing
from ..loading.saving import save_atomically
from ..modeling_drafter import DrafterModel
from ..modeling_eagle3 import Eagle3Drafter
from .cards import build_card, kind_of
from .eagle3 import chain_config, deepspec_eagle3_config, speculators_eagle3_config
from .layouts import (
    CHAIN_EAGLE3,
    DEEPSPEC,
    LAYOUTS,
    SPECULATORS,
    Target,
    deepspec_config,
    layout_tensors,
    speculators_config,
)
from .results import Result, read_results

OWN = "dspark"
_BLOCK_CONFIGS = {DEEPSPEC: deepspec_config, SPECULATORS: speculators_config}
_EAGLE3_CONFIGS = {
    DEEPSPEC: deepspec_eagle3_config,
    SPECULATORS: speculators_eagle3_config,
    CHAIN_EAGLE3: chain_config,
}


def export_drafter(
    drafter: DrafterModel,
    directory: str | os.PathLike,
    layout: str,
    *,
    target: PreTrainedModel | None = None,
    target_name: str | None = None,
    results: Sequence[str | os.PathLike | Result] = (),
    license: str | None = None,
    repo_id: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """
    Write a drafter in a layout that other engines serve, with a model card, and upload it.

    Files appear in `directory` only once all of them are complete.

    Args:
        drafter ([`DSparkDrafter`] or [`Eagle3Drafter`]): the drafter.
        directory (`str` or `os.PathLike`): folder for the files.
        layout (`str`):
            `"deepspec"` (vLLM, SGLang), `"speculators"` (vLLM), for Eagle3 drafters `"eagle3"` (the
            original EAGLE-3 layout: SGLang), or `"dspark"` (this library's own).
        target (`PreTrainedModel`, *optional*):
            The target, if the embedding and head that the drafter shares with it are to be written
            as copies.
        target_name (`str`, *optional*):
            Where engines find the target. Taken from the target or from the drafter's config if it
            is not given; the speculators layout needs it.
        results (list of path or `dict`, *optional*):
            Results of `dspark-hf evaluate`, of `bench` and of the training run, for the card.
        license (`str`, *optional*): licence of the drafter, for the card.
        repo_id (`str`, *optional*): Hub repository to upload to; it is created if needed.
        private (`bool`, *optional*), token (*optional*): as in the host's `push_to_hub`.
        max_shard_size (`str`, *optional*, defaults to `"5GB"`): size of a weight file.

    Returns:
        The folder.

    Raises:
        `ValueError`: unknown layout, another target, results of other weights, or a drafter that
            the layout cannot express.
        `OSError`: writing or uploading failed.
    """
    if layout not in (*LAYOUTS, OWN):
        raise ValueError(
            f"layout is {layout!r}; a drafter can be written as "
            f"{', '.join(map(repr, (*LAYOUTS, OWN)))}."
        )
    if not isinstance(drafter, DrafterModel):
        raise ValueError(
            f"{type(drafter).__name__} is not a drafter; a DSparkDrafter or an Eagle3Drafter can "
            "be exported."
        )
    if layout == CHAIN_EAGLE3 and not isinstance(drafter, Eagle3Drafter):
        raise ValueError(
            f"The {CHAIN_EAGLE3} layout is for Eagle3 drafters; a {type(drafter).__name__} can be "
            f"written as {DEEPSPEC!r}, {SPECULATORS!r} or {OWN!r}."
        )
    if target is not None:
        check_pairing(target, drafter)
    facts = read_results(results, drafter)
    lender = _target(target, target_name)
    folder = Path(directory)
    with save_atomically(folder) as temporary:
        if layout == OWN:
            drafter.save_pretrained(temporary, max_shard_size=max_shard_size)
            stored = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
        else:
            stored = _write(drafter, temporary, layout, lender, max_shard_size)
        card = build_card(
            drafter.config, layout, repo_id or folder.name, lender.name, stored, facts, license
        )
        (temporary / "README.md").write_text(str(card), encoding="utf-8")
    if repo_id is not None:
        _upload(folder, repo_id, private, token)
    return folder


def _target(model: PreTrainedModel | None, name: str | None) -> Target:
    if model is None:
        return Target(name=name)
    architectures = model.config.architectures or [type(model).__name__]
    return Target(name or model.config.name_or_path or None, model, tuple(architectures))


def _write(
    drafter: DrafterModel, folder: Path, layout: str, target: Target, max_shard_size: str
) -> dict[str, tuple[int, ...]]:
    """config.json and weights; returns the shapes of what was written."""
    configs: Any = _EAGLE3_CONFIGS if isinstance(drafter, Eagle3Drafter) else _BLOCK_CONFIGS
    raw = configs[layout](drafter, target)
    tensors = layout_tensors(drafter, layout, target)
    text = json.dumps(raw, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size, metadata={"format": "pt"})
    # Calibration and thresholds travel with the drafter; a file without any would say nothing.
    defaults = copy.deepcopy(drafter.generation_config)
    if layout == SPECULATORS and kind_of(drafter.config) == "DFlash":
        # Those of this layout draft by argmax unless it is said.
        defaults.dspark_draft_sampling = defaults.dspark_draft_sampling or "sample"
    if any(
        key.startswith("dspark_") and value is not None for key, value in vars(defaults).items()
    ):
        defaults.save_pretrained(folder)
    return {name: tuple(value.shape) for name, value in tensors.items()}


def _upload(folder: Path, repo_id: str, private: bool | None, token: str | bool | None) -> None:
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    api.upload_folder(
        repo_id=repo_id, folder_path=folder, commit_message="Upload drafter", ignore_patterns=[".*"]
    )
