"""What a measurement depends on besides the models."""

import platform
from pathlib import Path

import torch


def processor_name() -> str:
    """The accelerator, or the model of the CPU."""
    if torch.accelerator.is_available():
        return _accelerator_name(torch.accelerator.current_accelerator())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def device_description(device: torch.device) -> str:
    """What forwards on this device are timed with: the accelerator, or the CPU and its threads."""
    if device.type != "cpu":
        return _accelerator_name(device)
    return f"cpu, {processor_name()}, {torch.get_num_threads()} thread(s)"


def _accelerator_name(device: torch.device) -> str:
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device.type) if name is None else f"{device.type}, {name(device)}"
