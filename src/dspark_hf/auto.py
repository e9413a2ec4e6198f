"""
The host's auto classes: ours resolve, foreign drafters are not mistaken for small language models.
"""

from types import ModuleType
from typing import Any

from ._patching import unwrap, wrap
from .configuration_dspark import DSparkConfig
from .configuration_eagle3 import Eagle3Config

_GET = "_get_model_class"


class DrafterEntry:
    """
    Stands for `DSparkDrafter` in the host's tables, until the host asks for the class itself.

    Importing the drafter's module imports the host's modeling code, which the tables themselves do
    not do.
    """

    config_class: type = DSparkConfig


class Eagle3Entry(DrafterEntry):
    """Stands for `Eagle3Drafter` in the same way."""

    config_class = Eagle3Config


_ENTRIES = (DrafterEntry, Eagle3Entry)


def drafter_class(raw: dict[str, Any]) -> Any:
    """The class that reads the drafter which a config.json describes, or says what it is."""
    from .loading.detection import is_eagle3

    if is_eagle3(raw):
        from .modeling_eagle3 import Eagle3Drafter

        return Eagle3Drafter
    from .modeling_dspark import DSparkDrafter

    return DSparkDrafter


def register_config(configuration_auto: ModuleType) -> None:
    """Make `AutoConfig` know `model_type: dspark` and `dspark_eagle3`."""
    for entry in _ENTRIES:
        config_class: Any = entry.config_class
        configuration_auto.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


def register_models(modeling_auto: ModuleType) -> None:
    """Make `AutoModel` and `AutoModelForCausalLM` know drafters in our layout."""
    for name in ("AutoModel", "AutoModelForCausalLM"):
        for entry in _ENTRIES:
            getattr(modeling_auto, name).register(entry.config_class, entry, exist_ok=True)


def install(auto_factory: ModuleType) -> None:
    """
    Where the host picks a model class: give it ours for our configs, and refuse foreign drafters.

    Published drafters carry a copy of their target's config, so the host would build an ordinary
    small model, load the layers whose names happen to fit, and say no more than that some keys were
    unexpected.
    """
    wrap(auto_factory, _GET, _wrap_get_model_class)


def uninstall(auto_factory: ModuleType) -> None:
    """Put the host's own function back."""
    unwrap(auto_factory, _GET)


def _wrap_get_model_class(original):
    def _get_model_class(config, model_mapping):
        if isinstance(config, DSparkConfig | Eagle3Config):
            return drafter_class({"model_type": config.model_type})
        from .loading.detection import DRAFTER_ARCHITECTURES, HOST_MODELS

        names = config.architectures or ()
        drafters = [name for name in names if name in DRAFTER_ARCHITECTURES]
        # The first EAGLE-3 files call themselves an ordinary Llama.
        if "LlamaForCausalLM" in names and hasattr(config, "draft_vocab_size"):
            drafters.append("LlamaForCausalLM with draft_vocab_size")
        # Copies that lost their class name.
        drafters += [
            key for key in ("speculators_model_type", "dflash_config") if hasattr(config, key)
        ]
        if drafters and config.model_type not in HOST_MODELS:
            source = config.name_or_path or "this checkpoint"
            raise ValueError(
                f"{source} is a drafter ({drafters[0]}) published with model_type "
                f"{config.model_type!r}; an auto class would turn it into an ordinary small model. "
                f"Load it with dspark_hf.{drafter_class(config.to_dict()).__name__}."
                f"from_pretrained({source!r}), which reads it or says which layout it is."
            )
        return original(config, model_mapping)

    return _get_model_class
