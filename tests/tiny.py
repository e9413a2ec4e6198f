"""Tiny float32 models built in code, a drafter for each, and drafters that are right on purpose."""

import dataclasses
from collections.abc import Callable

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspark_hf import DSparkConfig, DSparkDrafter, Eagle3Config, Eagle3Drafter

VOCAB, HIDDEN, DEPTH, MASK_ID, EOS_ID = 97, 32, 4, 96, 2
FAMILIES = ("qwen3", "llama", "gpt2", "gemma2", "gemma3", "mistral_swa")
# Gemma 2 caps its attention logits, which the host computes in eager mode only.
FAMILIES_AND_KERNELS = [
    (family, attention)
    for family in FAMILIES
    for attention in ("sdpa", "eager")
    if (family, attention) != ("gemma2", "sdpa")
]


def make_target(
    family: str = "qwen3",
    vocab_size: int = VOCAB,
    seed: int = 0,
    attention: str = "sdpa",
    **overrides,
):
    """
    A random target whose greedy text varies; Gemma 2 caps its logits;
    the last three families slide over 8 positions.
    """
    torch.manual_seed(seed)
    shared = {
        "vocab_size": vocab_size,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
        "attn_implementation": attention,
        # Random weights of the usual size give nearly flat logits; these make every choice depend
        # on the context.
        "initializer_range": 0.4,
    }
    dense = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
    }
    builders: dict[str, Callable[[], PreTrainedModel]] = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**shared, **dense, **overrides})),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**{**shared, **dense, **overrides})),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(
                **{
                    **shared,
                    "n_embd": HIDDEN,
                    "n_layer": DEPTH,
                    "n_head": 2,
                    "n_positions": 256,
                    **overrides,
                }
            )
        ),
        "gemma2": lambda: Gemma2ForCausalLM(
            Gemma2Config(
                **{
                    **shared,
                    **dense,
                    "query_pre_attn_scalar": 16,
                    "sliding_window": 8,
                    "final_logit_softcapping": 5.0,
                    "attn_logit_softcapping": 20.0,
                    "attn_implementation": "eager",
                    **overrides,
                }
            )
        ),
        "gemma3": lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(
                **{
                    **shared,
                    **dense,
                    "query_pre_attn_scalar": 16,
                    "sliding_window": 8,
                    "layer_types": ["sliding_attention", "full_attention"] * 2,
                    **overrides,
                }
            )
        ),
        "mistral_swa": lambda: MistralForCausalLM(
            MistralConfig(**{**shared, **dense, "sliding_window": 8, **overrides})
        ),
    }
    return builders[family]().eval()


def make_drafter(
    vocab_size: int = VOCAB,
    block_size: int = 4,
    taps: tuple[int, ...] = (0, 2),
    markov: str | None = "vanilla",
    confidence: bool = True,
    stored: bool = True,
    seed: int = 1,
    num_target_layers: int = DEPTH,
    target_hidden_size: int = HIDDEN,
    **overrides,
) -> DSparkDrafter:
    """A random drafter for `make_target`."""
    torch.manual_seed(seed)
    backbone = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )
    config = DSparkConfig(
        backbone_config=backbone,
        block_size=block_size,
        mask_token_id=vocab_size - 1,
        target_layer_ids=list(taps),
        num_target_layers=num_target_layers,
        target_hidden_size=target_hidden_size,
        vocab_size=vocab_size,
        markov_head_type=markov,
        markov_rank=8 if markov else 0,
        confidence_head=confidence,
        confidence_head_with_markov=confidence and markov is not None,
        stores_input_embeddings=stored,
        stores_output_embeddings=stored,
        initializer_range=0.4,
        **overrides,
    )
    return DSparkDrafter(config).eval()


def make_eagle3(
    vocab_size: int = VOCAB,
    block_size: int = 4,
    taps: tuple[int, ...] = (0, 1, 2),
    stored: bool = True,
    seed: int = 1,
    num_target_layers: int = DEPTH,
    target_hidden_size: int = HIDDEN,
    **overrides,
) -> Eagle3Drafter:
    """A random Eagle3 drafter for `make_target`."""
    torch.manual_seed(seed)
    backbone = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )
    config = Eagle3Config(
        backbone_config=backbone,
        block_size=block_size,
        target_layer_ids=list(taps),
        num_target_layers=num_target_layers,
        target_hidden_size=target_hidden_size,
        vocab_size=vocab_size,
        stores_input_embeddings=stored,
        stores_output_embeddings=stored,
        initializer_range=0.4,
        **overrides,
    )
    return Eagle3Drafter(config).eval()


def make_scripted(drafter, continuation: torch.Tensor, num_right: int):
    """
    Replace the drafter's proposals: the first `num_right` tokens of a block are those of
    `continuation`, the rest are wrong. `continuation` (1, length) is the whole text, prompt
    included, that the target will generate.
    """
    draft = drafter.draft

    def scripted(context, anchor_ids, **kwargs):
        block = draft(context, anchor_ids, **kwargs)
        # `input_ids` ends with the anchor; what follows it is what a perfect drafter would say.
        start = kwargs["input_ids"].shape[1]
        known = continuation[:, start : start + block.tokens.shape[1]]
        tokens = torch.zeros_like(block.tokens)
        tokens[:, : known.shape[1]] = known
        wrong = (tokens + 1) % drafter.config.vocab_size
        right = torch.arange(tokens.shape[1]) < num_right
        return dataclasses.replace(block, tokens=torch.where(right, tokens, wrong))

    drafter.draft = scripted
    return drafter


def make_prompt(length: int = 6, vocab_size: int = VOCAB, seed: int = 3) -> torch.Tensor:
    """Token ids (1, length) that are neither pad, eos nor mask."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size - 1, (1, length), generator=generator)
