"""
Drafters embedded in DeepSeek-V4 checkpoints: found, described and read out of `mtp.*` tensors.

Stage s of the drafter is stored under `mtp.{s}.` in runtime names, FP8 and FP4 quantised; embedding
and output head are the target's. The names `e_proj`, `h_proj` in place of `main_proj` are an
ordinary multi-token-prediction block, which base checkpoints carry at the same place.
"""

import math
import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import safe_open

from ..configuration_dspark import DSparkConfig
from ..quantised import FP8_BLOCK, dequantise_fp8
from .detection import DEEPSEEK_V4, UnsupportedCheckpointError
from .files import FLOAT_BYTES, TensorInfo, fetch, num_bytes, read_object
from .reading import ConfigReader, Reading, refuse_negative_taps

PREFIX = "mtp."

_BACKBONE_KEYS = (
    "hidden_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "rms_norm_eps",
    "hidden_act",
    "swiglu_limit",
    "hc_mult",
    "hc_eps",
    "hc_sinkhorn_iters",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "scoring_func",
    "routed_scaling_factor",
    "max_position_embeddings",
)
# What the host's layers do, whatever the config says.
_FIXED = {"n_shared_experts": 1, "norm_topk_prob": True, "num_key_value_heads": 1}

# Our name of each tensor of a stage outside the routed experts, and its name in the checkpoint.
_STAGE = {
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
}
_FIRST_STAGE = {"fc.weight": "main_proj.weight", "hidden_norm.weight": "main_norm.weight"}
_LAST_STAGE = {
    "norm.weight": "norm.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
    "markov_head.markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_head.markov_w2.weight",
    "confidence_head.proj.weight": "confidence_head.proj.weight",
    "confidence_head.proj.bias": "confidence_head.proj.bias",
}
# The routed experts of a stage are fused: of our tensor, the stored parts in the order of its rows.
_EXPERTS = {
    "mlp.experts.gate_up_proj": ("w1.weight", "w3.weight"),
    "mlp.experts.gate_up_scale": ("w1.scale", "w3.scale"),
    "mlp.experts.down_proj": ("w2.weight",),
    "mlp.experts.down_scale": ("w2.scale",),
}


def is_stored_part(name: str) -> bool:
    """Whether a tensor of the checkpoint belongs to the drafter and not to the target."""
    return name.startswith(PREFIX)


def read_deepseek_v4(reader: ConfigReader, **hub: Any) -> Reading:
    """
    The drafter that a DeepSeek-V4 checkpoint has inside. Of its tensors, the reader knows those
    that are the drafter's.

    Raises:
        [`UnsupportedCheckpointError`]: the checkpoint has none of them.
        `ValueError`: a key or a stage is missing, or a value is one that the host's layers do not
        implement.
    """
    if not reader.tensors:
        raise UnsupportedCheckpointError(
            f"{reader.source} is a DeepSeek-V4 target without mtp.* tensors: Transformers leaves "
            "them out when it saves a target. Load the drafter from the original repository."
        )
    body = shared_facts(reader)
    experts = body["n_routed_experts"]
    if isinstance(experts, int) and experts > len(reader.tensors):
        # Before the names of so many are made up.
        raise ValueError(
            f"{reader.source}: config.json has n_routed_experts {experts}, and the checkpoint has "
            f"{len(reader.tensors)} mtp.* tensors in all. Take all files from one revision of the "
            "original repository."
        )
    depth = reader.require("num_target_layers", "num_hidden_layers")
    stages = _num_stages(reader, depth, **hub)
    expert = reader.tensors.get("mtp.0.ffn.experts.0.w1.weight")
    confidence = f"mtp.{stages - 1}.confidence_head.proj"
    has_confidence = f"{confidence}.weight" in reader.tensors
    taps = reader.require("target_layer_ids", "dspark_target_layer_ids")
    refuse_negative_taps(reader, taps)
    reader.by_rule("anchor_predicts", "every DeepSeek-V4 drafter")
    reader.by_rule("confidence_head", "the tensors")
    config = DSparkConfig(
        backbone_config={
            **body,
            "num_hidden_layers": stages,
            "layer_types": ["sliding_attention"] * stages,
            "mlp_layer_types": ["moe"] * stages,
            "expert_dtype": "fp4" if expert is not None and expert.dtype == "I8" else None,
        },
        block_size=reader.require("block_size", "dspark_block_size"),
        mask_token_id=reader.require("mask_token_id", "dspark_noise_token_id"),
        target_layer_ids=taps,
        num_target_layers=depth,
        target_hidden_size=body["hidden_size"],
        vocab_size=body["vocab_size"],
        markov_head_type="vanilla",
        markov_rank=reader.require("markov_rank", "dspark_markov_rank"),
        confidence_head=has_confidence,
        confidence_head_with_markov=has_confidence,
        confidence_head_bias=f"{confidence}.bias" in reader.tensors,
        stores_input_embeddings=False,
        stores_output_embeddings=False,
        architectures=["DSparkDrafter"],
        dtype=reader.get("dtype", "dtype", "torch_dtype"),
        bos_token_id=reader.get("bos_token_id", "bos_token_id"),
        eos_token_id=reader.get("eos_token_id", "eos_token_id"),
        pad_token_id=reader.get("pad_token_id", "pad_token_id"),
    )
    # What is left of the config is about the target.
    return Reading(config, origins=reader.origins)


