"""`dspark-hf export`: a drafter for other engines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoModelForCausalLM

from ..auto import drafter_class_of, load_for_target
from ..exporting.cards import serve_commands
from ..exporting.export import export_drafter
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
    target, name = None, target_name or copy_from
    if copy_from is not None:
        target = AutoModelForCausalLM.from_pretrained(target_source(copy_from), dtype="auto")
    model = load_for_target(
        drafter_class_of(drafter),
        drafter,
        lambda: None if target is None else target.config,
        dtype="auto",
        block_layout=block_layout,
        num_target_layers=num_target_layers,
    )
    written = export_drafter(
        model,
        folder,
        layout,
        target=target,
        target_name=name,
        results=results,
        repo_id=push,
        **options,
    )
    console.print(f"written: {written}", highlight=False, soft_wrap=True)
    if push is not None:
        console.print(f"uploaded: {push}", highlight=False, soft_wrap=True)
    for command in serve_commands(model.config, layout, push or str(folder), name or "TARGET"):
        console.print(command, markup=False, highlight=False, soft_wrap=True)
