"""One thread and no Hub: the suite measures nothing and downloads nothing."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import torch
import transformers

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