def shared_facts(reader: ConfigReader) -> dict[str, Any]:
    """
    What the draft layers have in common with their target: arguments of their config, from the
    target's.

    Raises:
        `ValueError`: a key is missing, or its value is one that the host's layers do not implement.
    """
    facts = {key: reader.require(key, key) for key in _BACKBONE_KEYS}
    for name, value in _FIXED.items():
        if facts[name] != value:
            raise ValueError(
                f"{reader.source}: config.json has {name} {facts[name]!r}; DeepSeek-V4 layers of "
                f"the host library implement {value!r} only."
            )
    return {
        "model_type": DEEPSEEK_V4,
        "vocab_size": reader.require("vocab_size", "vocab_size"),
        "rope_parameters": _rope_parameters(reader),
        **facts,
    }


def _num_stages(reader: ConfigReader, depth: int, **hub: Any) -> int:
    """
    Draft layers: `n_mtp_layers` of inference/config.json, else the surplus of `compress_ratios`
    over the layers; the stored stages must agree. `num_nextn_predict_layers` is 1 in most published
    files and means something else.
    """
    stored = {name.split(".")[1] for name in reader.tensors}
    path = fetch(reader.source, "inference/config.json", **hub)
    stated = None
    if path is not None:
        stated = read_object(path).get("n_mtp_layers")
        rule = "inference/config.json: n_mtp_layers"
    ratios = reader.get("compress_ratios", "compress_ratios")
    if stated is None and ratios:
        stated = len(ratios) - depth or None
        rule = "compress_ratios beyond the target's layers"
    if stated is None:
        stated, rule = len(stored), "the stored stages"
    reader.by_rule("num_draft_layers", rule)
    if stored != set(map(str, range(len(stored)))) or stated != len(stored):
        raise ValueError(
            f"{reader.source}: the drafter's stages [{', '.join(sorted(stored))}] are stored, and "
            f"{stated!r} of them, counted from 0, are stated ({rule}). Take config files, index "
            "and weights from one revision of the original repository."
        )
    return len(stored)


def _rope_parameters(reader: ConfigReader) -> dict[str, Any]:
    """
    Plain rotary embedding of the draft layers. The YaRN parameters and the other θ are those of the
    target's compressed layers; the host wants both places filled.
    """
    theta = reader.require("rope_theta", "rope_parameters.main.rope_theta", "rope_theta")
    rotated = reader.require("qk_rope_head_dim", "qk_rope_head_dim")
    plain = {
        "rope_type": "default",
        "rope_theta": theta,
        "partial_rotary_factor": rotated / reader.require("head_dim", "head_dim"),
    }
    return {"main": plain, "compress": dict(plain)}


