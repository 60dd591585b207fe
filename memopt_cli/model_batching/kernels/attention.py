"""Attention: one fused attention over (models·images), and the transformer layers of ``torch.nn`` in terms of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt_cli.model_batching.kernels.linear import Kernels, linear
from memopt_cli.runtime.private_torch import feed_forward, self_attention


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` of each model.

    ``query``: (models, …, heads, L, E); ``attn_mask``: (models, …, L, S).
    """
    if attn_mask is not None:
        attn_mask = attn_mask.view(len(attn_mask), *[1] * (query.dim() - attn_mask.dim()), *attn_mask.shape[1:])
        attn_mask = attn_mask.expand(*query.shape[:-2], *attn_mask.shape[-2:]).flatten(0, 1)
    q, k, v = (t.flatten(0, 1) for t in (query, key, value))
    return torch.unflatten(F.scaled_dot_product_attention(q, k, v, attn_mask, *args, **kwargs), 0, query.shape[:2])


def _attention(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute ``nn.MultiheadAttention``; ``is_causal`` is only a hint about ``attn_mask``, and is not read."""
    if query.dim() == 3:  # (models, length, size): the input has no dimension of images
        images = 1 if module.batch_first else 2
        padding = None if key_padding_mask is None else key_padding_mask.unsqueeze(1)
        q, k, v = (t.unsqueeze(images) for t in (query, key, value))
        output, weights = _attention(module, q, k, v, padding, need_weights, attn_mask, average_attn_weights)
        return output.squeeze(images), None if weights is None else weights.squeeze(1)
    if not module.batch_first:
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    projected = _project_in(module, query, key, value)
    # (models, images, length, size) becomes (models, images, heads, length, size of a head).
    q, k, v = (torch.unflatten(t, -1, (module.num_heads, -1)).transpose(2, 3) for t in projected)
    mask = _merged_mask(attn_mask, key_padding_mask, q)
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        weights = F.dropout((scores if mask is None else scores + mask).softmax(dim=-1), dropout)
        mixed = weights @ v
        weights = weights.mean(dim=2) if average_attn_weights else weights
    else:
        mixed = scaled_dot_product_attention(q, k, v, mask, dropout)
    output = linear(mixed.transpose(2, 3).flatten(3), module.out_proj.weight, module.out_proj.bias)
    return (output if module.batch_first else output.transpose(1, 2)), weights


def _project_in(module: nn.MultiheadAttention, *inputs: Tensor) -> list[Tensor]:
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3, dim=1)
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    elif inputs[0] is inputs[1] is inputs[2]:
        return list(linear(inputs[0], module.in_proj_weight, module.in_proj_bias).chunk(3, dim=-1))
    else:
        weights = module.in_proj_weight.chunk(3, dim=1)
    return [linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]


def _merged_mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the sum of both masks, to add to the scores, (models, images, heads, L, S); ``None`` without masks."""
    masks = []
    if attn_mask is not None:
        mask = _additive_mask(attn_mask, q)
        per_head = mask.dim() == 4  # (models, images·heads, L, S)
        masks.append(torch.unflatten(mask, 1, q.shape[1:3]) if per_head else mask[:, None, None])
    if key_padding_mask is not None:
        masks.append(_additive_mask(key_padding_mask, q)[:, :, None, None])
    return sum(masks[1:], masks[0]) if masks else None


def _additive_mask(mask: Tensor, q: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask, -torch.inf)


KERNELS: Kernels = {nn.MultiheadAttention: _attention}


# ---------------------------------------------------------------------------------------------- transformer layers
# The forward of torch.nn's layers looks at shapes, which a trace does not have, to choose an inference kernel.  These
# functions compute the same as it does in training.


def encoder_layer(
    layer: Any, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
) -> Any:
    """Compute ``nn.TransformerEncoderLayer.forward`` as ``torch.nn`` does in training."""
    if layer.norm_first:
        src = src + self_attention(layer, layer.norm1(src), src_mask, src_key_padding_mask, is_causal)
        return src + feed_forward(layer, layer.norm2(src))
    src = layer.norm1(src + self_attention(layer, src, src_mask, src_key_padding_mask, is_causal))
    return layer.norm2(src + feed_forward(layer, src))


def encoder(
    module: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None
) -> Any:
    """Compute ``nn.TransformerEncoder.forward`` without its inference kernel."""
    for layer in module.layers:
        src = layer(src, mask, src_key_padding_mask)
    return src if module.norm is None else module.norm(src)


def decoder(
    module: Any,
    tgt: Any,
    memory: Any,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> Any:
    """Compute ``nn.TransformerDecoder.forward``."""
    for layer in module.layers:
        tgt = layer(tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
    return tgt if module.norm is None else module.norm(tgt)


def transformer(
    module: Any,
    src: Any,
    tgt: Any,
    src_mask: Any = None,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    src_key_padding_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    src_is_causal: bool | None = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> Any:
    """Compute ``nn.Transformer.forward`` without its checks of shapes."""
    memory = module.encoder(src, src_mask, src_key_padding_mask)
    return module.decoder(tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)


TRACEABLE: dict[type[nn.Module], Callable[..., Any] | None] = {
    nn.TransformerEncoderLayer: encoder_layer,
    nn.TransformerEncoder: encoder,
    nn.TransformerDecoderLayer: None,
    nn.TransformerDecoder: decoder,
    nn.Transformer: transformer,
}
"""Type of a module -> the function that is traced in place of its own forward; ``None`` to trace its own."""
