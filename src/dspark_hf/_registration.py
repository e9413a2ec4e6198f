"""
Hooking into the host library without importing it earlier than the user does.

Importing `dspark_hf` must stay cheap, and the host loads its parts lazily. So each hook is
installed when the module it belongs to is imported, or at once if that has happened already.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _on_generation(module: ModuleType) -> None:
    from .generation import hook

    hook.install(module.GenerationMixin)


def _on_generation_config(module: ModuleType) -> None:
    from .generation.fields import register_fields

    register_fields(module.GenerationConfig)


def _on_pipelines(module: ModuleType) -> None:
    from . import pipelines

    pipelines.install(module)


def _on_auto(module: ModuleType) -> None:
    from . import auto

    auto.install(module)


def _on_auto_config(module: ModuleType) -> None:
    from . import auto

    auto.register_config(module)
    auto.install_config(module)


def _on_modeling(module: ModuleType) -> None:
    from . import auto

    auto.install_report(module)


def _on_auto_models(module: ModuleType) -> None:
    from . import auto

    auto.register_models(module)


HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "transformers.generation.configuration_utils": _on_generation_config,
    "transformers.generation.utils": _on_generation,
    "transformers.pipelines.base": _on_pipelines,
    "transformers.models.auto.configuration_auto": _on_auto_config,
    "transformers.modeling_utils": _on_modeling,
    "transformers.models.auto.auto_factory": _on_auto,
    "transformers.models.auto.modeling_auto": _on_auto_models,
}


class _HookFinder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module and runs its hook once the module has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in HOOKS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _run_after_import(spec.loader, HOOKS[fullname])
                return spec
        return None


def _run_after_import(loader: Any, hook: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        hook(module)

    loader.exec_module = exec_module


def register() -> None:
    """Install every hook, now or on import of its module. Calling it again changes nothing."""
    for name, hook in HOOKS.items():
        if name in sys.modules:
            hook(sys.modules[name])
    if not any(isinstance(finder, _HookFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _HookFinder())
