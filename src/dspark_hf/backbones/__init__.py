"""
Backbone families: how draft layers are built, and how context features become keys and values.

A family is a module with the same five functions (see `dense.py`). Everything else of a layer, its
attention included, is the host library's own code.
"""

from types import ModuleType

from . import dense, gemma4


def get_backbone(model_type: str) -> ModuleType:
    """The family module for a backbone's `model_type`."""
    return gemma4 if model_type == "gemma4_text" else dense
