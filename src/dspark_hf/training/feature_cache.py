"""
Target states kept on disk, one safetensors file per example.

Optional: without it the target runs again in every epoch, which costs a prefill per example and no
space.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from .._files import replacing
from ..evaluation.provenance import weights_of
from .data import DraftDataset
from .objective import TargetStates
from .target_states import TargetReader

_NAMES = ("features", "last_hidden", "log_normaliser")


def bytes_per_token(reader: TargetReader) -> int:
    """Size of a cached token: taps and final state in the target's dtype, normaliser in float32."""
    config = reader.target.config.get_text_config(decoder=True)
    item = torch.empty((), dtype=reader.target.dtype).element_size()
    return (len(reader.layer_ids) + 1) * config.hidden_size * item + 4 * reader.with_normaliser


class FeatureCache:
    """
    A folder of target states for one dataset.

    Args:
        folder (`str` or `Path`): where files are; made if missing.
        reader ([`TargetReader`]): what they are computed with.
        dataset ([`DraftDataset`]): the examples, found again by their tokens.
    """

    def __init__(self, folder: str | os.PathLike, reader: TargetReader, dataset: DraftDataset):
        self.folder = Path(folder)
        self.reader = reader
        self.dataset = dataset
        target = reader.target
        identity = f"{target.dtype} {reader.layer_ids} {reader.with_normaliser}"
        self._identity = f"{identity} {weights_of(target)}"

    def fill(self, progress: Callable | None = tqdm) -> None:
        """
        Compute what is missing; an interrupted run goes on where it stopped.

        Raises:
            `OSError`: the disk is full; complete files stay and are used later.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        missing = [i for i in range(len(self.dataset)) if not self._file(i).exists()]
        for index in progress(missing, desc="target states") if progress else missing:
            ids = torch.tensor([self.dataset[index]["input_ids"]], device=self.reader.target.device)
            states = self.reader(ids, torch.ones_like(ids))
            tensors = {
                name: getattr(states, name)[0].contiguous().cpu()
                for name in _NAMES
                if getattr(states, name) is not None
            }
            # Complete or not there: a file cut off by a full disk would be trained on.
            try:
                with replacing(self._file(index)) as temporary:
                    save_file(tensors, temporary)
            except (OSError, SafetensorError) as error:
                raise OSError(
                    f"Writing target states to {self.folder} failed ({error}). Complete files are "
                    "kept: free some space and start again, or leave feature_cache out."
                ) from error

    def load(self, indices: torch.Tensor, device: torch.device) -> TargetStates:
        """States of a batch of examples, padded on the right with zeros."""
        columns: dict[str, list[torch.Tensor]] = {}
        for index in indices.tolist():
            with safe_open(self._file(index), framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - not a dict
                    columns.setdefault(name, []).append(stored.get_tensor(name))
        padded = {
            name: pad_sequence(column, batch_first=True).to(device)
            for name, column in columns.items()
        }
        return TargetStates(**padded)

    def _file(self, index: int) -> Path:
        ids = self.dataset[index]["input_ids"]
        key = hashlib.sha256(f"{self._identity} {ids}".encode()).hexdigest()[:24]
        return self.folder / f"{key}.safetensors"
