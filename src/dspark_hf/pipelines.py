"""`pipeline(..., assistant_model=…)` with a drafter object, a path or a Hub id."""

import os
from types import ModuleType
from typing import Any

from ._patching import unwrap, wrap
from .generation.hook import is_drafter

_LOAD = "load_assistant_model"


def install(pipelines_base: ModuleType) -> None:
    """
    Let the host's pipelines load drafters.

    The host looks an assistant's class up inside its own package and asks its repository for a
    tokenizer; a drafter has neither. Every other assistant goes to the host's function.
    """
    wrap(pipelines_base, _LOAD, _wrap_load_assistant_model)


def uninstall(pipelines_base: ModuleType) -> None:
    """Put the host's own function back."""
    unwrap(pipelines_base, _LOAD)


def _wrap_load_assistant_model(original):
    def load_assistant_model(
        model: Any, assistant_model: Any, assistant_tokenizer: Any
    ) -> tuple[Any, Any]:
        drafter = _load_drafter(model, assistant_model)
        if drafter is None or not model.can_generate():
            return original(model, assistant_model, assistant_tokenizer)
        if assistant_tokenizer is not None:
            raise ValueError(
                "A DSpark drafter works on the target's own token ids; leave assistant_tokenizer "
                "out."
            )
        from .generation.checks import check_pairing

        check_pairing(model, drafter)
        return drafter, None

    return load_assistant_model


def _load_drafter(model: Any, assistant: Any) -> Any:
    if is_drafter(assistant):
        return assistant
    if not isinstance(assistant, str | os.PathLike):
        return None
    assistant = os.fspath(assistant)
    from .auto import drafter_class, load_for_target
    from .loading.detection import is_foreign_drafter, is_own_layout
    from .loading.files import names_that_tell, read_config

    raw = read_config(assistant)
    names = names_that_tell(raw, assistant)
    if not is_own_layout(raw) and not is_foreign_drafter(raw, names):
        return None
    cls = drafter_class(raw, names)
    return load_for_target(cls, assistant, lambda: model.config, dtype=model.dtype).to(model.device)
