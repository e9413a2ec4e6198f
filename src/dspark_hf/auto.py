"""
The host's auto classes: ours resolve, foreign drafters are not mistaken for small language models.
"""

from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from transformers import PretrainedConfig

from ._patching import unwrap, wrap
from .configuration_dspark import DSparkConfig
from .configuration_eagle3 import Eagle3Config

_GET, _READ, _REPORT = "_get_model_class", "from_pretrained", "log_state_dict_report"


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


def drafter_class(raw: dict[str, Any], names: Collection[str] = ()) -> Any:
    """
    The class that reads the drafter which a config.json describes, or says what it is; `names` are
    those of its tensors, where they tell.
    """
    from .loading.detection import is_eagle3

    if is_eagle3(raw, names):
        from .modeling_eagle3 import Eagle3Drafter

        return Eagle3Drafter
    from .modeling_dspark import DSparkDrafter

    return DSparkDrafter


def drafter_class_of(source: str, **hub: Any) -> Any:
    """The same of a folder or Hub id."""
    from .loading.files import names_that_tell, read_config

    raw = read_config(source, **hub)
    return drafter_class(raw, names_that_tell(raw, source, **hub))


def load_for_target(
    cls: Any, source: str, target_config: Callable[[], PretrainedConfig | None], **options: Any
) -> Any:
    """
    `cls.from_pretrained(source, **options)`; taps that follow from the target's depth, where nobody
    says it, are those for the target of `target_config()`, which is called only then.

    Raises:
        `UnknownDepthError`: the depth is needed and there is no config.
    """
    from .loading.reading import UnknownDepthError

    try:
        return cls.from_pretrained(source, **options)
    except UnknownDepthError:
        config = target_config()
        if config is None:
            raise
        depth = config.get_text_config(decoder=True).num_hidden_layers
        return cls.from_pretrained(source, **options | {"num_target_layers": depth})


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


def install_config(configuration_auto: ModuleType) -> None:
    """
    Where `AutoConfig` fails on the config.json of a drafter, which may have no model type, name the
    call that reads it.
    """
    wrap(configuration_auto.AutoConfig, _READ, _wrap_read_config)


def uninstall_config(configuration_auto: ModuleType) -> None:
    """Put the host's own method back."""
    unwrap(configuration_auto.AutoConfig, _READ)


def install_report(modeling_utils: ModuleType) -> None:
    """
    Where the host reports what it loaded: refuse an ordinary model made of a drafter's weights.

    Only tensor names tell some drafters, and a pipeline that an auto class refuses tries the class
    that config.json names.
    """
    wrap(modeling_utils, _REPORT, _wrap_report)


def uninstall_report(modeling_utils: ModuleType) -> None:
    """Put the host's own function back."""
    unwrap(modeling_utils, _REPORT)


def _wrap_read_config(original):
    # The host's name of the first argument, which may be given by it.
    def from_pretrained(pretrained_model_name_or_path, **kwargs):
        source = pretrained_model_name_or_path
        try:
            return original(source, **kwargs)
        except (KeyError, ValueError) as error:
            what = _drafter_at(source, kwargs)
            if what is None:
                raise
            raise ValueError(
                f"{source} is {what}, which the host library has no class for. "
                f"{_remedy(drafter_class_of(source, **_hub(kwargs)), source)}"
            ) from error

    return from_pretrained


def _drafter_at(source: Any, options: dict[str, Any]) -> str | None:
    """What kind of published drafter a folder or Hub id holds, `None` for anything else."""
    from .loading.detection import (
        DEEPSEEK_V4,
        DRAFTER_ARCHITECTURES,
        OWN_LAYOUTS,
        architecture_of,
        is_foreign_drafter,
    )
    from .loading.files import read_config

    try:
        raw = read_config(source, **_hub(options))
    except (OSError, ValueError):
        return None
    # Our config classes say themselves what they cannot be; a drafter inside a target is no reason
    # why the host cannot read that.
    kind, is_target = str(raw.get("model_type")), any(key.startswith("dspark_") for key in raw)
    if kind in OWN_LAYOUTS or kind.startswith(DEEPSEEK_V4) or is_target:
        return None
    if not is_foreign_drafter(raw):
        return None
    return DRAFTER_ARCHITECTURES.get(architecture_of(raw) or "", "a drafter")


def _hub(options: dict[str, Any]) -> dict[str, Any]:
    from .loading.files import HUB_ARGUMENTS

    return {name: options[name] for name in HUB_ARGUMENTS if options.get(name) is not None}


def _remedy(cls: Any, source: Any) -> str:
    return (
        f"Load it with dspark_hf.{cls.__name__}.from_pretrained({str(source)!r}), which reads it "
        "or says which layout it is."
    )


def _wrap_report(original):
    def log_state_dict_report(model, pretrained_model_name_or_path, *args, loading_info, **kwargs):
        from .loading.detection import drafter_of_tensors

        found = drafter_of_tensors(loading_info.unexpected_keys)
        if found is not None:
            name, is_eagle3 = found
            from .modeling_dspark import DSparkDrafter
            from .modeling_eagle3 import Eagle3Drafter

            source = pretrained_model_name_or_path or "this checkpoint"
            raise ValueError(
                f"{source} is a drafter (its weights have fc.weight and {name}); a "
                f"{type(model).__name__} of it would be an ordinary small model, in part random. "
                f"{_remedy(Eagle3Drafter if is_eagle3 else DSparkDrafter, source)}"
            )
        return original(
            model, pretrained_model_name_or_path, *args, loading_info=loading_info, **kwargs
        )

    return log_state_dict_report


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
                f"{_remedy(drafter_class(config.to_dict()), source)}"
            )
        return original(config, model_mapping)

    return _get_model_class
