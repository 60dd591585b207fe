"""Save models of well-known libraries as people do, and show which files memopt loads, and with which flags.

    python benchmarks/real_files.py [--only TEXT] [--folder FOLDER]

It writes its section of RESULTS.md; with ``--only``, which takes the rows that contain the text, a section of their
own.  With ``--folder`` the files stay there.

Every file is built here, from a small configuration with random weights.  Then memopt is used as a user would: first
without a flag and, where it refuses, with exactly the flags that its hint prints, until the file loads or a hint has no
new flag.  Flags of a second hint follow the word "then".  ``--trust-pickle``, which checks nothing, is never added.  A
file counts as loaded if its model's tensors have the names and the bytes that were saved.  Every attempt is a process
of its own.

A file whose library is not installed is left out, and the library is named.  To install all of them:

    pip install cloudpickle diffusers dill einops joblib lightning ncps norse omegaconf pandas peft safetensors snntorch
    pip install loguru scikit-learn timm torch_geometric torchmetrics torchvision transformers
    pip install --no-deps efficientnet_pytorch monai spikingjelly
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import functools
import gzip
import hashlib
import logging
import math
import multiprocessing
import operator
import os
import pickle
import re
import subprocess
import sys
import tempfile
import types
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module as library
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.results import table, this_command, write_section
from memopt_cli.errors import MemoptError
from memopt_cli.loading import load_model
from memopt_cli.loading.trust import merge_trusts
from memopt_cli.records import ModelSource, Trust

OWN = """
import dataclasses, enum, functools
from torch import nn

class Mode(enum.Enum):
    TRAIN = "train"

@dataclasses.dataclass
class Settings:
    width: int = 8

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.settings, self.mode, self.double = Settings(), Mode.TRAIN, functools.partial(scale, by=2.0)
        self.body = nn.Sequential(nn.Linear(4, self.settings.width), nn.ReLU(), nn.Linear(self.settings.width, 2))

def scale(x, by):
    return x * by

def observe(module, inputs, output):
    pass

def normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.BatchNorm1d(8))

def leaky():
    import snntorch
    return nn.Sequential(nn.Linear(4, 8), snntorch.Leaky(0.9), snntorch.RLeaky(0.9, linear_features=8))

def lif():
    import norse.torch
    return norse.torch.SequentialState(nn.Linear(4, 8), norse.torch.LIFRecurrentCell(8, 8), norse.torch.LICell())
"""
OWN_LIGHTNING = """
import lightning.pytorch as pl, torch, torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.accuracy = nn.Linear(4, 2), torchmetrics.classification.MulticlassAccuracy(2)
        self.loss = nn.functional.cross_entropy

    def training_step(self, batch, _):
        return self.loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(2, (8,))), batch_size=4)
"""
SCRIPT = "train.py"
SCRIPT_END = """
if __name__ == "__main__":
    import sys, torch
    torch.manual_seed(0)
    torch.save(Net(), sys.argv[1])
"""

Build = Callable[[], Any]
"""Function that builds a model, or a value for one."""
Write = Callable[[Any, Any], object]
"""Function that saves a model under a path."""


@dataclass(frozen=True, slots=True)
class Case:
    """File to load: the model in it, and how it is saved."""

    library: str
    """Library of the model, the first column of the table."""
    kind: str
    """Model, or how it is saved, in words: the second column."""
    build: Build
    """Function that builds the model."""
    write: Write = torch.save
    """Function that saves it under a path."""
    code: str = ""
    """``package.module:callable`` that builds the model of a file of weights alone; empty if the file has the model."""


def net() -> Any:
    """Build a small network."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))


def own(name: str = "Net") -> Any:
    """Return the class, function or value ``name`` of the user's package."""
    return getattr(library("own"), name)


def changed(change: Callable[[Any], object]) -> Any:
    """Build a small network and apply ``change`` to it."""
    model = net()
    change(model)
    return model


