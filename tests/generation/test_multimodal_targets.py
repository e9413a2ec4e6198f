"""Targets that see images, with several rows."""

import pytest
import torch
from transformers import (
    Exaone4_5_Config,
    Exaone4_5_ForConditionalGeneration,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GitConfig,
    GitForCausalLM,
    MllamaConfig,
    MllamaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from batches import SMALL_LAYERS as SHARED
from batches import check_rows as check
from batches import make_prompts, pad_left
from tiny import make_drafter

IMAGE, IMAGE_START, IMAGE_END = 90, 91, 92
PATCH = {"patch_size": 4, "num_attention_heads": 2, "num_hidden_layers": 2}


def qwen_with_images():
    """Positions of three coordinates; an image of 4 x 4 patches is four tokens."""
    vision = {"depth": 4, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "patch_size": 4}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        text_config={**SHARED, "rope_parameters": rope},
        vision_config={**vision, "intermediate_size": 48, "fullatt_block_indexes": [1]},
        image_token_id=IMAGE,
        vision_start_token_id=IMAGE_START,
        vision_end_token_id=IMAGE_END,
    )
    images = {
        "pixel_values": torch.randn(2 * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
    }
    return Qwen2_5_VLForConditionalGeneration(config), images, "mm_token_type_ids"


def gemma_with_images():
    """Sliding layers, and images that see themselves in both directions."""
    layers = ["sliding_attention", "full_attention"] * 2
    config = Gemma3Config(
        text_config={**SHARED, "sliding_window": 8, "layer_types": layers},
        vision_config={**PATCH, "hidden_size": 32, "intermediate_size": 48, "image_size": 16},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=IMAGE_START,
        eoi_token_index=IMAGE_END,
    )
    images = {"pixel_values": torch.randn(2, 3, 16, 16)}
    return Gemma3ForConditionalGeneration(config), images, "token_type_ids"


@pytest.mark.parametrize("make", [qwen_with_images, gemma_with_images])
@pytest.mark.parametrize("with_images", [False, True])
def test_multimodal_targets(make, with_images):
    """B158: taps of the text model; a row without an image beside two that have one."""
    torch.manual_seed(0)
    target, images, types = make()
    target.eval()
    with torch.no_grad():
        for weight in target.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    prompts = [prompt % 80 + 3 for prompt in make_prompts([6, 3, 8])]
    options = {}
    if with_images:
        image = torch.tensor([[IMAGE_START, *[IMAGE] * 4, IMAGE_END]])
        prompts[1:] = [torch.cat((p[:, :1], image, p[:, 1:]), dim=1) for p in prompts[1:]]
        options = {**images, types: (pad_left(prompts)["input_ids"] == IMAGE).long()}
    target.generation_config.pad_token_id = 0
    check(target, prompts=prompts, **options)


VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
}


def with_weights(target):
    """Random weights that make every choice depend on the context."""
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
            elif "gate" in name:
                weight.fill_(1.0)
    target.generation_config.pad_token_id = 0
    return target.eval()


def test_a_target_that_drops_the_positions_it_is_given_goes_in_lock_step():
    """Exaone 4.5 counts columns instead, and a row that was moved would stand in other ones."""
    torch.manual_seed(0)
    config = Exaone4_5_Config(
        text_config={**SHARED, "model_type": "exaone4", "sliding_window": 64},
        vision_config={**VISION, "fullatt_block_indexes": [1]},
        image_token_id=IMAGE,
    )
    target = with_weights(Exaone4_5_ForConditionalGeneration(config))
    check(target, prompts=[prompt % 80 + 3 for prompt in make_prompts([6, 6])])


@pytest.mark.parametrize("with_image", [False, True])
def test_the_check_of_a_recurrent_target_leaves_the_positions_of_the_batch_alone(with_image):
    """Qwen3.5 keeps them on the model; the first drafted call is the one that checks."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    text = {**SHARED, "rope_parameters": {**rope, "mrope_section": [2, 1, 1]}}
    for name in ("key", "value"):
        text |= {f"linear_num_{name}_heads": 2, f"linear_{name}_head_dim": 8}
    config = Qwen3_5Config(
        text_config=text,
        vision_config={**VISION, "num_position_embeddings": 16},
        image_token_id=IMAGE,
        vision_start_token_id=IMAGE_START,
        vision_end_token_id=IMAGE_END,
    )
    target = with_weights(Qwen3_5ForConditionalGeneration(config))
    prompts, options = [prompt % 80 + 3 for prompt in make_prompts([6, 6])], {}
    if with_image:
        image = torch.tensor([[IMAGE_START, *[IMAGE] * 4, IMAGE_END]])
        prompts = [torch.cat((prompts[0][:, :2], image, prompts[0][:, 2:]), dim=1)]
        options = {
            "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": (prompts[0] == IMAGE).long(),
        }
    check(target, prompts=prompts, new_tokens=10, **options)


def mllama():
    """Layer 1 looks at images; one of 4 x 4 patches and a class token is 17 keys."""
    torch.manual_seed(0)
    text = {name: value for name, value in SHARED.items() if value is not None}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "max_num_tiles": 1,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]],
    }
    config = MllamaConfig(
        text_config={**text, "cross_attention_layers": [1], "rope_parameters": rope},
        vision_config=vision,
        image_token_index=96,
    )
    return with_weights(MllamaForConditionalGeneration(config))


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("with_images", [False, True])
def test_layers_that_attend_to_images_keep_them(cache, with_images):
    """Their keys are not columns of the text, so no rejected draft takes any of them out."""
    target, prompts, options = mllama(), make_prompts([6, 3]), {}
    if with_images:
        options = {
            "pixel_values": torch.randn(2, 1, 1, 3, 16, 16),
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long),
            "cross_attention_mask": torch.ones(2, 6, 1, 1, dtype=torch.long),
        }
    check(target, prompts=prompts, cache_implementation=cache, **options)
    if with_images and cache is None:
        # Without the mask, attention over images is causal in blocks and not in single steps.
        del options["cross_attention_mask"]
        with pytest.raises(ValueError, match="gets images and no cross_attention_mask"):
            target.generate(
                **pad_left(prompts), **options, assistant_model=make_drafter(), max_new_tokens=4
            )


def test_positions_that_are_in_no_input_are_refused():
    """GIT puts an image in front of the text and into the cache; no mask has columns for it."""
    torch.manual_seed(0)
    sizes = {name: value for name, value in SHARED.items() if value is not None}
    vision = {**PATCH, "hidden_size": 32, "intermediate_size": 48, "image_size": 16}
    target = GitForCausalLM(GitConfig(vision_config=vision, **sizes)).eval()
    with pytest.raises(ValueError, match="GitForCausalLM holds 23 positions after a prompt of 6"):
        target.generate(
            **pad_left(make_prompts([6, 3])),
            pixel_values=torch.randn(2, 3, 16, 16),
            assistant_model=make_drafter(),
            max_new_tokens=4,
        )
