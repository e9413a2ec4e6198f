"""
Targets whose rotary frequencies depend on the length of the forward.

With `longrope` the whole forward uses the long factors once its last position passes the original
length; with `dynamic` the frequencies change at every step past it. Plain decoding rotates each
position by the length it had then. So a verification may not reach over the boundary, and with
`dynamic` nothing behind it is drafted at all.
"""

from transformers import PreTrainedConfig

DYNAMIC, LONGROPE = "dynamic", "longrope"


class RotaryLimits:
    """
    How many draft tokens a verification may carry so that all positions are rotated as in plain
    decoding.

    Args:
        config (`PreTrainedConfig`): the target's text config.
    """

    def __init__(self, config: PreTrainedConfig):
        self._boundaries: list[tuple[str, int]] = []
        rope = getattr(config, "rope_parameters", None) or {}
        # One set of parameters, or one for each type of layer.
        sets = [rope] if "rope_type" in rope else [v for v in rope.values() if isinstance(v, dict)]
        for parameters in sets:
            kind = parameters.get("rope_type")
            if kind in (DYNAMIC, LONGROPE):
                lengths = [parameters.get("original_max_position_embeddings")]
                if kind == DYNAMIC or lengths == [None]:
                    lengths.append(config.max_position_embeddings)
                self._boundaries.append((kind, min(length for length in lengths if length)))

    def __bool__(self) -> bool:
        return bool(self._boundaries)

    def limit(self, anchor_position: int, wanted: int) -> int:
        """Of `wanted` draft tokens behind the anchor, how many may be verified."""
        for kind, boundary in self._boundaries:
            room = boundary - (anchor_position + 1)
            if room >= 0:
                wanted = min(wanted, room)
            elif kind == DYNAMIC:
                wanted = 0
        return max(wanted, 0)
