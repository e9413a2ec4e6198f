"""
The names of the `dspark_*` fields, and how the host learns them.

Apart from `settings.py`, and without imports of the host: it runs while the host is being imported.
"""

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
    """Make the fields known to the host's `GenerationConfig`, unset."""
    for name in FIELDS:
        if not hasattr(generation_config_class, name):
            setattr(generation_config_class, name, None)
