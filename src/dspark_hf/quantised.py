"""
The quantised number formats of DeepSeek checkpoints: tensors in, tensors out.

FP8 weights are E4M3 with one scale for each block of 128 x 128; FP4 weights are two E2M1 codes to a
byte along the input axis, the low nibble first, with one scale for each 32 columns. Scales are E8M0
bytes b, worth 2^(b - 127); 255 is not a number. Decoding is exact in bfloat16 and float32.
"""

import functools

import torch
from torch import nn

FP8_BLOCK = 128
FP4_GROUP = 32
FP8_MAX = 448.0

# E2M1: values of the codes 0 to 7; 8 to 15 are their negatives.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Float32 values of E8M0 scales, given as `float8_e8m0fnu` or as raw bytes."""
    return _e8m0_table(scale.device)[_as_bytes(scale).long()]


def dequantise_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float32 values `(out, in)` of an E4M3 weight with E8M0 scales per block."""
    rows, columns = weight.shape
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    if tuple(scale.shape) != blocks:
        raise ValueError(
            f"An FP8 weight of shape {(rows, columns)} has scales of shape {tuple(scale.shape)}; "
            f"blocks of {FP8_BLOCK} x {FP8_BLOCK} need {blocks}."
        )
    factors = decode_e8m0(scale).repeat_interleave(FP8_BLOCK, 0)[:rows]
    return weight.float() * factors.repeat_interleave(FP8_BLOCK, 1)[:, :columns]


def quantise_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """
    E4M3 values and E8M0 scales that `dequantise_fp8` turns into exactly `weight` `(out, in)`, or
    `None` if there are none: only a weight that was decoded from this format has them.
    """
    rows, columns = weight.shape
    padded = nn.functional.pad(weight.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))
    exponent = _scale_exponent(blocks.abs().amax(dim=(1, 3)), smallest=FP8_MAX * 2.0**-126)
    factors = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    factors = factors[:, None, :, None]
    codes = (blocks / factors).to(torch.float8_e4m3fn)
    if not torch.equal(codes.float() * factors, blocks):
        return None
    scale = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scale


def round_to_fp8(x: torch.Tensor, group: int) -> torch.Tensor:
    """
    `x` rounded to E4M3 values times a power of two for each `group` of channels, in its own dtype:
    what the published kernels make of activations before an FP8 or FP4 projection.
    """
    width = x.shape[-1]
    grouped = nn.functional.pad(x.float(), (0, -width % group)).unflatten(-1, (-1, group))
    # The published kernels have no smaller scales for activations.
    exponent = _scale_exponent(grouped.abs().amax(dim=-1, keepdim=True), smallest=1e-4)
    factors = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    codes = (grouped / factors).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * factors).flatten(-2)[..., :width].to(x.dtype)


def _scale_exponent(largest: torch.Tensor, smallest: float) -> torch.Tensor:
    """
    Exponent of the smallest power of two that brings `largest`, at least `smallest`, into the range
    of E4M3, as the published quantiser chooses it.
    """
    mantissa, exponent = torch.frexp(largest.float().clamp(min=smallest) / FP8_MAX)
    return exponent - (mantissa == 0.5).to(exponent.dtype)


def dequantise_fp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """
    Values `(..., out, in)` of packed E2M1 weights.

    Args:
        packed (`torch.Tensor` of shape `(..., out, in / 2)`): bytes.
        scale (`torch.Tensor` of shape `(..., out, in / 32)`): E8M0 scales.
        dtype (`torch.dtype`): type of the result; exact in bfloat16 and float32.
    """
    # Half precision does not reach all scales, so it is only the type of the result.
    exact = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    # Both values of a byte are fetched as one integer: most of the time goes into this look-up.
    pairs = _e2m1_pairs(packed.device, exact).index_select(0, _as_bytes(packed).flatten().int())
    values = pairs.view(exact).view(*packed.shape[:-1], -1)
    factors = _e8m0_table(scale.device).to(exact)[_as_bytes(scale).int()]
    return (values.unflatten(-1, (-1, FP4_GROUP)) * factors[..., None]).flatten(-2).to(dtype)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


@functools.lru_cache(maxsize=8)
def _e8m0_table(device: torch.device) -> torch.Tensor:
    table = torch.ldexp(torch.ones(256, device="cpu"), torch.arange(256, device="cpu") - 127)
    table[255] = torch.nan
    return table.to(device)


@functools.lru_cache(maxsize=16)
def _e2m1_pairs(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The two values of every byte (256,), as the bits of an integer of twice the width."""
    values = torch.tensor(_E2M1 + tuple(-value for value in _E2M1), device="cpu")
    codes = torch.arange(256, device="cpu")
    pairs = torch.stack((values[codes & 15], values[codes >> 4]), dim=1).to(device, dtype)
    return pairs.view(torch.int32 if dtype.itemsize == 2 else torch.int64).flatten()
