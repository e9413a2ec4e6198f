"""Options that several commands take."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


class Dtype(StrEnum):
    """Precisions that a target is loaded in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    auto = "auto"


def writable(path: Path | None) -> Path | None:
    """Known before the models load, and not after the whole run."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {path} does not exist")
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; give the name of a file in it")
    return path


def drawable(path: Path | None) -> Path | None:
    """As `writable`, for a picture; its kind is told by its name."""
    if path is not None and path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"{path} is no picture; its name has to end in .png, .svg or .pdf")
    return writable(path)


def folder(path: Path | None) -> Path | None:
    """A folder that is there or can be made."""
    if path is not None and path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{path} is there and is no folder")
    return path


def write_json(console: Console, path: Path | None, result: dict) -> None:
    """What `--json` asks for."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        console.print(f"written: {path}")


Target = Annotated[str, typer.Option(help="Target model: Hub id or folder.")]
Drafter = Annotated[str, typer.Option(help="Drafter: Hub id or folder.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Precision of target and drafter.")]
DepthOption = Annotated[
    int | None, typer.Option(help="Depth of the target, for EAGLE-3 files that need it.")
]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves torch's choice.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate.")]
Temperature = Annotated[float, typer.Option(min=0, help="Of the target; 0 is greedy.")]
Threshold = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Confidence that cuts a block; default: the drafter's own."),
]
OwnPrompts = Annotated[
    Path | None, typer.Option("--prompts", help="JSONL with `turns` or `prompt`.")
]
PromptFiles = Annotated[
    list[Path], typer.Option("--prompts", help="JSONL files, one per set; repeatable.")
]
NumPrompts = Annotated[int, typer.Option(min=1, help="Prompts to use, of each file.")]
Rows = Annotated[int, typer.Option(min=1, help="Rows of a step.")]
OutputFile = Annotated[
    Path, typer.Option("--output", "-o", callback=writable, help="JSON file to write.")
]
Json = Annotated[
    Path | None,
    typer.Option("--json", callback=writable, help="Also write the result as JSON here."),
]
Plot = Annotated[
    Path | None, typer.Option(callback=drawable, help="Also draw a picture here (PNG, SVG, PDF).")
]