def with_attribute(value: Build) -> Any:
    """Build a small network with ``value()`` as an attribute."""
    return changed(lambda model: setattr(model, "attribute", value()))


# ---------------------------------------------------------------------------------------------- ways to save


def zipped(model: Any, path: Path) -> None:
    """Pickle ``model`` into a file compressed by gzip."""
    with gzip.open(path, "wb") as stream:
        pickle.dump(model, stream)


def distributed(model: Any, path: Path) -> None:
    """Save ``model`` wrapped in DistributedDataParallel, in a group of one process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{path.resolve()}.group", rank=0, world_size=1)
    torch.save(nn.parallel.DistributedDataParallel(model), path)
    torch.distributed.destroy_process_group()


def by_script(_: Any, path: Path) -> None:
    """Run the script that defines the class and saves it, so that the pickle names ``__main__``."""
    subprocess.run([sys.executable, SCRIPT, path.name], check=True)


def adam(model: Any) -> Any:
    """Return Adam for the parameters of ``model``."""
    return torch.optim.Adam(model.parameters())


def beside(**others: Callable[[Any], Any]) -> Write:
    """Return a function that saves a checkpoint with the entry ``model`` and the entries ``others``."""
    return lambda m, p: torch.save({"model": m, **{name: of(m) for name, of in others.items()}}, p)


def weights(key: str = "", of: Callable[[Any], Any] = lambda m: m, **others: Any) -> Write:
    """Return a function that saves the state dict alone, or as the entry ``key`` of a checkpoint."""
    return lambda m, p: torch.save({key: of(m).state_dict(), **others} if key else of(m).state_dict(), p)


ARGS = argparse.Namespace(lr=0.1, out=Path("runs"), started=datetime.datetime.now())
JIT: Any = torch.jit
WAYS: dict[str, Write] = {
    "torch.save": torch.save,
    "torch.save, legacy format": lambda m, p: torch.save(m, p, _use_new_zipfile_serialization=False),
    "torch.save, protocol 4": lambda m, p: torch.save(m, p, pickle_protocol=4),
    "torch.save, protocol 5": lambda m, p: torch.save(m, p, pickle_protocol=5),
    "pickle.dump, protocol 2": lambda m, p: p.write_bytes(pickle.dumps(m, 2)),
    "pickle.dump, protocol 4": lambda m, p: p.write_bytes(pickle.dumps(m, 4)),
    "pickle.dump, protocol 5": lambda m, p: p.write_bytes(pickle.dumps(m, 5)),
    "pickle.dump, gzip": zipped,
    "joblib.dump": lambda m, p: library("joblib").dump(m, p),
    "cloudpickle.dump": lambda m, p: p.write_bytes(library("cloudpickle").dumps(m)),
    "torch.save, pickle_module=dill": lambda m, p: torch.save(m, p, pickle_module=library("dill")),
    "{'model': model, 'optimizer': its state_dict}": beside(optimizer=lambda m: adam(m).state_dict()),
    "{'model': model, 'optimizer': the optimizer}": beside(optimizer=adam),
    "{'model': model, 'ema': model}": beside(ema=lambda m: net()),
    "{'model': model, 'args': argparse.Namespace}": beside(args=lambda m: ARGS),
    "[model, model]": lambda m, p: torch.save([m, net()], p),
    "torch.compile": lambda m, p: torch.save(torch.compile(m), p),
    "DistributedDataParallel": distributed,
    "torch.jit.script": lambda m, p: JIT.save(JIT.script(m), p),
    "torch.jit.trace": lambda m, p: JIT.save(JIT.trace(m.eval(), torch.randn(2, 4)), p),
    "torch.export.save": lambda m, p: torch.export.save(torch.export.export(m, (torch.randn(2, 4),)), p),
}
WEIGHTS: dict[str, Write] = {
    "state_dict": weights(),
    "{'state_dict': …, 'args': argparse.Namespace}": weights("state_dict", args=ARGS),
    "{'state_dict': … of DataParallel, 'epoch': 3}": weights("state_dict", nn.DataParallel, epoch=3),
    "{'model': state_dict of torch.compile}": weights("model", lambda m: torch.compile(m)),
    "safetensors": lambda m, p: library("safetensors.torch").save_file(m.state_dict(), p),
}

# ---------------------------------------------------------------------------------------------- PyTorch


def quantized(model: Any) -> Any:
    """Return ``model`` quantized statically: prepared, calibrated and converted."""
    ao = library("torch.ao.quantization")
    model = nn.Sequential(ao.QuantStub(), *model, ao.DeQuantStub()).eval()
    model.qconfig = ao.get_default_qconfig("x86")
    prepared = ao.prepare(model)
    prepared(torch.randn(8, 4))
    return ao.convert(prepared)


def dynamic(model: Any) -> Any:
    """Return ``model`` quantized dynamically, with weights in 8 bits."""
    return library("torch.ao.quantization").quantize_dynamic(model, {nn.Linear, nn.LSTM})


UTILS: Any = nn.utils
MODULES: dict[str, Build] = {
    "DataParallel": lambda: nn.DataParallel(net()),
    "AveragedModel": lambda: torch.optim.swa_utils.AveragedModel(net()),
    "quantize_dynamic": lambda: dynamic(net()),
    "quantize_dynamic, LSTM": lambda: dynamic(nn.LSTM(4, 8)),
    "quantized statically": lambda: quantized(net()),
    "torch.fx.symbolic_trace": lambda: torch.fx.symbolic_trace(net()),
    "weight_norm": lambda: changed(lambda m: UTILS.weight_norm(m[0])),
    "spectral_norm": lambda: changed(lambda m: UTILS.spectral_norm(m[0])),
    "pruned twice": lambda: changed(
        lambda m: [library("torch.nn.utils.prune").l1_unstructured(m[0], "weight", a) for a in (0.5, 0.2)]
    ),
    "Transformer(activation=F.gelu)": lambda: nn.Transformer(16, 2, 1, 1, 32, activation=F.gelu),
    "LSTM, bidirectional": lambda: nn.LSTM(4, 8, 2, bidirectional=True),
    "bfloat16": lambda: net().bfloat16(),
    "lazy layer that was never run": lambda: nn.LazyLinear(2),
    "forward hook of one's own": lambda: changed(lambda m: m.register_forward_hook(own("observe"))),
    "forward hook, with its handle": lambda: changed(
        lambda m: setattr(m, "handle", m.register_forward_hook(own("observe")))
    ),
}
ATTRIBUTES: dict[str, Build] = {
    "numpy.ndarray": lambda: library("numpy").arange(3.0),
    "numpy.float32, numpy.dtype": lambda: [library("numpy").float32(3), library("numpy").dtype("i8")],
    "numpy.ndarray of objects": lambda: library("numpy").array(["cat", None], dtype=object),
    "numpy.random.Generator": lambda: library("numpy").random.default_rng(0),
    "numpy.sqrt": lambda: library("numpy").sqrt,
    "Path, datetime": lambda: [Path("runs"), datetime.datetime.now(datetime.UTC)],
    "logger": lambda: logging.getLogger("train"),
    "SimpleNamespace": lambda: types.SimpleNamespace(width=8),
    "Ellipsis, slice": lambda: (..., slice(None)),
    "enum of one's own": lambda: own("Mode").TRAIN,
    "dataclass of one's own": lambda: own("Settings")(),
    "function of one's own": lambda: own("scale"),
    "defaultdict(list), deque, Counter": lambda: [defaultdict(list, a=[1]), deque([1], 3), Counter("aab")],
    "re.Pattern": lambda: re.compile(r"conv\d"),
    "Decimal": lambda: decimal.Decimal("0.1"),
    "torch.bmm": lambda: torch.bmm,
    "F.gelu, F.relu": lambda: [F.gelu, F.relu],
    "F.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention,
    "partial(F.interpolate)": lambda: functools.partial(F.interpolate, scale_factor=2),
    "nn.ReLU, the class": lambda: nn.ReLU,
    "nn.init.xavier_uniform_": lambda: nn.init.xavier_uniform_,
    "math.sqrt, operator.add": lambda: [math.sqrt, operator.add],
    "print": lambda: print,
    "operator.attrgetter": lambda: operator.attrgetter("loss"),
    "torch.float16, device, Size": lambda: [torch.float16, torch.device("cpu"), torch.Size([2])],
    "torch.Generator": lambda: torch.Generator().manual_seed(0),
    "torch.distributions.Normal": lambda: torch.distributions.Normal(torch.zeros(2), torch.ones(2)),
    "SGD, StepLR": lambda: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], 0.1), 3),
    "GradScaler": lambda: torch.amp.GradScaler("cpu"),
    "TensorDataset": lambda: torch.utils.data.TensorDataset(torch.ones(2, 3)),
    "DataLoader": lambda: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2, 3))),
    "pandas.DataFrame": lambda: library("pandas").DataFrame({"loss": [0.5, 0.3]}),
    "sklearn StandardScaler": lambda: library("sklearn.preprocessing").StandardScaler().fit([[0.0], [1.0]]),
    "OmegaConf": lambda: library("omegaconf").OmegaConf.create({"width": 8}),
    "MulticlassAccuracy": lambda: library("torchmetrics").classification.MulticlassAccuracy(3),
}

# ---------------------------------------------------------------------------------------------- Hugging Face

_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_TEXT = {**_SIZES, "vocab_size": 64, "pad_token_id": 0}
_CAUSAL = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}
_SMALL = {"vocab_size": 64, "d_model": 16, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
_GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
_HALVES = {f"{half}_{of}": 2 for half in ("encoder", "decoder") for of in ("layers", "attention_heads", "ffn_dim")}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": _TEXT,
    "GPT2LMHeadModel": _GPT2,
    "LlamaForCausalLM": _CAUSAL,
    "Qwen3ForCausalLM": _CAUSAL,
    "MixtralForCausalLM": {**_CAUSAL, "num_local_experts": 2},
    "MambaForCausalLM": {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2},
    "ViTForImageClassification": {**_SIZES, "image_size": 32, "patch_size": 8},
    "SwinForImageClassification": {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]},
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "T5ForConditionalGeneration": {**_SMALL, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    "WhisperForConditionalGeneration": {**_SMALL, **_HALVES},
}


def transformer(name: str) -> Any:
    """Build the model ``name`` of transformers."""
    kind = getattr(library("transformers"), name)
    return kind(kind.config_class(**TRANSFORMERS[name]))


def lora(task: str | None) -> Any:
    """Build a LoRA adapter on GPT-2 loaded from a folder, as users start from downloaded weights."""
    if not Path("gpt2").exists():
        transformer("GPT2LMHeadModel").save_pretrained("gpt2")
    base, peft = library("transformers").AutoModelForCausalLM.from_pretrained("gpt2"), library("peft")
    return peft.get_peft_model(base, peft.LoraConfig(task, target_modules=["c_attn"], fan_in_fan_out=True))


def diffuser(name: str, **settings: Any) -> Any:
    """Build the model ``name`` of diffusers."""
    return getattr(library("diffusers"), name)(norm_num_groups=8, **settings)


def in_folder(model: Any, path: Path, **options: Any) -> None:
    """Save ``model`` to a folder by ``save_pretrained``."""
    model.save_pretrained(path, **options)


HUGGING_FACE: dict[str, dict[str, Build]] = {
    "transformers": {name: functools.partial(transformer, name) for name in TRANSFORMERS},
    "peft": {
        "LoRA on GPT-2": functools.partial(lora, None),
        "LoRA on GPT-2, task_type=CAUSAL_LM": functools.partial(lora, "CAUSAL_LM"),
        "LoRA on GPT-2, merged": lambda: lora(None).merge_and_unload(),
    },
    "diffusers": {
        "UNet2DModel": functools.partial(diffuser, "UNet2DModel", block_out_channels=(16, 16, 16, 16)),
        "AutoencoderKL": functools.partial(diffuser, "AutoencoderKL", block_out_channels=(16,)),
    },
}

# ---------------------------------------------------------------------------------------------- other libraries


def run(model: Any, *shape: int) -> Any:
    """Run one forward, so that the neurons of ``model`` have states, and return the model."""
    model(torch.randn(*shape))
    return model


def leaky() -> Any:
    """Build snnTorch's neurons with a surrogate gradient that pickles; the functions of snnTorch return closures."""
    snn, gradient = library("snntorch"), library("snntorch.surrogate").StraightThroughEstimator.apply
    given = {"spike_grad": gradient, "init_hidden": True}
    return nn.Sequential(nn.Linear(4, 8), snn.Leaky(0.9, **given), nn.Linear(8, 8), snn.Synaptic(0.9, 0.8, **given))


