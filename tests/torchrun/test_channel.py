"""Tensors that are a part of a message between ranks."""

from __future__ import annotations

import pytest
import torch

from instep.engines.torchrun.channel import _InlineReader, _pack, _padded_bytes, _Reader

VALUES = [
    torch.tensor(1.5),
    torch.arange(6).view(2, 3),
    torch.arange(6.0).view(2, 3).t(),
    torch.tensor([True, False]),
    torch.empty(0, 4, dtype=torch.float64),
    torch.randn(3, dtype=torch.bfloat16),
    torch.randn(2, dtype=torch.complex64).conj(),
    torch.randn(2, dtype=torch.complex64).conj().imag,
    torch.randn(5)[::2],
    torch.randn(3, 4)[:1, 0],
    torch.randn(3, requires_grad=True),
    torch.tensor(0.1, requires_grad=True),
    torch.tensor(-(2**63)),
    torch.randn((), dtype=torch.complex64).conj().imag,
]


@pytest.mark.parametrize("chosen", [*range(len(VALUES)), "all"])
def test_values_are_the_same_on_both_ways(chosen: int | str) -> None:
    values = VALUES if isinstance(chosen, str) else [VALUES[chosen]]
    content = b"".join(map(_padded_bytes, values))
    packed = _Reader(_pack(values, len(content), torch.device("cpu")))
    inline = _InlineReader(content)
    for value in values:
        for reader in (packed, inline):
            read = reader.read(value.dtype, tuple(value.shape))
            assert (read.dtype, read.shape) == (value.dtype, value.shape)
            assert torch.equal(read, value.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_keep_their_bits(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for number in (-0.0, 0.1, info.max, info.tiny / 4, float("-inf"), float("nan")):
        value = torch.tensor(number, dtype=dtype)
        read = _InlineReader(_padded_bytes(value)).read(dtype, ())
        assert (read.dtype, read.shape) == (dtype, value.shape)
        assert bytes(read.numpy()) == bytes(value.numpy())
