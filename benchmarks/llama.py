"""Llama 3 70B from its configuration, sharded as in training; for predictions alone: it is never built with data."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM


def build() -> nn.Module:
    """Build the model with the random weights of transformers."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard each layer of ``model`` by itself; compute in bfloat16, and add gradients in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