def spikingjelly() -> Any:
    """Build a network of SpikingJelly's neurons in multi-step mode."""
    base = "spikingjelly.activation_based"
    layer, neuron, surrogate = library(f"{base}.layer"), library(f"{base}.neuron"), library(f"{base}.surrogate")
    model = nn.Sequential(
        *(layer.Conv2d(2, 4, 3), layer.BatchNorm2d(4), neuron.LIFNode(surrogate_function=surrogate.ATan())),
        *(layer.Flatten(), layer.Linear(144, 4), neuron.ParametricLIFNode(detach_reset=True)),
    )
    library(f"{base}.functional").set_step_mode(model, "m")
    return model


def trained() -> Any:
    """Return the user's LightningModule after one training step; it holds its trainer."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    model = library("own.lit").Lit()
    library("lightning.pytorch").Trainer(max_steps=1, accelerator="cpu", **quiet).fit(model)
    return model


def seeded() -> Any:
    """Build the user's network with the seed, and so the weights, of the script."""
    torch.manual_seed(0)
    return own()()


def timm(name: str, **settings: Any) -> Any:
    """Build the model ``name`` of timm."""
    return library("timm").create_model(name, pretrained=False, **settings)


def geometric(name: str) -> Any:
    """Build the network ``name`` of PyTorch Geometric."""
    return getattr(library("torch_geometric.nn"), name)(4, 8, num_layers=2, out_channels=2)


