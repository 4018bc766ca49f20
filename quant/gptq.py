"""GPTQ as AutoGPTQ and GPTQModel write it: 4 or 8 bit, either convention of zeros, act-order."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .base import Expected, LinearSpec, QuantError, TensorReader
from .packed import PackedForm
from .packing import fields


class GptqForm(PackedForm):
    """qweight int32 [K * bits / 32, N], qzeros int32 [G, N * bits / 32], g_idx int32 [K].

    Feature k of output n stands for (code - zero) * scale, with zero and scale of the group g_idx[k]. The
    original format stores zero - 1, modulo 2^bits, gptq_v2 the zero itself.
    """

    def packed_tensors(self, spec: LinearSpec, reader: TensorReader) -> Mapping[str, Expected]:
        k, n, groups, per_word = (
            spec.in_features,
            spec.out_features,
            self.groups(spec),
            32 // self.settings.bits,
        )
        found = {
            f"{spec.name}.qweight": self.asked((k // per_word, n), torch.int32),
            f"{spec.name}.qzeros": self.asked((groups, n // per_word), torch.int32),
        }
        index = f"{spec.name}.g_idx"
        if reader.dtype(index) is not None or (self.settings.act_order and groups > 1):
            found[index] = self.asked((k,), torch.int32, torch.int64)
        return found

    def order(self, spec: LinearSpec, reader: TensorReader) -> torch.Tensor | None:
        """The features sorted by g_idx; QuantError where that is no order of groups, or desc_act denies it.

        Zeros throughout, with several groups, are a placeholder of files without act-order.
        """
        name = f"{spec.name}.g_idx"
        if reader.dtype(name) is None:
            return None
        index = reader.read(name).long()
        plain = torch.arange(spec.in_features) // self.group_size(spec)
        groups, act_order = self.groups(spec), self.settings.act_order
        if torch.equal(index, plain) or (not act_order and not index.any()):
            return None
        if index.min() < 0 or index.max() >= groups:
            raise QuantError(
                f"{name} names groups from {index.min()} to {index.max()}, "
                f"but there are {groups} by {self.settings.describe()}"
            )
        if not torch.equal(index.bincount(minlength=groups), plain.bincount()):
            raise QuantError(
                f"{name} does not fill groups of {self.group_size(spec)} features, as {self.settings.describe()} "
                "asks for"
            )
        if act_order is False:
            raise QuantError(
                f"{name} orders features otherwise than by position, but desc_act is false in "
                f"{self.settings.source}"
            )
        return index.argsort(stable=True)

    def codes(self, words: torch.Tensor, first: int, last: int) -> torch.Tensor:
        return fields(words[:, first:last].t(), self.settings.bits)

    def zeros(self, spec: LinearSpec, reader: TensorReader) -> torch.Tensor:
        settings = self.settings
        stored = fields(reader.read(f"{spec.name}.qzeros"), settings.bits)
        zeros = (stored + settings.zero_offset) & (2**settings.bits - 1)
        middle = 2 ** (settings.bits - 1)
        if settings.symmetric and (zeros != middle).any():
            found = ("gptq_v2", "gptq")[settings.zero_offset]
            hint = ""
            if (stored == middle - 1 + settings.zero_offset).all():
                other = ("gptq", "gptq_v2")[settings.zero_offset]
                hint = f"; they would be under checkpoint_format {other!r}"
            raise QuantError(
                f"{spec.name}.qzeros: sym is true in {settings.source}, "
                f"but under checkpoint_format {found!r} the zeros are not all {middle}{hint}"
            )
        return zeros.t().contiguous()
