"""From nothing to a drafter, in a process of its own: the example that shows it."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "05_train_a_drafter.py"


def test_a_drafter_trained_from_nothing_is_accepted():
    """B102: an acceptance floor; the example itself compares the text with plain decoding."""
    command = [sys.executable, str(EXAMPLE), "--size", "small"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    before, after = map(float, re.findall(r"accepted length τ.*: ([\d.]+)", result.stdout))
    assert after > 4.0
    assert after > before + 1.5
