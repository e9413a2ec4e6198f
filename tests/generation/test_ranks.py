"""Two processes on gloo: B063, tensor-parallel targets, and DeepSeek-V4's experts spread."""

import os
import subprocess
import sys
from pathlib import Path

from tiny import make_target
from tiny_v4 import make_v4_target

TESTS = Path(__file__).parent.parent


def test_two_processes_agree(tmp_path):
    make_target("llama", num_key_value_heads=2).save_pretrained(tmp_path / "llama")
    make_v4_target().save_pretrained(tmp_path / "deepseek_v4")
    path = [str(TESTS), str(TESTS / "generation"), *sys.path]
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            str(TESTS / "generation" / "ranks_worker.py"),
            str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
