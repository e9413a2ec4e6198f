"""The published DeepSeek-V4 checkpoints with a drafter: configurations, names, shapes, formats."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from checkpoints import GOLDEN, edit_config, read_json
from tiny_v4 import V4, V4_QUANTISED

INDEX = "model.safetensors.index.json"
SIZES = {
    "flash": {
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "routed_scaling_factor": 1.5,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
        "dspark_target_layer_ids": [40, 41, 42],
        "dspark_markov_rank": 256,
    },
    "pro": {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "moe_intermediate_size": 3072,
        "n_routed_experts": 384,
        "routed_scaling_factor": 2.5,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0, 0, 0],
        "dspark_target_layer_ids": [58, 59, 60],
        "dspark_markov_rank": 512,
    },
}


def published_config(name):
    """config.json of V4-Flash-DSpark or V4-Pro-DSpark."""
    raw = read_json(GOLDEN / V4_QUANTISED / "config.json")
    shared = {
        "vocab_size": 129280,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "num_experts_per_tok": 6,
        "num_hash_layers": 3,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "max_position_embeddings": 1048576,
        "dspark_noise_token_id": 128799,
    }
    return {**raw, **shared, **SIZES[name]}


def published_tensors(raw):
    """Name, type and shape of every tensor of a published drafter, from the sizes in the config."""
    hidden, heads, width = (
        raw[key] for key in ("hidden_size", "num_attention_heads", "moe_intermediate_size")
    )
    rank, groups, experts = (raw[key] for key in ("q_lora_rank", "o_groups", "n_routed_experts"))

    def fp8(name, rows, columns):
        scale = (-(-rows // 128), -(-columns // 128))
        return {f"{name}.weight": ("F8_E4M3", (rows, columns)), f"{name}.scale": ("F8_E8M0", scale)}

    def fp4(name, rows, columns):
        return {
            f"{name}.weight": ("I8", (rows, columns // 2)),
            f"{name}.scale": ("F8_E8M0", (rows, columns // 32)),
        }

    stages = []
    for stage in range(3):
        tensors = {
            "attn.attn_sink": ("F32", (heads,)),
            "attn.q_norm.weight": ("BF16", (rank,)),
            "attn.kv_norm.weight": ("BF16", (512,)),
            "attn_norm.weight": ("BF16", (hidden,)),
            "ffn_norm.weight": ("BF16", (hidden,)),
            "ffn.gate.weight": ("BF16", (experts, hidden)),
            "ffn.gate.bias": ("F32", (experts,)),
            **fp8("attn.wq_a", rank, hidden),
            **fp8("attn.wq_b", heads * 512, rank),
            **fp8("attn.wkv", 512, hidden),
            **fp8("attn.wo_a", groups * 1024, heads * 512 // groups),
            **fp8("attn.wo_b", hidden, groups * 1024),
        }
        for place in ("attn", "ffn"):
            tensors[f"hc_{place}_fn"] = ("F32", (24, 4 * hidden))
            tensors[f"hc_{place}_base"] = ("F32", (24,))
            tensors[f"hc_{place}_scale"] = ("F32", (3,))
        for part, shape in (
            ("w1", (width, hidden)),
            ("w3", (width, hidden)),
            ("w2", (hidden, width)),
        ):
            tensors |= fp8(f"ffn.shared_experts.{part}", *shape)
            for expert in range(experts):
                tensors |= fp4(f"ffn.experts.{expert}.{part}", *shape)
        if stage == 0:
            tensors |= fp8("main_proj", hidden, 3 * hidden)
            tensors["main_norm.weight"] = ("BF16", (hidden,))
        if stage == 2:
            markov = (raw["vocab_size"], raw["dspark_markov_rank"])
            tensors |= {
                "norm.weight": ("BF16", (hidden,)),
                "hc_head_fn": ("F32", (4, 4 * hidden)),
                "hc_head_base": ("F32", (4,)),
                "hc_head_scale": ("F32", (1,)),
                "markov_head.markov_w1.weight": ("BF16", markov),
                "markov_head.markov_w2.weight": ("BF16", markov),
                "confidence_head.proj.weight": ("BF16", (1, hidden + markov[1])),
            }
        stages.append({f"mtp.{stage}.{name}": value for name, value in tensors.items()})
    return stages


def write_sparse_checkpoint(folder, raw):
    """A checkpoint of full size whose weights take no space on disk: headers, and a hole."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    weight_map = {"embed.weight": "model-00001-of-00048.safetensors"}
    for number, tensors in zip((46, 47, 48), published_tensors(raw), strict=True):
        file, header, end = f"model-000{number}-of-00048.safetensors", {}, 0
        for name, (dtype, shape) in tensors.items():
            size = torch.Size(shape).numel() * {"F32": 4, "BF16": 2}.get(dtype, 1)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
            weight_map[name] = file
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return folder


def write_quantised_target(folder):
    """The golden target with its drafter, small and whole, in the published number formats."""
    shutil.copytree(GOLDEN / V4, folder)
    fp8 = (
        "wq_a",
        "wq_b",
        "wkv",
        "wo_a",
        "wo_b",
        "main_proj",
        *(f"experts.w{i}" for i in (1, 2, 3)),
    )
    weight_map = {}
    for path in sorted(folder.glob("model-0*.safetensors")):
        stored = {}
        for name, value in load_file(path).items():
            base = name.removesuffix(".weight")
            if ".ffn.experts." in name:
                stored[name], stored[f"{base}.scale"] = fp4_of(value)
            elif base.endswith(fp8) and ".compressor." not in name:
                stored[name], stored[f"{base}.scale"] = fp8_of(value)
            elif base.endswith(("attn_sink", "gate.bias", "_fn", "_base", "_scale", "ape")):
                stored[name] = value
            else:
                stored[name] = value.bfloat16() if value.is_floating_point() else value
        save_file(stored, path, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(stored, path.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    raw = read_json(GOLDEN / V4_QUANTISED / "config.json")
    formats = {key: raw[key] for key in ("quantization_config", "expert_dtype", "torch_dtype")}
    edit_config(folder, **formats)
    return folder


def power_above(ratio):
    """Exponent of the smallest power of two that is no smaller, and its E8M0 byte."""
    exponent = torch.ceil(torch.log2(ratio.clamp(min=1e-30)))
    return exponent, (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def fp8_of(value):
    """A weight of no more than 128 rows."""
    largest = torch.stack([block.abs().max() for block in value.split(128, dim=1)])[None]
    exponent, scale = power_above(largest / 448)
    factors = 2.0 ** exponent.repeat_interleave(128, dim=1)[:, : value.shape[1]]
    return (value / factors).to(torch.float8_e4m3fn), scale


def fp4_of(value):
    groups = value.unflatten(-1, (-1, 32))
    exponent, scale = power_above(groups.abs().amax(dim=-1) / 6)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    distances = ((groups / 2.0 ** exponent[..., None]).abs()[..., None] - grid).abs()
    codes = (distances.argmin(dim=-1) + 8 * (groups < 0)).flatten(-2)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8), scale
