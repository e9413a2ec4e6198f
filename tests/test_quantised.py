"""FP8, FP4 and E8M0: values against hand-computed bytes."""

import pytest
import torch
from safetensors import safe_open
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

from checkpoints import GOLDEN
from dspark_hf.backbones.packed_experts import PackedExperts
from dspark_hf.quantised import (
    decode_e8m0,
    dequantise_fp4,
    dequantise_fp8,
    quantise_fp8,
    round_to_fp8,
)
from tiny_v4 import V4_QUANTISED, v4_config


def scales(*values):
    return torch.tensor(values, dtype=torch.uint8)


def test_e8m0_is_a_power_of_two():
    found = decode_e8m0(scales(0, 126, 127, 130, 254))
    assert found.tolist() == [2.0**-127, 0.5, 1.0, 8.0, 2.0**127]
    assert decode_e8m0(scales(255)).isnan().all()
    # As bytes and as the type that safetensors gives.
    assert decode_e8m0(scales(120).view(torch.float8_e8m0fnu)).tolist() == [2.0**-7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp4_has_the_low_nibble_first(dtype):
    codes = torch.arange(32) % 16
    packed = (codes[0::2] | codes[1::2] << 4).to(torch.uint8)[None]
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = torch.tensor(values + [-value for value in values]).repeat(2)[None]
    found = dequantise_fp4(packed, scales(127)[None], dtype)
    assert found.dtype == dtype
    assert torch.equal(found.float(), expected)
    # Code 8 is a negative zero.
    assert torch.signbit(found[0, 8])
    # The stored type is signed.
    assert torch.equal(dequantise_fp4(packed.view(torch.int8), scales(128)[None], dtype), 2 * found)


def test_fp4_scales_hold_for_32_columns_of_one_row():
    packed = torch.full((2, 3, 32), 0x22, dtype=torch.uint8)
    scale = torch.tensor(
        [[[127, 128], [129, 130], [131, 132]], [[126, 125], [124, 123], [122, 121]]]
    )
    found = dequantise_fp4(packed, scale.to(torch.uint8), torch.float32)
    assert found.shape == (2, 3, 64)
    assert torch.equal(found[..., ::32], 2.0 ** (scale.float() - 127))
    assert torch.equal(found[..., 31::32], 2.0 ** (scale.float() - 127))


def test_fp8_scales_hold_for_blocks_of_128():
    weight = torch.full((130, 257), 1.5).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 128, 129], [126, 125, 124]], dtype=torch.uint8)
    found = dequantise_fp8(weight, scale.view(torch.float8_e8m0fnu))
    assert found[0, 0] == found[127, 127] == 1.5
    assert found[127, 128] == found[0, 255] == 3.0
    assert found[0, 256] == 6.0
    assert found[128, 0] == 0.75
    assert found[129, 256] == 1.5 / 8
    with pytest.raises(ValueError, match=r"\(130, 257\) has scales of shape \(2, 2\).*\(2, 3\)"):
        dequantise_fp8(weight, scale[:, :2])


def test_decoding_equals_the_reference():
    """The values that an independent implementation decoded from the golden checkpoint."""
    folder = GOLDEN / V4_QUANTISED
    stored = {}
    for number in (2, 3):
        with safe_open(folder / f"model-0000{number}-of-00004.safetensors", "pt") as file:
            stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    with safe_open(folder / "golden_dequantized.safetensors", "pt") as reference:
        names = list(reference.keys())
        for name in names:
            weight, scale = stored[name], stored[name.removesuffix("weight") + "scale"]
            decoded = (
                dequantise_fp4(weight, scale, torch.float32)
                if weight.dtype == torch.int8
                else dequantise_fp8(weight, scale)
            )
            assert torch.equal(decoded, reference.get_tensor(name)), name
    assert any("experts" in name for name in names)
    assert any("wkv" in name for name in names)


def test_packed_experts_compute_what_the_hosts_do_past_the_limit():
    """Selected, clamped on both sides, weighed and summed; the golden activations stay below it."""
    config = v4_config(swiglu_limit=1.5)
    config._experts_implementation = "eager"
    packed, host = PackedExperts(config), DeepseekV4Experts(config)
    for name, tensor in packed.named_parameters():
        low, high = (122, 126) if name.endswith("scale") else (0, 256)
        tensor.data = torch.randint(low, high, tensor.shape).to(torch.uint8)
    for name in ("gate_up", "down"):
        parts = (getattr(packed, f"{name}_{part}") for part in ("proj", "scale"))
        getattr(host, f"{name}_proj").data = dequantise_fp4(*parts, torch.float32)
    x, weights = torch.randn(7, 32), torch.rand(7, 2)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    torch.testing.assert_close(packed(x, chosen, weights), host(x, chosen, weights))


def test_fp8_values_are_found_again_exactly():
    """Encoding what was decoded, zeros and uneven edges included; nothing else can be encoded."""
    weight = (torch.randn(300, 200) * 100).to(torch.float8_e4m3fn)
    weight[:128, :128] = 0
    # Far below and above what the published kernels have for activations.
    scale = scales(90, 140, 104, 127, 100, 40).view(3, 2).view(torch.float8_e8m0fnu)
    values = dequantise_fp8(weight, scale)
    codes, scales_found = quantise_fp8(values.bfloat16())
    assert codes.shape == weight.shape
    assert torch.equal(dequantise_fp8(codes, scales_found), values)
    assert quantise_fp8(torch.randn(128, 128)) is None


def test_fp8_scales_are_the_smallest_that_fit():
    """448 is the largest value of a block at scale 1; above it the scale doubles."""
    for largest, byte in ((448.0, 127), (449.0, 128), (416.0, 127), (224.0, 126)):
        weight = torch.zeros(1, 4)
        weight[0, 0] = largest if largest != 449.0 else 480.0
        _, scale = quantise_fp8(weight)
        assert scale.view(torch.uint8).item() == byte


def test_activations_are_rounded_in_groups():
    """Hand-computed: 448 sets scale 1, 449 to 896 scale 2, tiny values the smallest scale."""
    x = torch.tensor([[448.0, 17.0, 0.3, -33.0], [450.0, 17.0, -0.001, 33.0]])
    found = round_to_fp8(x, 4)
    assert found[0].tolist() == [448.0, 16.0, 0.3125, -32.0]
    assert found[1].tolist() == [448.0, 16.0, 0.0, 32.0]
    # Other groups have scales of their own, and a group may be cut short.
    wide = torch.tensor([[448.0, 17.0, 0.001, 0.0011, 0.0012]])
    assert torch.equal(round_to_fp8(wide, 2)[:, :2], torch.tensor([[448.0, 16.0]]))
    torch.testing.assert_close(round_to_fp8(wide, 2)[:, 2:], wide[:, 2:], rtol=0.07, atol=0)
    assert (round_to_fp8(torch.full((1, 2), 1e-11), 2) == 0).all()
    assert round_to_fp8(x.bfloat16(), 4).dtype == torch.bfloat16
