"""
The names of the `dspark_*` fields, and how the host learns them.

Apart from `settings.py`, and without imports of the host: it runs while the host is being imported.
"""

from .._patching import wrap

FIELDS = (
    "dspark_verification",
    "dspark_confidence_threshold",
    "dspark_throughput_profile",
    "dspark_scheduler",
    "dspark_max_verify_tokens",
    "dspark_load",
    "dspark_sts_temperatures",
    "dspark_confidence_offsets",
    "dspark_draft_skipping",
    "dspark_draft_sampling",
)


def register_fields(generation_config_class: type) -> None:
    """
    Make the fields known to the host's `GenerationConfig`, unset, and keep them when it reads a
    file: of one that began as a model's default config, it would take its own fields alone.
    """
    for name in FIELDS:
        if not hasattr(generation_config_class, name):
            setattr(generation_config_class, name, None)
    wrap(generation_config_class, "__init__", _keeping_fields)


def _keeping_fields(original):
    def __init__(self, **kwargs):
        original(self, **kwargs)
        for name in FIELDS:
            if kwargs.get(name) is not None:
                setattr(self, name, kwargs[name])

    return __init__