def vision(name: str, **settings: Any) -> Any:
    """Build the model ``name`` of torchvision with random weights."""
    return library("torchvision.models").get_model(name, weights=None, **settings)


def detector(name: str) -> Any:
    """Build the model ``name`` of torchvision without the download of its backbone's weights."""
    return vision(name, weights_backbone=None)


def small_vgg() -> Any:
    """Build VGG-11 with a new head of two classes."""
    model = vision("vgg11_bn")
    model.classifier = nn.Linear(25088, 2)
    return model


def features() -> Any:
    """Build a list of layers that torchvision offers by themselves."""
    backbone = library("torchvision.models._utils").IntermediateLayerGetter(vision("resnet18"), {"layer1": "low"})
    pyramid = library("torchvision.ops").FeaturePyramidNetwork([64], 8)
    return nn.ModuleList([library("torchvision.transforms").Normalize([0.5], [0.5]), backbone, pyramid])


TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"depth": 2},
    "deit_tiny_distilled_patch16_224": {"depth": 2},
    "swin_tiny_patch4_window7_224": {"depths": (1, 1), "num_heads": (1, 2)},
    "swinv2_cr_tiny_224": {"embed_dim": 24, "depths": (1, 1), "num_heads": (1, 2)},
    "beit_base_patch16_224": {"embed_dim": 48, "depth": 2, "num_heads": 2},
    "eva02_tiny_patch14_224": {"depth": 2},
    "xcit_nano_12_p16_224": {"depth": 2},
    "maxvit_rmlp_pico_rw_256": {},
    "hiera_tiny_224": {"stages": (1, 1, 1, 1)},
    "mixer_s32_224": {},
    "convnext_atto": {},
    "mobilenetv3_small_050": {},
    "efficientnet_b0": {},
    "regnetx_002": {},
    "densenet121": {},
    "resnet18": {},
    "resnetv2_50d_gn": {},
    "resnet10t, features_only": {"features_only": True},
}
VISION: dict[str, Build] = {
    **{
        name: functools.partial(vision, name)
        for name in (
            *("resnet18", "densenet121", "squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5", "mnasnet0_5"),
            *("googlenet", "regnet_y_400mf", "efficientnet_b0", "convnext_tiny", "swin_t", "swin_v2_t"),
            *("quantized_mobilenet_v2", "raft_small", "r3d_18"),
        )
    },
    "vgg11_bn, with a head of one's own": small_vgg,
    "VisionTransformer": lambda: library("torchvision.models").VisionTransformer(32, 8, 2, 2, 16, 32),
    **{
        name: functools.partial(detector, name)
        for name in (
            *("fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet_resnet50_fpn", "fcos_resnet50_fpn"),
            *("ssdlite320_mobilenet_v3_large", "maskrcnn_resnet50_fpn", "keypointrcnn_resnet50_fpn"),
            *("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large", "fcn_resnet50"),
        )
    },
    "Normalize, IntermediateLayerGetter, FeaturePyramidNetwork": features,
}
OTHERS: dict[str, dict[str, Build]] = {
    "timm": {name: functools.partial(timm, name.partition(",")[0], **settings) for name, settings in TIMM.items()},
    "torchvision": VISION,
    "snntorch": {"Leaky, Synaptic": leaky, "the same after a step": lambda: run(leaky(), 3, 4)},
    "spikingjelly": {
        "LIFNode, ParametricLIFNode": spikingjelly,
        "the same after a step": lambda: run(spikingjelly(), 2, 3, 2, 8, 8),
    },
    "norse": {
        "LSNNCell": lambda: library("norse.torch").LSNNCell(),
        "SequentialState with LICell": lambda: library("norse.torch").SequentialState(
            nn.Linear(4, 8), library("norse.torch").LICell()
        ),
    },
    "torch_geometric": {name: functools.partial(geometric, name) for name in ("GCN", "GAT", "GraphSAGE", "GIN")},
    "lightning": {
        "LightningModule of one's own, trained": trained,
        "BoringModel": lambda: library("lightning.pytorch.demos.boring_classes").BoringModel(),
    },
    "monai": {"UNet": lambda: library("monai.networks.nets").UNet(2, 1, 2, channels=(4, 8), strides=(2,))},
    "efficientnet_pytorch": {
        "efficientnet-b0": lambda: library("efficientnet_pytorch").EfficientNet.from_name("efficientnet-b0")
    },
    "ncps": {
        "CfC": lambda: library("ncps.torch").CfC(4, 8),
        "LTC": lambda: library("ncps.torch").LTC(4, library("ncps.wirings").AutoNCP(8, 2)),
    },
    "einops": {"Rearrange": lambda: nn.Sequential(library("einops.layers.torch").Rearrange("b c h -> b (c h)"), net())},
}

