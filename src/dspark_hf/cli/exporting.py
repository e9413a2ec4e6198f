"""`dspark-hf export`: a drafter for other engines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoModelForCausalLM

from ..auto import drafter_class_of
from ..exporting.cards import read_result, serve_commands
from ..exporting.export import export_drafter
from ..loading.reading import UnknownDepthError
from .models import target_source


def run_export(
    console: Console,
    drafter: str,
    folder: Path,
    layout: str,
    target_name: str | None,
    copy_from: str | None,
    results: Sequence[Path],
    push: str | None,
    block_layout: str | None,
    num_target_layers: int | None,
    **options: Any,
) -> None:
    """Write the files, upload them if asked to, and print the commands that serve them."""
    facts: dict[str, Any] = {}
    for path in results:
        facts |= read_result(path)
    target, name = None, target_name or copy_from
    if copy_from is not None:
        target = AutoModelForCausalLM.from_pretrained(target_source(copy_from), dtype="auto")
    load, told = drafter_class_of(drafter).from_pretrained, {"block_layout": block_layout}
    try:
        model = load(drafter, dtype="auto", num_target_layers=num_target_layers, **told)
    except UnknownDepthError:
        if target is None:
            raise
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
        model = load(drafter, dtype="auto", num_target_layers=depth, **told)
    written = export_drafter(
        model,
        folder,
        layout,
        target=target,
        target_name=name,
        result=facts or None,
        repo_id=push,
        **options,
    )
    console.print(f"written: {written}", highlight=False, soft_wrap=True)
    if push is not None:
        console.print(f"uploaded: {push}", highlight=False, soft_wrap=True)
    for command in serve_commands(model.config, layout, push or str(folder), name or "TARGET"):
        console.print(command, markup=False, highlight=False, soft_wrap=True)
