"""
How `generate(assistant_model=drafter)` reaches our loop.

Three methods of the host's `GenerationMixin` are wrapped: the one that validates a generation mode,
the one that runs assisted decoding, and continuous batching, which would ignore an assistant. All
look at the assistant and, unless it is one of our drafters, call the original with what they were
given. `uninstall` puts the originals back.
"""

from collections.abc import Callable
from typing import Any

from .._patching import unwrap, wrap
from .fields import register_fields

_VALIDATE = "_validate_generation_mode"
_DECODE = "_assisted_decoding"


def is_drafter(assistant: Any) -> bool:
    """
    Whether an assistant drafts with our loop. Decided by a class attribute, so that nothing is
    imported.
    """
    return not isinstance(assistant, type) and bool(getattr(assistant, "is_dspark_drafter", False))


def install(mixin: type) -> None:
    """Wrap the methods of `mixin` (the host's `GenerationMixin`), once."""
    from transformers import GenerationConfig

    register_fields(GenerationConfig)
    for name, make_wrapper in _WRAPPERS.items():
        wrap(mixin, name, make_wrapper)


def uninstall(mixin: type) -> None:
    """Put the host's own methods back."""
    for name in _WRAPPERS:
        unwrap(mixin, name)


def _wrap_validate(original):
    def validate(self, generation_mode, generation_config, generation_mode_kwargs):
        drafter = generation_mode_kwargs.get("assistant_model")
        if is_drafter(drafter):
            from .checks import (
                check_generation_mode,
                check_offloading,
                check_pairing,
                plain_mode,
            )

            check_generation_mode(generation_config, generation_mode)
            check_offloading(self, generation_config)
            check_pairing(self, drafter)
            # The host's own assisted loop takes one row and no recurrent state; ours takes both.
            generation_mode = plain_mode(generation_config)
        elif isinstance(drafter, str):
            # The host would say that a str has no config. Pipelines take names, this does not.
            raise TypeError(
                f"assistant_model is the text {drafter!r}, and generate takes a loaded model: "
                f"DSparkDrafter.from_pretrained({drafter!r}), or the class of your assistant."
            )
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return validate


def _wrap_decode(original):
    def assisted_decoding(self, input_ids, *args, assistant_model=None, **kwargs):
        if not is_drafter(assistant_model):
            return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        from .decoding import decode

        for name in ("tokenizer", "assistant_tokenizer", "inputs_tensor"):
            kwargs.pop(name, None)
        kwargs["drafter"] = assistant_model
        return decode(self, input_ids, *args, **kwargs)

    return assisted_decoding


def _wrap_batch(original):
    def generate_batch(self, *args, **kwargs):
        if is_drafter(kwargs.get("assistant_model")):
            raise ValueError(
                "generate_batch (continuous batching) would ignore the DSpark drafter. Call "
                "generate, or drop assistant_model."
            )
        return original(self, *args, **kwargs)

    return generate_batch


_WRAPPERS: dict[str, Callable[[Callable], Callable]] = {
    _VALIDATE: _wrap_validate,
    _DECODE: _wrap_decode,
    "generate_batch": _wrap_batch,
}