PICKLED, CLOUD, TWO = "torch.save", "cloudpickle.dump", "{'model': model, 'ema': model}"
CALLED = ", with a callable"
GPT2 = functools.partial(transformer, "GPT2LMHeadModel")
CASES = [
    *(Case("torch", way, net, write) for way, write in WAYS.items()),
    *(Case("torch", kind, build) for kind, build in MODULES.items()),
    *(Case("torch", f"attribute: {kind}", functools.partial(with_attribute, of)) for kind, of in ATTRIBUTES.items()),
    *(Case("own package", way, lambda: own()(), WAYS[way]) for way in (PICKLED, TWO, CLOUD)),
    *(Case("own package", way + CALLED, lambda: own()(), write, "own:Net") for way, write in WEIGHTS.items()),
    Case("own package", "parametrizations, state_dict" + CALLED, lambda: own("normed")(), weights(), "own:normed"),
    Case("own script", PICKLED, seeded, by_script),
    *(
        Case(name, f"{kind}, {way}", build, write)
        for name, builds in HUGGING_FACE.items()
        for way, write in ((PICKLED, torch.save), ("save_pretrained", in_folder))
        for kind, build in builds.items()
    ),
    Case("transformers", "GPT-2, save_pretrained in shards", GPT2, functools.partial(in_folder, max_shard_size="10KB")),
    Case("transformers", "GPT-2, torch.compile", GPT2, WAYS["torch.compile"]),
    *(Case(name, kind, build) for name, builds in OTHERS.items() for kind, build in builds.items()),
    Case("snntorch", "closures, cloudpickle.dump", lambda: own("leaky")(), WAYS[CLOUD]),
    Case("snntorch", "closures, state_dict" + CALLED, lambda: own("leaky")(), weights(), "own:leaky"),
    Case("norse", "LIFRecurrentCell, state_dict" + CALLED, lambda: own("lif")(), weights(), "own:lif"),
    Case("lightning", "checkpoint" + CALLED, trained, lambda m, p: m.trainer.save_checkpoint(p), "own.lit:Lit"),
]


