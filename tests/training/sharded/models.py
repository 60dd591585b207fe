"""Models, and the functions of training scripts that spread them over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH, WORDS, LENGTH = 48, 101, 16


class Attention(nn.Module):
    """As many heads as the width of its projection says: a rank may have a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = (proj(x).view(batch, length, -1, 12).transpose(1, 2) for proj in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def transformer() -> nn.Module:
    return Transformer()


def shorter() -> nn.Module:
    """Without a block between the first and the last: for what is made of predictions, not whether they are right."""
    return Transformer(blocks=2)


def frozen() -> nn.Module:
    """All but its head."""
    model = Transformer().requires_grad_(False)
    model.head.requires_grad_(True)
    return model


class Partly(Transformer):
    """A layer of it is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WORDS)


def partly() -> nn.Module:
    return Partly()


def halved() -> nn.Module:
    """As scripts change the dtype of what they built."""
    return Transformer().to(torch.bfloat16)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers = (nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.body = nn.Sequential(*layers, nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.body(x)).relu()


def convolutional() -> nn.Module:
    stem = (nn.Conv2d(3, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU())
    blocks = nn.Sequential(*(Residual(10) for _ in range(3)))
    return nn.Sequential(*stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 7))


def of_data() -> nn.Module:
    """Its forward depends on values."""

    class Choosing(Transformer):
        def forward(self, ids: Tensor) -> Tensor:
            loss = super().forward(ids)
            return loss if loss.item() > 0 else -loss

    return Choosing()


def _blocks(model: nn.Module) -> nn.ModuleList | nn.Sequential:
    return model.blocks if isinstance(model, Transformer) else model[3]  # type: ignore[index, return-value]


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_but_one(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """What a change to a training script may forget."""
    for block in list(_blocks(model))[1:]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_without_mesh(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in _blocks(model):
        fully_shard(block)
    return fully_shard(model)


def shard_without_mesh_and_keep(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in _blocks(model):
        fully_shard(block, reshard_after_forward=False)
    return fully_shard(model, reshard_after_forward=False)


def shard_and_keep(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Parameters stay whole from forward to backward."""
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


def shard_in_bf16(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallel."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    names = ("attention.query", "attention.key", "attention.value", "up")
    way = {**dict.fromkeys(names, columns), "attention.out": rows, "down": rows}
    for block in _blocks(model):
        parallelize_module(block, mesh, way)
    return model


def split_and_shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Both, over the axes ``tp`` and ``dp``."""
    return shard(split(model, mesh["tp"]), mesh["dp"])


def replicate(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


def replicate_in_views(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def replicate_in_buckets(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Several, and one parameter in none."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["embed.weight"])
    return DistributedDataParallel(model, bucket_cap_mb=0.05)  # type: ignore[arg-type]


def replicate_what_is_used(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    wrapper = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.1)  # type: ignore[arg-type]
    with wrapper.no_sync():
        return wrapper
