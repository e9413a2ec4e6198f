"""A tiny DeepSeek-V4 target with every kind of layer, and the golden drafter."""

import functools

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV4Config, DeepseekV4ForCausalLM

from checkpoints import GOLDEN
from dspark_hf import DSparkConfig, DSparkDrafter

V4, V4_QUANTISED = "deepseek_v4_dspark", "deepseek_v4_dspark_quantized"
LAYER_TYPES = [
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
]
WINDOW, SPARSE_RATE, HEAVY_RATE = 8, 4, 8


@functools.cache
def golden(name=V4):
    return load_file(GOLDEN / name / "golden.safetensors")


@functools.cache
def golden_target():
    return AutoModelForCausalLM.from_pretrained(GOLDEN / V4, dtype=torch.float32).eval()


def load_golden_drafter(name=V4, bound=True, **options):
    """The drafter inside a golden checkpoint; `bound` gives it the recorded embedding and head."""
    drafter = DSparkDrafter.from_pretrained(GOLDEN / name, dtype=torch.float32, **options).eval()
    return bind_recorded(drafter, name) if bound else drafter


def bind_recorded(drafter, name=V4):
    record = golden(name)
    head = torch.nn.Linear(*record["head.weight"].shape[::-1], bias=False)
    head.weight.data = record["head.weight"]
    return drafter.bind(
        input_embeddings=torch.nn.Embedding.from_pretrained(record["embed.weight"]),
        output_embeddings=head,
    )


def v4_config(vocab_size=97, **overrides):
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "moe_intermediate_size": 32,
        "num_hidden_layers": len(LAYER_TYPES),
        "num_attention_heads": 2,
        "head_dim": 16,
        "qk_rope_head_dim": 4,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": LAYER_TYPES,
        "mlp_layer_types": ["moe"] * len(LAYER_TYPES),
        "compress_rates": {
            "compressed_sparse_attention": SPARSE_RATE,
            "heavily_compressed_attention": HEAVY_RATE,
        },
        "sliding_window": WINDOW,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "index_n_heads": 2,
        "index_head_dim": 8,
        # All entries are selected: random indexers tie at zero, and then even plain decoding in
        # chunks differs from one forward.
        "index_topk": 512,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return DeepseekV4Config(**{**fields, **overrides})


def make_v4_target(seed=0, **overrides):
    torch.manual_seed(seed)
    return DeepseekV4ForCausalLM(v4_config(**overrides)).eval()


def make_v4_drafter(vocab_size=97, taps=(1, 3), seed=1, expert_dtype=None, **overrides):
    """A random drafter of two DeepSeek-V4 layers for `make_v4_target`."""
    torch.manual_seed(seed)
    backbone = v4_config(
        vocab_size,
        num_hidden_layers=2,
        layer_types=["sliding_attention"] * 2,
        mlp_layer_types=["moe"] * 2,
        expert_dtype=expert_dtype,
    )
    config = DSparkConfig(
        backbone_config=backbone,
        mask_token_id=vocab_size - 1,
        target_layer_ids=list(taps),
        target_hidden_size=32,
        vocab_size=vocab_size,
        initializer_range=0.4,
        **{
            "num_target_layers": len(LAYER_TYPES),
            "block_size": 5,
            "markov_head_type": "vanilla",
            "markov_rank": 8,
            "confidence_head": True,
            "confidence_head_with_markov": True,
            "confidence_head_bias": False,
            "stores_input_embeddings": False,
            "stores_output_embeddings": False,
            **overrides,
        },
    )
    return DSparkDrafter(config).eval()