def stored_parts(own: str, last_stage: int, num_experts: int) -> list[list[str]]:
    """
    Where the tensor that we call `own` is stored: one list of names, whose rows follow each other,
    for every expert; a single name for everything else.
    """
    if own in _FIRST_STAGE:
        return [[f"mtp.0.{_FIRST_STAGE[own]}"]]
    if own in _LAST_STAGE:
        return [[f"mtp.{last_stage}.{_LAST_STAGE[own]}"]]
    _, stage, rest = own.split(".", 2)
    if rest in _STAGE:
        return [[f"mtp.{stage}.{_STAGE[rest]}"]]
    return [
        [f"mtp.{stage}.ffn.experts.{expert}.{part}" for part in _EXPERTS[rest]]
        for expert in range(num_experts)
    ]


def stored_shapes(
    own_shapes: Mapping[str, tuple[int, ...]],
    config: DSparkConfig,
    tensors: Mapping[str, TensorInfo],
) -> dict[str, tuple[int, ...]]:
    """
    Names and shapes that a checkpoint of this drafter consists of, given those of our modules.
    Weights that are stored as FP8 have a scale.
    """
    backbone = config.backbone_config
    expected: dict[str, tuple[int, ...]] = {}
    for own, shape in own_shapes.items():
        parts = stored_parts(own, backbone.num_hidden_layers - 1, backbone.num_local_experts)
        if own.split(".", 2)[-1] in _EXPERTS:
            shape = (shape[1] // len(parts[0]), shape[2])
        for name in (name for names in parts for name in names):
            expected[name] = shape
            if name in tensors and tensors[name].dtype == "F8_E4M3":
                scale = name.removesuffix("weight") + "scale"
                expected[scale] = tuple(-(-size // FP8_BLOCK) for size in shape)
    return expected


def check_stored(
    own: Mapping[str, torch.Tensor],
    config: DSparkConfig,
    tensors: Mapping[str, TensorInfo],
    source: str,
) -> None:
    """
    Compare names, shapes and number formats of the stored tensors with what the drafter consists
    of.

    Args:
        own (`dict`): the drafter's state, of which shapes matter.
        config ([`DSparkConfig`]): its configuration.
        tensors (`dict`): the stored tensors.
        source (`str`): repository or folder, for messages.

    Raises:
        `ValueError`: listing the differences.
    """
    own_shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    expected = stored_shapes(own_shapes, config, tensors)
    is_packed = config.backbone_config.expert_dtype == "fp4"
    problems = [
        f"missing {name} {shape}" for name, shape in expected.items() if name not in tensors
    ]
    for name, tensor in tensors.items():
        if name not in expected:
            problems.append(f"unexpected {name} {tensor.shape}")
        elif tensor.dtype not in _known_formats(name, is_packed):
            problems.append(f"{name} is stored as {tensor.dtype}, which is not read here")
        elif tensor.shape != expected[name]:
            problems.append(f"{name} has shape {tensor.shape}, expected {expected[name]}")
    if problems:
        more = f" … and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(
            f"{source}: the mtp.* tensors are not those of the drafter that config.json describes: "
            f"{'; '.join(sorted(problems)[:8])}{more}. Weights are read in floating point or FP8 "
            "(F8_E4M3), experts also in packed FP4 (I8), scales in F8_E8M0. Take all files from "
            "one revision of the original repository."
        )


def _known_formats(name: str, is_packed: bool) -> tuple[str, ...]:
    if name.endswith(".scale"):
        return ("F8_E8M0",)
    if is_packed and ".ffn.experts." in name:
        return ("I8",)
    return ("F8_E4M3", *FLOAT_BYTES)


def num_parameters(tensors: Mapping[str, TensorInfo]) -> int:
    """Of stored tensors: a byte of packed FP4 holds two, scales are none."""
    per_value = {"I8": 2, "F8_E8M0": 0}
    return sum(
        (2 * (not name.endswith("_scale")) if info.dtype == "U8" else per_value.get(info.dtype, 1))
        * math.prod(info.shape)
        for name, info in tensors.items()
    )


def bytes_in_memory(own: Mapping[str, torch.Tensor]) -> int:
    """Of a drafter's state: packed experts as they are, other weights in bfloat16 or float32."""
    # Here and not above: dialects are told apart without the host's modeling code.
    from ..backbones.deepseek_v4 import FLOAT32_MODULES

    # As the host matches them: `norm` finds `hidden_norm` as well.
    float32 = re.compile(rf"(^|.)({'|'.join(FLOAT32_MODULES)})($|.)")
    return sum(
        tensor.numel() * (1 if tensor.dtype == torch.uint8 else 4 if float32.search(name) else 2)
        for name, tensor in own.items()
    )


def planned_files(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """
    What `dspark-hf inspect` says about the files of an embedded drafter before they are fetched:
    they are fetched whole.
    """
    per_file: dict[str, list[int]] = {}
    whole: dict[str, int] = {}
    for tensor in tensors.values():
        per_file.setdefault(tensor.file, []).append(num_bytes(tensor))
        whole[tensor.file] = tensor.file_bytes
    return [
        f"{file} ({len(sizes):,} tensors, {_gigabytes(sum(sizes), whole[file])})"
        for file, sizes in sorted(per_file.items())
    ]


def _gigabytes(own: int, whole: int) -> str:
    """Bytes of the drafter in a file, and those of the file where it holds more."""
    size = f"{own / 1e9:.2f} GB"
    return size if own == whole else f"{size} of a file of {whole / 1e9:.2f} GB"


class StoredDrafter:
    """
    The tensors of an embedded drafter, read one at a time. A context manager: one file is open at a
    time, so that no more than a shard is mapped beside what was read.

    Args:
        paths (`dict[str, str]`): local file of every tensor, by its stored name.
    """

    def __init__(self, paths: Mapping[str, str]):
        self._paths = paths
        self._path: str | None = None
        self._file: Any = None
        self._stack = ExitStack()

    def __enter__(self) -> "StoredDrafter":
        return self

    def __exit__(self, *error: Any) -> None:
        self._file = None
        self._stack.close()

    def state_dict(self, own_names: Collection[str], config: DSparkConfig) -> dict[str, Any]:
        """Our tensors: FP8 weights decoded to bfloat16, which is exact; FP4 experts as they are."""
        backbone = config.backbone_config
        state = {}
        for own in own_names:
            parts = stored_parts(own, backbone.num_hidden_layers - 1, backbone.num_local_experts)
            if own.split(".", 2)[-1] in _EXPERTS:
                state[own] = self._fuse(parts)
            else:
                state[own] = self._read(parts[0][0])
        return state

    def _fuse(self, parts: list[list[str]]) -> torch.Tensor:
        first = self._read(parts[0][0])
        rows, columns = first.shape
        fused = first.new_empty(len(parts), rows * len(parts[0]), columns)
        for expert, names in enumerate(parts):
            for i, name in enumerate(names):
                fused[expert, i * rows : (i + 1) * rows] = self._read(name)
        return fused

    def _read(self, name: str) -> torch.Tensor:
        if self._paths[name] != self._path:
            self._stack.close()
            self._path = self._paths[name]
            self._file = self._stack.enter_context(safe_open(self._path, framework="pt"))
        tensor = self._file.get_tensor(name)
        if tensor.dtype == torch.float8_e4m3fn:
            scale = self._read(name.removesuffix("weight") + "scale")
            return dequantise_fp8(tensor, scale).bfloat16()
        is_packed = tensor.dtype in (torch.int8, torch.float8_e8m0fnu)
        # A copy: what is read shares the mapped file, which would stay mapped as long as it lives.
        return tensor.view(torch.uint8) if is_packed else tensor.clone()
