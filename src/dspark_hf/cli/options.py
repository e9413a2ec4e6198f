"""Options that several commands take."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Dtype(StrEnum):
    """Precisions that a target is loaded in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    auto = "auto"


Target = Annotated[str, typer.Option(help="Target model: Hub id or folder.")]
Drafter = Annotated[str, typer.Option(help="Drafter: Hub id or folder.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Precision of target and drafter.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves torch's choice.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate.")]
Threshold = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Confidence that cuts a block; default: the drafter's own."),
]


def writable(path: Path | None) -> Path | None:
    """Known before the models load, and not after the whole run."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {path} does not exist")
    return path


Json = Annotated[
    Path | None,
    typer.Option("--json", callback=writable, help="Also write the result as JSON here."),
]

Plot = Annotated[
    Path | None, typer.Option(callback=writable, help="Also draw a picture here (PNG, SVG, PDF).")
]
