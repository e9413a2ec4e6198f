"""Kinds of targets with several rows: experts, sinks, adapters, offloading, compiled, pipelines."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BigBirdConfig,
    BigBirdForCausalLM,
    BitsAndBytesConfig,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MoshiConfig,
    MoshiForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from batches import SMALL_LAYERS as SHARED
from batches import check_rows as check
from batches import make_prompts, pad_left, script_rows
from dspark_hf.losslessness import greedy_gaps
from tiny import make_drafter, make_target

EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
TARGETS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHARED, **EXPERTS)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHARED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SHARED, **EXPERTS, sliding_window=8, attn_implementation="eager")
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_experts_and_sinks(name):
    """B148."""
    torch.manual_seed(0)
    check(TARGETS[name]().eval())


CONTEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "max_position_embeddings": 24,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WITH_TABLES = {
    "gpt_neo": lambda: GPTNeoForCausalLM(
        GPTNeoConfig(
            **CONTEXT,
            num_layers=4,
            num_heads=2,
            attention_types=[[["global", "local"], 2]],
            window_size=8,
            initializer_range=0.4,
        )
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            **CONTEXT,
            num_hidden_layers=4,
            num_attention_heads=2,
            ffn_dim=48,
            word_embed_proj_dim=32,
            init_std=0.4,
        )
    ),
    "gptj": lambda: GPTJForCausalLM(
        GPTJConfig(**CONTEXT, n_layer=4, n_head=2, rotary_dim=8, initializer_range=0.4)
    ),
}


@pytest.mark.parametrize("name", WITH_TABLES)
def test_drafts_stay_within_a_table_of_positions(name):
    """
    B065: rows of all lengths up to its end, and a call that may go beyond it but stops before.
    """
    torch.manual_seed(0)
    target = WITH_TABLES[name]().eval()
    target.generation_config.pad_token_id = 0
    check(target, prompts=make_prompts([4, 12, 12]), new_tokens=12)
    prompt = make_prompts([18])[0]
    text = target.generate(prompt, max_new_tokens=7, do_sample=False)
    options = {"eos_token_id": int(text[0, -1]), "max_new_tokens": 40, "do_sample": False}
    expected = target.generate(prompt, **options)
    drafter = script_rows(make_drafter(), [text[0]], [4])
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), expected)
    if name != "gptj":  # Its table was not learned, and such may grow.
        with pytest.raises(ValueError, match=r"prompt has 24 tokens.*has 24 positions"):
            target.generate(make_prompts([24])[0], assistant_model=drafter, max_new_tokens=2)


def test_a_window_that_blocks_look_past_is_refused():
    """Moshi's mask is causal and no more; within its window the text is exact."""
    sizes = {name: value for name, value in SHARED.items() if name != "intermediate_size"}
    torch.manual_seed(0)
    config = MoshiConfig(**sizes, ffn_dim=64, sliding_window=12, num_codebooks=2)
    target, prompt = MoshiForCausalLM(config).eval(), make_prompts([6])[0]
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = target.generate(prompt, **options)
    drafter = script_rows(make_drafter(), [expected[0]], [3])
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), expected)
    with pytest.raises(ValueError, match=r"past its window of 12 .* may get 13 long"):
        target.generate(prompt, assistant_model=drafter, max_new_tokens=7)


def test_a_target_that_reads_in_both_directions_is_refused_before_it_drafts():
    """In a block, tokens would see the drafts behind them. A decoder may say the same of itself."""
    sizes = {name: value for name, value in SHARED.items() if "head" not in name}
    torch.manual_seed(0)
    config = BigBirdConfig(**sizes, num_attention_heads=2)
    with pytest.raises(ValueError, match="BigBirdForCausalLM attends to what follows"):
        BigBirdForCausalLM(config).eval().generate(
            make_prompts([6])[0], assistant_model=make_drafter(), max_new_tokens=4
        )
    check(neox())


def neox():
    """A decoder that says it is none."""
    sizes = {name: value for name, value in SHARED.items() if "head" not in name}
    config = GPTNeoXConfig(**sizes, num_attention_heads=2, is_decoder=False)
    return GPTNeoXForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_active_switched_off_and_merged():
    """B109."""
    from peft import LoraConfig, get_peft_model

    target = get_peft_model(make_target("qwen3"), LoraConfig(r=2, target_modules=["q_proj"]))
    layer = target.base_model.model.model.layers[0]
    torch.nn.init.normal_(layer.self_attn.q_proj.lora_B["default"].weight)
    batch = pad_left(make_prompts([6]))
    with target.disable_adapter():
        check(target)
        without = target(**batch).logits
    check(target)
    # One adapter for each row, which stays with it when others finish.
    target.eval()
    check(target, adapter_names=["default", "__base__", "default"])
    adapted = target(**batch).logits
    merged = target.merge_and_unload()
    check(merged)
    assert not torch.allclose(adapted, without, atol=1e-2)
    torch.testing.assert_close(merged(**batch).logits, adapted, atol=1e-3, rtol=1e-3)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_soft_prompts_are_refused_before_compute(kind):
    """B109: their positions are in the target's cache and in none of the caller's tensors."""
    import peft

    config = getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM")
    target = peft.get_peft_model(make_target("llama"), config)
    with pytest.raises(ValueError, match=f"{kind} puts positions in front"):
        target.generate(
            **pad_left(make_prompts([6, 3, 8])), assistant_model=make_drafter(), max_new_tokens=4
        )