# ---------------------------------------------------------------------------------------------- build and try


@dataclass(frozen=True, slots=True)
class Made:
    """Result of building or loading a model in a subprocess: a hash of its tensors, or why there is none."""

    tensors: str = ""
    """Hash of all tensors; empty if there is no model."""
    message: str = ""
    """Reason why there is no model; empty if there is one."""
    hint: str = ""
    """memopt's hint on it; empty if there is none."""


def hash_of(model: nn.Module) -> str:
    """Return a hash of the names and bytes of all tensors of ``model``.

    Packed weights of quantized layers are in the state dict alone; non-persistent buffers are not in it.
    """
    named = {**model.state_dict(), **dict(model.named_buffers())}
    return hashlib.sha256(b"".join(name.encode() + _bytes(named[name]) for name in sorted(named))).hexdigest()


def _bytes(value: Any) -> bytes:
    if isinstance(value, tuple | list):
        return b"".join(map(_bytes, value))
    if not isinstance(value, Tensor) or isinstance(value, nn.UninitializedParameter):
        return type(value).__name__.encode()
    value = value.dequantize() if value.is_quantized else value.detach()
    return f"{value.dtype}{tuple(value.shape)}".encode() + bytes(
        value.contiguous().reshape(-1).view(torch.uint8).numpy()
    )


