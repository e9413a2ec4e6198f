"""The draft layers of every published layout but Gemma 4's: a Qwen3 body, read from its config."""

from typing import Any

from .reading import ConfigReader, check_depth

_DIMENSIONS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
)
_OPTIONAL = (
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "attention_bias",
    "attention_dropout",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
)
# Rotary types whose frequencies do not depend on how long the text is: keys that were rotated once
# stay right.
_STATIC_ROTARY = ("default", "linear", "yarn", "llama3")
# Keys that a rotary embedding of plain type does not read; copies of a target's config have them.
_RESIDUE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "type")


def read_body(
    reader: ConfigReader,
    defaults: dict[str, Any] | None = None,
    default_theta: float | None = None,
) -> dict[str, Any]:
    """
    Fields of a Qwen3 config for layouts that keep it at the top level of config.json.

    Args:
        defaults (`dict`, *optional*): dimensions that the layout's reference derives if absent.
        default_theta (`float`, *optional*): the rotary base that it has if none is stated.

    Raises:
        `ValueError`: a dimension is missing, or attention and rotary keys contradict each other.
    """
    fields = {}
    for key in _DIMENSIONS:
        if defaults and key in defaults and reader.get(key, key) is None:
            fields[key] = defaults[key]
            reader.by_rule(key, "derived, as the reference does")
        else:
            fields[key] = reader.require(key, key)
    check_depth(reader, fields["num_hidden_layers"])
    optional = {key: reader.get(key, key) for key in _OPTIONAL}
    fields |= {key: value for key, value in optional.items() if value is not None}
    fields["rope_parameters"] = read_rotary(reader, default_theta=default_theta)
    check_layer_types(reader, fields)
    return {
        "model_type": "qwen3",
        "vocab_size": reader.require("vocab_size", "vocab_size"),
        **fields,
    }


def read_rotary(reader: ConfigReader, prefix: str = "", default_theta: float | None = None) -> dict:
    """
    The rotary parameters in the host's present spelling.

    They are written as `rope_parameters`, as `rope_scaling` with `rope_theta` beside it, or flat;
    the newest spelling wins.

    Raises:
        `ValueError`: no base is stated and the layout has none of its own, or a type whose
        frequencies depend on the length of the text.
    """
    names = [f"{prefix}{name}" for name in ("rope_parameters", "rope_scaling", "rope_theta")]
    nested, scaling = reader.section(names[0]), reader.section(names[1])
    # One set for each type of layer: drafters of that kind rotate all layers by the sliding set.
    if "sliding_attention" in nested:
        nested = nested["sliding_attention"]
    flat = reader.get("rope_theta", names[2])
    reader.ignore(*names[:2])
    rope = {**scaling, **nested}
    theta = rope.get("rope_theta")
    if theta is None:
        theta = default_theta if flat is None else flat
    elif flat is not None and flat != theta:
        reader.warn(f"rope_theta is {flat} at the top level and {theta} nested; the nested counts.")
    if theta is None:
        raise ValueError(
            f"{reader.source}: config.json states no rope_theta (looked in rope_parameters, "
            "rope_scaling and at top level). It must be the value the drafter was trained with; "
            "add it."
        )
    reader.origins["rope"] = next(
        (name for name in names if reader._at(name) is not None), "= default"
    )
    kinds = [_rotary_kind(part) for part in (nested, scaling)]
    if None not in kinds and kinds[0] != kinds[1]:
        raise ValueError(
            f"{reader.source}: config.json says rotary type {kinds[0]!r} in {names[0]} and "
            f"{kinds[1]!r} in {names[1]}. Keep the one that the drafter was trained with."
        )
    kind = kinds[0] or kinds[1] or "default"
    if kind not in _STATIC_ROTARY:
        raise ValueError(
            f"{reader.source}: rope_type is {kind!r}; draft layers can be rotated with "
            f"{', '.join(_STATIC_ROTARY)}."
        )
    residue = set(_RESIDUE) if kind == "default" else {"type"}
    kept = {key: value for key, value in rope.items() if key not in residue}
    return {**kept, "rope_type": kind, "rope_theta": theta}


def _rotary_kind(parameters: dict[str, Any]) -> str | None:
    kind = parameters.get("rope_type") or parameters.get("type")
    return "default" if kind == "mrope" else kind


def check_layer_types(reader: ConfigReader, fields: dict[str, Any]) -> None:
    """Raise `ValueError` for kinds of layers a Qwen3 body has not, or a window that is not set."""
    layer_types = set(fields.get("layer_types") or ())
    if not layer_types <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{reader.source}: layer_types has {sorted(layer_types)}; Qwen3 draft layers are "
            "full_attention or sliding_attention. The list was copied from another model."
        )
    # The host ignores the window of a sliding layer unless both other keys are set.
    window, use_window = fields.get("sliding_window"), fields.get("use_sliding_window")
    if "sliding_attention" in layer_types and not (window and use_window):
        raise ValueError(
            f"{reader.source}: layer_types has sliding_attention layers but sliding_window is "
            f"{window!r} and use_sliding_window is {use_window!r}. Give the window the drafter "
            "was trained with, and use_sliding_window true."
        )
