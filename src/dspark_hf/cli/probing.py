"""`dspark-hf probe`: how a drafter is to be read, by drafting along the target's text."""

import logging
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoConfig

from ..auto import drafter_class_of, load_for_target
from ..evaluation.prompts import encode_prompt
from ..loading.reading import ANCHOR_FIRST, INFILL, UndecidedLayoutError
from ..modeling_drafter import DrafterModel
from ..modeling_dspark import DSparkDrafter
from ..probing import ProbeResult, combine, probe_layout

logger = logging.getLogger(__name__)


def load_drafter(source: str, dtype: Any, target: str) -> tuple[Any, bool]:
    """
    A drafter, and whether its checkpoint says how its blocks are laid out; one that does not is
    read as anchor-first until it is probed. Taps that follow from the depth of the target are taken
    from its config, at `target`.
    """
    cls = drafter_class_of(source)

    def config():
        from .models import target_source

        return AutoConfig.from_pretrained(target_source(target))

    try:
        return load_for_target(cls, source, config, dtype=dtype), True
    except UndecidedLayoutError:
        options = {"dtype": dtype, "block_layout": ANCHOR_FIRST}
        return load_for_target(cls, source, config, **options), False


def layout_name(anchor_predicts: bool) -> str:
    """The name that `from_pretrained` takes."""
    return ANCHOR_FIRST if anchor_predicts else INFILL


def settle_layout(
    target: Any, tokenizer: Any, drafter: DSparkDrafter, source: str, prompt: str
) -> DSparkDrafter:
    """Probe a drafter whose checkpoint is silent, and read it as the probe found."""
    result = _probe(target, tokenizer, drafter, [prompt], 64, 48, console=None)
    layout = layout_name(result.best.anchor_predicts)
    logger.warning(
        "%s does not say how its blocks are laid out. Drafting along %d anchors of the target's "
        "own text, %s agreed best%s; it is used. Pass block_layout=%r to load it so.",
        source,
        len(result.evidence[0].lengths),
        layout,
        "" if result.decided else " (the lead is within chance)",
        layout,
    )
    settled = DSparkDrafter.from_pretrained(source, dtype=drafter.dtype, block_layout=layout)
    return settled.to(drafter.device)


def run_probe(
    console: Console,
    target: str,
    drafter: str,
    prompts: Path | None,
    num_prompts: int,
    max_new_tokens: int,
    num_anchors: int,
    dtype: str,
    threads: int,
) -> dict[str, Any]:
    """Evidence for each reading, printed and returned."""
    from .models import DEFAULT_PROMPTS, load_pair, read_prompts

    texts = read_prompts(prompts, num_prompts) if prompts else list(DEFAULT_PROMPTS[:num_prompts])
    pair = load_pair(target, drafter, dtype, threads, settle=False)
    result = _probe(
        pair.target, pair.tokenizer, pair.drafter, texts, max_new_tokens, num_anchors, console
    )
    is_block = isinstance(pair.drafter, DSparkDrafter)
    console.print(_table(result, is_block))
    if result.best != result.stated:
        console.print(f"[bold]Another reading agrees better.[/] {_difference(result)}")
    elif result.decided:
        console.print("The drafter is read as it agrees best.")
    else:
        console.print("Undecided: no lead is beyond chance. Use more anchors or prompts.")
    return result.to_dict()


def _probe(
    target: Any,
    tokenizer: Any,
    drafter: DrafterModel,
    texts: list[str],
    max_new_tokens: int,
    num_anchors: int,
    console: Console | None,
) -> ProbeResult:
    results, share = [], -(-num_anchors // len(texts))
    for text in track(texts, "drafting", console=console, transient=True, disable=console is None):
        inputs = encode_prompt(tokenizer, text, target.device)
        ids = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        first = inputs["input_ids"].shape[1] - 1
        results.append(probe_layout(target, drafter, ids, max(first, 1), share))
    return combine(results)


def _difference(result: ProbeResult) -> str:
    best, stated = result.best, result.stated
    parts = []
    if best.anchor_predicts != stated.anchor_predicts:
        name = layout_name(best.anchor_predicts)
        parts.append(f"blocks are {name} (block_layout={name!r})")
    if best.tap_offset:
        parts.append(
            f"taps lie {best.tap_offset:+d} layer from where they are read (add "
            f"{best.tap_offset:+d} to each tap id in config.json)"
        )
    if best.causal != stated.causal:
        parts.append("blocks are causal" if best.causal else "blocks are bidirectional")
    return "; ".join(parts) + "."


def _table(result: ProbeResult, is_block: bool) -> Table:
    table = Table(title="agreement with the target's own text", title_justify="left")
    for heading in ("block layout", "taps", "block", "accepted length", "by position"):
        table.add_column(heading)
    for evidence in result.evidence:
        reading = evidence.reading
        marks = " ←" if reading == result.stated else ""
        layout = layout_name(reading.anchor_predicts) if is_block else "token by token"
        table.add_row(
            layout + marks,
            f"{reading.tap_offset:+d}" if reading.tap_offset else "as read",
            ("causal" if reading.causal else "bidirectional") if is_block else "–",
            f"{evidence.accepted_length:.2f}",
            " ".join(f"{100 * share:.0f}%" for share in evidence.agreement),
        )
    table.caption = "← as the drafter is read now"
    return table
