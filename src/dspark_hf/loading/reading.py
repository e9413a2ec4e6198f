"""The middle of loading: config.json with a record of what was read, and the normal form."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..configuration_drafter import DrafterConfig
from .files import TensorInfo

ANCHOR_FIRST, INFILL = "anchor_first", "infill"
BLOCK_LAYOUTS = (ANCHOR_FIRST, INFILL)

_ABSENT = object()
_MATRICES = {
    "stores_input_embeddings": "embed_tokens.weight",
    "stores_output_embeddings": "lm_head.weight",
}


class UndecidedLayoutError(ValueError):
    """
    Nothing in the checkpoint says whether the anchor slot of a block predicts.
    """


class UnknownDepthError(ValueError):
    """
    The taps follow from the target's depth, which nothing in the checkpoint says.
    """


@dataclass(frozen=True)
class Reading:
    """
    A checkpoint in the normal form: what every dialect is turned into.

    Attributes:
        config ([`DrafterConfig`]): the trained facts.
        renames (`dict[str, str]`): stored tensor names that differ from ours, and ours.
        unneeded (`frozenset[str]`): stored tensors that the layout knows and drafting does not use.
        interleaved_rotary (`bool`):
            Query and key rows are stored for rotary pairs (2i, 2i + 1); ours are (i, i + d/2).
        vocabulary_offsets (`bool`): `d2t` holds target id minus draft id, and not target ids.
        greedy_drafts (`bool`): the layout's reference loop drafts by argmax at every temperature.
        origins (`dict[str, str]`): where each fact was found; a `=` means by rule, not by a key.
        unread (`list[str]`): keys of config.json that had no part in it.
        warnings (`list[str]`): contradictions and silences, and how they were resolved.
    """

    config: DrafterConfig
    renames: dict[str, str] = field(default_factory=dict)
    unneeded: frozenset[str] = frozenset()
    interleaved_rotary: bool = False
    vocabulary_offsets: bool = False
    greedy_drafts: bool = False
    origins: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def key_mapping(self) -> dict[str, str] | None:
        """The renames as the host's loading takes them: patterns of stored names to ours."""
        return {f"^{re.escape(old)}$": new for old, new in self.renames.items()} or None

    def tensors_by_our_name(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Stored tensors under the names that the drafter has for them."""
        return {
            self.renames.get(name, name): tensor
            for name, tensor in tensors.items()
            if name not in self.unneeded
        }


class ConfigReader:
    """
    config.json of a checkpoint, read by dotted paths; remembers what was read from where.

    Args:
        raw (`dict`): config.json as it is.
        source (`str`): repository or folder, for messages.
        tensors (mapping of `str` to [`TensorInfo`]): the stored tensors.
    """

    def __init__(self, raw: dict[str, Any], source: str, tensors: Mapping[str, TensorInfo]):
        self.raw = raw
        self.source = source
        self.tensors = tensors
        self.origins: dict[str, str] = {}
        self.warnings: list[str] = []
        self._read: set[str] = set()

    def get(self, field: str, *paths: str, default: Any = None) -> Any:
        """
        A fact that may stand at several places; null counts as absent.

        Raises:
            `ValueError`: two places give different values.
        """
        self.ignore(*paths)
        found = {path: value for path in paths if (value := self._at(path)) is not None}
        if not found:
            if default is not _ABSENT:
                said = "" if default is None else f", so {default!r}"
                self.origins.setdefault(field, f"= no {' or '.join(paths)}{said}")
            return default
        (path, value), *others = found.items()
        for other, contradiction in others:
            if contradiction != value:
                raise ValueError(
                    f"{self.source}: config.json says {path} = {value!r} and {other} = "
                    f"{contradiction!r}. It was fixed when the drafter was trained: keep the one "
                    "that its author trained with and remove the other."
                )
        self.origins[field] = path
        return value

    def flag(self, field: str, *paths: str, default: bool | None = None) -> bool | None:
        """
        Like `get`, of a fact that is true or false. Raises `ValueError` for anything else: a
        string counts as true, whatever it says.
        """
        value = self.get(field, *paths, default=default)
        if value is None or isinstance(value, bool):
            return value
        raise ValueError(
            f"{self.source}: config.json says {self.origins[field]} = {value!r}, and it can be "
            "true or false. Take it from the original checkpoint."
        )

    def require(self, field: str, *paths: str) -> Any:
        """Like `get`, and raises `ValueError` where none of the places has a value."""
        value = self.get(field, *paths, default=_ABSENT)
        if value is _ABSENT:
            raise ValueError(
                f"{self.source}: config.json lacks {' or '.join(paths)}. These were fixed when the "
                "drafter was trained and are not guessed; take them from the original checkpoint."
            )
        return value

    def section(self, path: str) -> dict[str, Any]:
        """A nested object, empty if absent. Raises `ValueError` if it is something else."""
        value = self._at(path)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ValueError(
                f"{self.source}: config.json has {path} = {value!r}, expected an object."
            )
        return value

    def ignore(self, *paths: str) -> None:
        """Note that these keys are known to the layout."""
        self._read.update(paths)

    def by_rule(self, field: str, reason: str) -> None:
        """Note that a fact follows from the layout or the tensors and not from a key."""
        self.origins[field] = f"= {reason}"

    def warn(self, message: str) -> None:
        """Note a contradiction or a silence, and how it was resolved."""
        self.warnings.append(message)

    def unread(self) -> list[str]:
        """Keys that nothing asked for; of a nested object, those inside it."""
        keys = []
        for key, value in self.raw.items():
            inside = {path for path in self._read if path.startswith(f"{key}.")}
            if key in self._read:
                continue
            if inside and isinstance(value, dict):
                keys += [f"{key}.{k}" for k in value if f"{key}.{k}" not in inside]
            else:
                keys.append(key)
        return sorted(keys)

    def _at(self, path: str) -> Any:
        value: Any = self.raw
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value


def check_depth(reader: ConfigReader, depth: Any) -> None:
    """
    Raise `ValueError` if config.json and weights differ in the number of draft layers; before a
    model of that depth is built.
    """
    if type(depth) is not int or depth < 1:
        raise ValueError(
            f"{reader.source}: num_hidden_layers must be an integer of at least 1, found {depth!r}."
        )
    stored = {name.split(".")[1] for name in reader.tensors if name.startswith("layers.")}
    if stored and len(stored) != depth:
        raise ValueError(
            f"{reader.source}: num_hidden_layers is {depth}, and the weights hold {len(stored)} "
            "draft layers. The two come from different checkpoints, or the files are incomplete."
        )


def block_layout(
    reader: ConfigReader, width: int, stated: bool | None, override: str | None
) -> dict[str, Any]:
    """
    γ and the layout of a block of `width` slots, as fields of [`DSparkConfig`].

    Args:
        stated (`bool`, *optional*): whether the anchor predicts, as far as the checkpoint says.
        override (`str`, *optional*): `"anchor_first"` or `"infill"` decides instead.

    Raises:
        `ValueError`: neither says, or the block is too short for the layout.
    """
    if override is not None:
        if override not in BLOCK_LAYOUTS:
            raise ValueError(
                f"block_layout is {override!r}; it can be {' or '.join(map(repr, BLOCK_LAYOUTS))}."
            )
        if stated is not None and stated != (override == ANCHOR_FIRST):
            reader.warn(f"block_layout={override!r} overrides what the checkpoint says.")
        stated = override == ANCHOR_FIRST
        reader.by_rule("anchor_predicts", f"block_layout={override!r} given by the caller")
    if stated is None:
        raise UndecidedLayoutError(
            f"{reader.source}: nothing in config.json says whether the anchor slot of a block "
            "predicts the first draft token. Ask the author, or find out with `dspark-hf probe`, "
            "and pass block_layout='anchor_first' or 'infill'."
        )
    if not isinstance(width, int) or isinstance(width, bool) or width < (1 if stated else 2):
        raise ValueError(
            f"{reader.source}: block_size must be an integer of at least {1 if stated else 2} "
            f"in the {ANCHOR_FIRST if stated else INFILL} layout, found {width!r}."
        )
    return {"block_size": width if stated else width - 1, "anchor_predicts": stated}


def refuse_block_layout(reader: ConfigReader, layout: str | None) -> None:
    """Raise `ValueError` where a block layout is given for a drafter that has no blocks."""
    if layout is not None:
        raise ValueError(
            f"{reader.source} is an Eagle3 drafter, which drafts token by token and has no blocks; "
            "leave block_layout out."
        )


def stated_layout(reader: ConfigReader) -> bool | None:
    """
    Whether the anchor predicts, where one of the two keys for it is there.

    Raises:
        `ValueError`: they contradict each other.
    """
    shifted, stated = (
        reader.flag("anchor_predicts", f"dflash_config.{key}", key)
        for key in ("shift_label", "sample_from_anchor")
    )
    if shifted is not None and stated is not None and shifted != stated:
        raise ValueError(
            f"{reader.source}: config.json says shift_label={shifted} and "
            f"sample_from_anchor={stated}, and both tell whether the anchor slot predicts. Ask the "
            "author which holds."
        )
    return stated if stated is not None else shifted


def stored_matrices(reader: ConfigReader) -> dict[str, bool]:
    """Whether the file holds the embedding and the head, as fields of the config."""
    is_stored = {}
    for name, tensor in _MATRICES.items():
        is_stored[name] = tensor in reader.tensors
        state = "stored" if is_stored[name] else "absent: the target lends it"
        reader.by_rule(name, f"{tensor} is {state}")
    if list(is_stored.values()) == [True, False] and reader.raw.get("tie_word_embeddings"):
        reader.warn(
            "tie_word_embeddings is true, and of the two matrices only the embedding is stored: "
            "the head is the target's, which is the same matrix where the target ties its own."
        )
    return is_stored


def refuse_negative_taps(reader: ConfigReader, taps: Any) -> None:
    """Raise `ValueError` for a tap id that counts from the end; -1 is DeepSpec DSpark's alone."""
    if isinstance(taps, list) and any(type(layer) is int and layer < 0 for layer in taps):
        raise ValueError(
            f"{reader.source}: the tap ids are {taps}; those of this layout count the target's "
            "layers from 0, and what a negative one was trained on cannot be told. Ask the author."
        )


def hidden_state_taps(reader: ConfigReader, key: str) -> list[int]:
    """Taps of a key whose ids count hidden states, as vLLM does: j is the output of layer j - 1."""
    ids = reader.require("target_layer_ids", key)
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{reader.source}: {key} must be a list of numbers from 0, found {ids!r}.")
    reader.origins["target_layer_ids"] += " (each minus 1)"
    return [i - 1 for i in ids]


def taps_by_rule(reader: ConfigReader, depth: Any) -> list[int]:
    """
    The taps of an EAGLE-3 file that states none.

    Raises:
        `UnknownDepthError`: the target's depth, which the rule is about, is not known.
    """
    if type(depth) is not int or depth < 6:
        raise UnknownDepthError(
            f"{reader.source}: config.json leaves the taps to the reference's rule (outputs of "
            "layers 1, L/2 - 1 and L - 4 of a target with L layers) and does not give L. Pass "
            f"num_target_layers=… of its target (found {depth!r})."
        )
    reader.by_rule("target_layer_ids", f"the reference's rule for {depth} layers")
    return [1, depth // 2 - 1, depth - 4]


def draft_vocabulary(reader: ConfigReader, vocab_size: Any, default: int | None = None) -> Any:
    """
    V_d of a reduced draft vocabulary, `None` for a full one: a size that equals the target's.

    Raises:
        `ValueError`: fewer tokens than the target has, and no map that says which, or one over
            another vocabulary.
    """
    size = reader.get("draft_vocab_size", "draft_vocab_size", default=default)
    if size is None or size == vocab_size:
        return None
    if reader.tensors and "d2t" not in reader.tensors:
        raise ValueError(
            f"{reader.source}: draft_vocab_size is {size} and vocab_size {vocab_size}, but the "
            "weights hold no d2t that says which of the target's tokens can be drafted. Take the "
            "complete weights of the original checkpoint."
        )
    members = reader.tensors.get("t2d")
    if members is not None and tuple(members.shape) != (vocab_size,):
        raise ValueError(
            f"{reader.source}: vocab_size is {vocab_size}, and t2d, which has an entry for each of "
            f"the target's tokens, has shape {tuple(members.shape)}. Take config.json from the "
            "original checkpoint."
        )
    return size


def vocabulary_tensors(reader: ConfigReader, size: int | None) -> dict[str, Any]:
    """
    How the map of a draft vocabulary is stored in published layouts, for a [`Reading`]; `size` is
    what `draft_vocabulary` said.
    """
    names = set(reader.tensors)
    if size is None:
        # SpecForge stores a map of the full vocabulary too, one that moves no token.
        is_stated = reader.raw.get("draft_vocab_size") is not None
        return {"renames": {}, "unneeded": frozenset({"d2t", "t2d"} & names if is_stated else ())}
    return {
        "renames": {"d2t": "draft_to_target"} if "d2t" in names else {},
        # Which tokens can be drafted, once more: compared with the map and not kept.
        "unneeded": frozenset({"t2d"} & names),
        "vocabulary_offsets": "d2t" in names,
    }
