"""
Backbone families: how draft layers are built, and how context features become keys and values.

A family is a module with the same functions and constants (see `dense.py`). Everything else of a
layer, its attention included, is the host library's own code.
"""

from types import ModuleType

from . import deepseek_v4, dense, gemma4


def get_backbone(model_type: str) -> ModuleType:
    """The family module for a backbone's `model_type`."""
    families = {"gemma4_text": gemma4, "deepseek_v4": deepseek_v4}
    return families.get(model_type, dense)
