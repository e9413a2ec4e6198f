"""
DSpark speculative decoding inside `model.generate()`.

Importing this package hooks it into Transformers without importing Transformers' heavy parts; names
are loaded on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._registration import register

if TYPE_CHECKING:
    from .configuration_dspark import DSparkConfig
    from .configuration_eagle3 import Eagle3Config
    from .drafting import DraftBlock, DraftContext
    from .exporting.export import export_drafter
    from .generation.candidate_generator import DSparkCandidateGenerator
    from .generation.outputs import DSparkDecoderOnlyOutput
    from .generation.statistics import RoundRecord, Statistics, collect_statistics
    from .loading.detection import UnsupportedCheckpointError
    from .modeling_dspark import DSparkDrafter
    from .modeling_eagle3 import Eagle3Drafter
    from .probing import probe_layout
    from .scheduling.calibration import Calibration
    from .scheduling.policy import VerificationPolicy
    from .scheduling.profiling import measure_throughput
    from .scheduling.settings import SchedulingSettings
    from .scheduling.throughput_profile import ThroughputProfile
    from .training.build import build_drafter, build_eagle3
    from .training.trainer import DSparkTrainer

__version__ = "0.1.0"

_NAMES = {
    "Calibration": "scheduling.calibration",
    "DSparkCandidateGenerator": "generation.candidate_generator",
    "DSparkConfig": "configuration_dspark",
    "DSparkDecoderOnlyOutput": "generation.outputs",
    "DSparkDrafter": "modeling_dspark",
    "DSparkTrainer": "training.trainer",
    "DraftBlock": "drafting",
    "DraftContext": "drafting",
    "Eagle3Config": "configuration_eagle3",
    "Eagle3Drafter": "modeling_eagle3",
    "RoundRecord": "generation.statistics",
    "SchedulingSettings": "scheduling.settings",
    "Statistics": "generation.statistics",
    "ThroughputProfile": "scheduling.throughput_profile",
    "UnsupportedCheckpointError": "loading.detection",
    "VerificationPolicy": "scheduling.policy",
    "build_drafter": "training.build",
    "build_eagle3": "training.build",
    "collect_statistics": "generation.statistics",
    "export_drafter": "exporting.export",
    "measure_throughput": "scheduling.profiling",
    "probe_layout": "probing",
}

__all__ = [
    "Calibration",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDecoderOnlyOutput",
    "DSparkDrafter",
    "DSparkTrainer",
    "DraftBlock",
    "DraftContext",
    "Eagle3Config",
    "Eagle3Drafter",
    "RoundRecord",
    "SchedulingSettings",
    "Statistics",
    "ThroughputProfile",
    "UnsupportedCheckpointError",
    "VerificationPolicy",
    "build_drafter",
    "build_eagle3",
    "collect_statistics",
    "export_drafter",
    "measure_throughput",
    "probe_layout",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])


register()