def write_own(folder: Path) -> None:
    """Write the user's package and script to ``folder``."""
    (folder / "own").mkdir(exist_ok=True)
    for name, text in {"own/__init__.py": OWN, "own/lit.py": OWN_LIGHTNING, SCRIPT: OWN + SCRIPT_END}.items():
        (folder / name).write_text(text, encoding="utf-8")


def enter(folder: str, importable: bool) -> None:
    """Prepare a subprocess to work in ``folder``; ``importable`` lets it import the user's package, to build models."""
    os.chdir(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    if importable:
        sys.path.insert(0, folder)


def file_name(number: int) -> str:
    """Return the file name of case ``number``."""
    return f"{number:03}.pt"


def build(number: int) -> Made:
    """Build and save the model of case ``number``."""
    case = CASES[number]
    try:
        model = case.build()
        case.write(model, Path(file_name(number)))
        return Made(tensors=hash_of(model))
    except ImportError as err:
        return Made(message=f"left out: {err}")
    except Exception as err:  # some libraries cannot save their own models
        return Made(message=f"cannot be saved: {type(err).__name__}: {err}".partition("\n")[0])


def attempt(source: ModelSource) -> Made:
    """Load the model of ``source`` by memopt."""
    try:
        return Made(tensors=hash_of(load_model(source).module))
    except MemoptError as err:
        return Made(message=err.message, hint=err.hint or "")
    except Exception as err:  # memopt may refuse a file, but never crash on it
        return Made(message=f"{type(err).__name__}: {err}", hint="a crash")


_FLAG = re.compile(r"--(allow-package|allow-global|code-path|key|weights) ('[^']*'|\S+)")


def with_flags(source: ModelSource, hint: str, code: str) -> tuple[ModelSource, str]:
    """Return ``source`` with the flags that ``hint`` prints added, and these flags as text."""
    flags = []
    for flag, quoted in _FLAG.findall(hint):
        value = quoted.strip("'").replace("YOUR_SCRIPT.py", SCRIPT)
        trust = Trust()
        match flag:
            case "weights" if code:
                source = replace(source, location=code, weights=value)
                value = f"FILE {code}"
            case "key":
                source = replace(source, key=value)
            case "allow-package":
                trust = Trust(packages=(value,))
            case "allow-global":
                trust = Trust(globals=(value,))
            case "code-path":
                trust = Trust(code_paths=(value,))
        source = replace(source, trust=merge_trusts((source.trust, trust)))
        flags.append(f"`--{flag} {value}`")
    return source, " ".join(flags)


def outcome(pool: Any, number: int, built: Made) -> str:
    """Return how file ``number`` loads: ``no flag``, the flags that it needs, or why memopt refuses it."""
    source, flags = ModelSource(location=file_name(number)), list[str]()
    while True:
        tried = pool.apply(attempt, (source,))
        verdict = ", then ".join(flags) or "no flag"
        if tried.tensors:
            return verdict if tried.tensors == built.tensors else f"refused: other tensors ({verdict})"
        following, more = with_flags(source, tried.hint, CASES[number].code)
        if following == source:
            after = f"after {verdict}: " if flags else ""
            return f"refused: {after}{tried.message} ({tried.hint})"
        source, flags = following, [*flags, more]


def main() -> None:
    """Build the files, load each, print a table and write the section."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="rows that contain this text")
    parser.add_argument("--folder", type=Path, help="where the files are written and stay")
    options = parser.parse_args()
    chosen = [i for i, case in enumerate(CASES) if options.only in f"{case.library} {case.kind}"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["memopt_cli.loading"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(exist_ok=True)
        write_own(folder)
        with context.Pool(1, enter, (str(folder), True)) as pool:
            built = {i: pool.apply(build, (i,)) for i in chosen}
        # A fresh process for each attempt: a module that one file has imported must not help the next one to load.
        with context.Pool(1, enter, (str(folder), False), maxtasksperchild=1) as pool:
            outcomes = {i: outcome(pool, i, made) for i, made in built.items() if made.tensors}
    rows = [[CASES[i].library, CASES[i].kind, text.replace("\n", " ")] for i, text in outcomes.items()]
    kinds = Counter("with these flags" if text[0] == "`" else text.partition(":")[0] for text in outcomes.values())
    left_out = [
        f"- {CASES[i].library}: {CASES[i].kind}: {made.message}" for i, made in built.items() if not made.tensors
    ]
    found = f"{len(rows)} files: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}."
    text = "\n\n".join([found, table(["library", "file", "outcome"], rows), "\n".join(left_out)])
    print(text)
    title = "Model files as people save them"
    write_section(f"{title}: {options.only}" if options.only else title, this_command(), text)


if __name__ == "__main__":
    main()
