"""vLLM's loaded weights: what kernels can read, and how its CPU form packs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from exitserve_kernels.exit_check import Head


def readable_head(
    head: Any, processor: Any, columns: int, ends: Tensor, rows: Tensor | None = None
) -> Head | None:
    """An LM head for the kernels; None where its product is not a plain one.

    Args:
        head: vLLM's head, loaded.
        processor: vLLM's `LogitsProcessor` of the model.
        columns: tokens of this rank's slice, without padding.
        ends: [K] those of them that end the text.
        rows: where the tokens are that are taken, among which are `ends`; None for all.
    """
    method = type(getattr(head, "quant_method", None))
    plain = method in (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
    if not plain or processor.logits_as_input or head.weight.dim() != 2:
        return None
    if processor.head_dtype not in (None, head.weight.dtype):
        return None
    weight, bias = head.weight.detach(), getattr(head, "bias", None)
    if rows is not None:
        weight, bias = weight[rows], None if bias is None else bias[rows]
    ending = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
    ending[ends] = True
    return Head(
        weight=weight,
        bias=bias,
        soft_cap=processor.soft_cap,
        scale=processor.scale,
        vocab_size=columns if rows is None else len(rows),
        ends=ending,
        rounded=True,  # the sampler gets logits of that type: the check judges what it gets
    )


def packed_linear(weight: Tensor, bias: Tensor | None) -> Any:
    """A linear map of a weight [K, D] and a bias [K], packed as vLLM packs its own.

    Returns:
        a module; `one.quant_method.apply(one, x, one.bias)` is [N, K] of x [N, D].
    """
    made: Any = nn.Module()
    made.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    made.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    made.quant_method = UnquantizedLinearMethod()
    made.quant_method.process_weights_after_loading(made)
    return made