def test_several_residual_streams_in_front_of_the_batch_are_refused_before_compute():
    sizes = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "laurel_rank": 4}
    config = Gemma3nTextConfig(
        **{**SHARED, "intermediate_size": [48] * 4},
        **sizes,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    with pytest.raises(ValueError, match="Gemma3nForCausalLM passes 4 residual streams"):
        Gemma3nForCausalLM(config).generate(
            make_prompts([6])[0], assistant_model=make_drafter(), max_new_tokens=4
        )


@pytest.mark.parametrize("bits", [4, 8])
def test_targets_quantised_by_bitsandbytes(tmp_path, bits):
    """
    Four bits are exact in float32, or nearly so on CPUs where their kernel rounds to bfloat16.
    Eight bits are not: activations are rounded in float16, with outliers looked for in all
    positions of a forward together, so blocks and single tokens round differently and near-ties may
    fall otherwise.
    """
    # Its CPU kernels want 64 inputs and 32 outputs.
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    make_target("llama", **sizes).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4"
    )
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    kind = type(target.model.layers[0].mlp.up_proj).__name__
    assert kind == ("Linear4bit" if bits == 4 else "Linear8bitLt")
    drafter = make_drafter(target_hidden_size=64)
    if bits == 4:
        check(target, drafter=drafter)
    else:
        prompt = make_prompts([6])[0]
        found = target.generate(prompt, assistant_model=drafter, max_new_tokens=14, do_sample=False)
        assert float(greedy_gaps(target, found, 6).max()) <= 0.25


def test_layers_offloaded_by_accelerate(tmp_path):
    from accelerate import cpu_offload, disk_offload

    cpu = torch.device("cpu")
    check(cpu_offload(make_target("qwen3"), execution_device=cpu))
    check(disk_offload(make_target("qwen3"), str(tmp_path), cpu))
    # Whose device is none: rows that need no mask, and a check that runs the target.
    check(cpu_offload(neox(), execution_device=cpu), prompts=make_prompts([6, 6, 6]))


def test_several_samples_of_one_prompt_are_independent_and_repeatable():
    """B061: the seed decides, and rows draw numbers of their own."""
    target, prompt = make_target("qwen3"), make_prompts([6])[0]
    options = {
        "max_new_tokens": 12,
        "do_sample": True,
        "temperature": 2.0,
        "num_return_sequences": 4,
        "assistant_model": make_drafter(),
    }
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(target.generate(prompt, **options))
    assert outputs[0].shape == (4, 18)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert len({tuple(row.tolist()) for row in outputs[0]}) == 4


def test_each_row_has_its_targets_distribution():
    """
    χ² of the first two tokens of each row against exact probabilities; 1200 draws a row. The bound
    is crossed by an exact sampler once in 10⁴ runs.
    """
    from scipy.stats import chi2

    from dspark_hf.losslessness import pair_probabilities

    target, prompts = make_target("qwen3"), make_prompts([4, 2])
    batch, repeats, top_k = pad_left(prompts), 1200, 3
    exact = [pair_probabilities(target, prompt, top_k) for prompt in prompts]
    ids = batch["input_ids"].repeat_interleave(repeats, dim=0)
    torch.manual_seed(5)
    found = target.generate(
        ids,
        attention_mask=batch["attention_mask"].repeat_interleave(repeats, dim=0),
        assistant_model=make_drafter(),
        max_new_tokens=3,
        do_sample=True,
        top_k=top_k,
    )
    for row, probabilities in enumerate(exact):
        drawn = found[row * repeats : (row + 1) * repeats, 4:6].tolist()
        seen = {pair: drawn.count(list(pair)) for pair in probabilities}
        assert sum(seen.values()) == repeats
        kept = {pair: p for pair, p in probabilities.items() if p * repeats >= 5}
        statistic = sum((seen[pair] - repeats * p) ** 2 / (repeats * p) for pair, p in kept.items())
        assert statistic < chi2.ppf(1 - 1e-4, len(kept))
