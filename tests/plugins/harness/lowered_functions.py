"""The compiled functions of a training step at small sizes: lowered for a GPU, and as eager references.

A function of ``FUNCTIONS`` gets an ``Inputs``, which makes its input tensors by name, and returns its results by name.
``record`` compiles one inside a ``fake_cuda.Worker`` that was initialized by ``fake_gpu_compiler.install``; ``eager``
computes the reference from the same values.
"""

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from fake_cuda import Worker
from fake_gpu_compiler import install as install_compiler
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.optim.adamw import adamw as torch_adamw
from triton_interpreter import Call, Interpreter, Program, View

import torchtrain.models.llama.model as llama
from torchtrain.models.document_mask import document_mask
from torchtrain.models.llama.model import Transformer, TransformerConfig, apply_rope, attend
from torchtrain.models.loss.output_loss import OutputLoss
from torchtrain.parallelisms.activation_checkpoint import apply_activation_checkpoint
from torchtrain.parallelisms.compile import apply_compile
from torchtrain.parallelisms.options import ActivationCheckpointConfig
from torchtrain.plugins.muon.muon import orthogonalize

Results = dict[str, Tensor]


@dataclass
class Inputs:
    """Makes the inputs of a function. Their values depend on their names alone, and are representable in bfloat16."""

    device: torch.device
    dtype: torch.dtype
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def compiled(self) -> bool:
        return self.device.type == "cuda"

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, dynamic=False) if self.compiled else function

    def normal(self, name: str, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.empty(shape)
        if not self.compiled:
            values.normal_(std=scale, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        return self.add(name, values.bfloat16().to(dtype or self.dtype))

    def add(self, name: str, values: Tensor) -> Tensor:
        self.tensors[name] = values.to(self.device)
        if not self.compiled:
            self.tensors[name] = values.detach().clone()  # the function may change ``values``
            return values
        return self.tensors[name]

    def gradients(self, out: Tensor, **wanted: Tensor) -> Results:
        """Gradients of ``out`` times a random tensor."""
        # Laid out as ``out``: autograd would copy a gradient of another layout outside of the compiled function.
        weights = self.add("grad", torch.empty_like(out).copy_(self.normal("grad", *out.shape, dtype=out.dtype)))
        grads = torch.autograd.grad(out, list(wanted.values()), weights)
        return {f"d {name}": grad for name, grad in zip(wanted, grads, strict=True)}


def block(inputs: Inputs, mode: str = "none", documents: bool = False, head_dim: int = 64) -> Results:
    """A transformer block as ``parallelize_llama`` compiles it."""
    bs, seq = 2, 256 if documents else 64
    config = TransformerConfig(
        dim=128, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=head_dim, ffn_dim=320, vocab_size=8, max_seq_len=seq
    )
    with torch.device("meta"):
        model = Transformer(config)
    parameters: dict[str, Tensor] = {}
    layer = model.layers["0"]
    for name, parameter in layer.named_parameters():
        scale = 0.1 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
        values = inputs.normal(name, *parameter.shape, scale=scale)
        parameters[name] = nn.Parameter(values if parameter.ndim == 2 else inputs.add(name, values + 1))
    layer.load_state_dict(parameters, assign=True)
    checkpoint = ActivationCheckpointConfig(mode=mode)  # type: ignore[arg-type]
    if mode != "none":
        apply_activation_checkpoint(model, checkpoint)
    if inputs.compiled:
        apply_compile(model, checkpoint)
    x = inputs.normal("x", bs, seq, config.dim).requires_grad_()
    cos, sin = (inputs.normal(name, 1, seq, 1, head_dim // 2, dtype=torch.float32) for name in ("cos", "sin"))
    mask = document_mask(*document_arguments(inputs, bs, seq)) if documents else None
    out = model.layers["0"](x, cos, sin, mask)
    return {"out": out, **inputs.gradients(out, x=x, **parameters)}


def document_arguments(inputs: Inputs, bs: int, seq: int, shard: bool = False) -> tuple[Tensor, Tensor]:
    """Document numbers, with documents longer and shorter than a block of 128 keys, and positions of queries."""
    starts = torch.zeros(bs, seq, dtype=torch.int64)
    starts[0, [5, 40, seq // 2, seq - 50]] = 1
    starts[1:, 12] = 1
    positions = torch.arange(seq)
    if shard:  # of context parallelism of degree 2: the first and the last quarter
        positions = positions.view(4, -1)[[0, 3]].flatten()
    return inputs.add("numbers", starts.cumsum(dim=1)), inputs.add("queries", positions)


def flex_attention(inputs: Inputs, shard: bool = False) -> Results:
    """Attention with document masks in a block that is not compiled, and the compiled construction of the mask."""
    bs, seq, heads, kv_heads, head_dim = 2, 512 if shard else 384, 2, 1, 128
    mask = document_mask(*document_arguments(inputs, bs, seq, shard))
    q, k, v = (
        inputs.normal(name, bs, length, n, head_dim).requires_grad_().transpose(1, 2)
        for name, length, n in (("q", seq // 2 if shard else seq, heads), ("k", seq, kv_heads), ("v", seq, kv_heads))
    )
    out = attend(q, k, v, mask)
    return {"out": out, **inputs.gradients(out, q=q, k=k, v=v)}


def loss(inputs: Inputs, z_weight: float = 0.0, by_row: bool = False) -> Results:
    """Losses of eight tokens with the vocabulary of Llama 3."""
    bs, seq, vocab = 2, 4, 128256
    labels = torch.arange(bs * seq).mul(7919).remainder(vocab).view(bs, seq)
    labels[:, 3] = -100
    output_loss = OutputLoss(z_weight=z_weight, compile=inputs.compiled)
    if by_row:
        output_loss.by_row = []
    function = output_loss.compiled_by_row if by_row else output_loss.compiled
    logits = inputs.normal("logits", bs, seq, vocab, scale=2.0).requires_grad_()
    out = function(logits, inputs.add("labels", labels), z_weight)
    losses, rows = out if by_row else (out, None)
    results = {"losses": losses, **inputs.gradients(losses, logits=logits)}
    return results if rows is None else {**results, "rows": rows}


def rms_norm(inputs: Inputs) -> Results:
    dim = 2048  # above 1024, generated reductions have a loop
    x, weight = inputs.normal("x", 16, dim).requires_grad_(), inputs.normal("weight", dim).requires_grad_()
    out = inputs.compile(functools.partial(nn.functional.rms_norm, normalized_shape=(dim,), eps=1e-5))(x, weight=weight)
    return {"out": out, **inputs.gradients(out, x=x, weight=weight)}


def rope(inputs: Inputs) -> Results:
    bs, seq, heads, head_dim = 2, 64, 4, 128
    x = inputs.normal("x", bs, seq, heads, head_dim).requires_grad_()
    cos, sin = (inputs.normal(name, 1, seq, 1, head_dim // 2, dtype=torch.float32) for name in ("cos", "sin"))
    out = inputs.compile(apply_rope)(x, cos, sin)
    return {"out": out, **inputs.gradients(out, x=x)}


def muon(inputs: Inputs) -> Results:
    return {"update": inputs.compile(orthogonalize)(inputs.normal("momentum", 128, 320), 5)}


def adamw(inputs: Inputs) -> Results:
    """AdamW with ``foreach`` on float32 parameters of several shapes; gradients have the dtype of the inputs."""
    shapes = ((128, 96), (1000,), (7, 3))
    names = ("parameter", "gradient", "exp_avg", "exp_avg_sq")
    lists = {
        name: [inputs.normal(f"{name} {i}", *shape, dtype=torch.float32) for i, shape in enumerate(shapes)]
        for name in names
    }
    lists["gradient"] = [inputs.normal(f"gradient {i}", *shape) for i, shape in enumerate(shapes)]
    steps = [inputs.add(f"step {i}", torch.tensor(3.0)) for i in range(len(shapes))]

    def update(parameters: Any, gradients: Any, averages: Any, squares: Any, steps: Any) -> None:
        torch_adamw(
            parameters,
            [gradient.float() for gradient in gradients],
            averages,
            [square.abs_() for square in squares],
            [],
            steps,
            foreach=True,
            capturable=inputs.compiled,
            amsgrad=False,
            maximize=False,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            lr=3e-2,
            weight_decay=0.1,
        )

    inputs.compile(update)(lists["parameter"], lists["gradient"], lists["exp_avg"], lists["exp_avg_sq"], steps)
    return {f"{name} {i}": lists[name][i] for name in ("parameter", "exp_avg", "exp_avg_sq") for i in range(3)}


FUNCTIONS: dict[str, Callable[[Inputs], Results]] = {
    "block": block,
    "block, selective": functools.partial(block, mode="selective"),
    "block, document mask": functools.partial(block, documents=True, head_dim=128),
    "flex_attention": flex_attention,
    "flex_attention, context parallel": functools.partial(flex_attention, shard=True),
    "loss": loss,
    "loss, z-loss": functools.partial(loss, z_weight=1e-2),
    "loss, by row": functools.partial(loss, by_row=True),
    "RMSNorm": rms_norm,
    "RoPE": rope,
    "Muon": muon,
    "AdamW, foreach": adamw,
}


def eager(name: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], Results]:
    """The inputs of a function and its results, computed on the CPU by eager PyTorch."""
    inputs = Inputs(torch.device("cpu"), dtype)
    results = FUNCTIONS[name](inputs)
    return ({key: x.detach() for key, x in inputs.tensors.items()}, {key: x.detach() for key, x in results.items()})


class Recorder:
    """Records a program: recognizes tensors by their storages, so that views need no special treatment."""

    def __init__(self) -> None:
        self.program = Program()
        self.storages: dict[int, int] = {}
        self.alive: list[Any] = []  # so that no storage takes the address of a former one

    def define(self, tensor: Tensor) -> View:
        storage = tensor.untyped_storage()
        self.alive.append(storage)
        self.storages.setdefault(storage._cdata, len(self.storages))
        return self.find(tensor)

    def find(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        number = self.storages.get(value.untyped_storage()._cdata)
        assert number is not None, f"a tensor of shape {tuple(value.shape)} is computed outside of compiled functions"
        return View(number, tuple(value.shape), tuple(value.stride()), int(value.storage_offset()))

    def call(self, source: str, inputs: list[Any], outputs: Any) -> None:
        views = [self.find(value) for value in inputs]
        defined = [self.define(value) if isinstance(value, Tensor) else None for value in outputs]
        self.program.calls.append(Call(source, views, defined))


def record(name: str, dtype: torch.dtype) -> Program:
    from fake_gpu_compiler import capture
    from lowered_step import real_inductor
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses.fake_tensor import FakeTensorMode

    recorder = Recorder()

    class FakeInputs(Inputs):
        def add(self, key: str, values: Tensor) -> Tensor:
            tensor = super().add(key, values)
            recorder.program.inputs[key] = recorder.define(tensor)
            return tensor

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        real_inductor(None),
        # Without the option that wraps a compiled function as one operation: on fake tensors, that is not called.
        patch.object(llama, "compiled_flex_attention", lambda: torch.compile(torch_flex_attention)),
        capture(recorder.call),
        patch.object(CachingAutotuner, "precompile", lambda *_, **__: None),  # only the source is needed
    ):
        results = FUNCTIONS[name](FakeInputs(torch.device("cuda", 0), dtype))
    recorder.program.results = {key: recorder.find(x) for key, x in results.items()}
    return recorder.program


# Largest accepted error of a result, relative to its norm: in float32; and in bfloat16 as a multiple of the error of
# eager bfloat16, or that of one rounding.
FLOAT32_BOUND = 1e-5
BFLOAT16_RATIO = 1.25
BFLOAT16_BOUND = 2e-3


@dataclass(frozen=True)
class Comparison:
    """Errors of generated code and of eager in the same dtype, both against eager float32, by result."""

    dtype: torch.dtype
    errors: dict[str, float]
    eager: dict[str, float]
    kernels: int
    """Number of Triton kernels, each of which was launched."""

    def bound(self, result: str) -> float:
        return (
            FLOAT32_BOUND if self.dtype is torch.float32 else max(BFLOAT16_BOUND, BFLOAT16_RATIO * self.eager[result])
        )

    @property
    def problems(self) -> list[str]:
        return [
            f"{result} is off by {error:.1e} of its norm, above {self.bound(result):.1e}"
            for result, error in self.errors.items()
            if not error <= self.bound(result)
        ]


class Processes:
    """A process that compiles for a GPU, and one that runs the result on the CPU."""

    def __init__(self, folder: Path, gpu: str = "h100-80"):
        self.compiler = Worker(folder, install_compiler, gpu)
        self.interpreter = Interpreter()

    def close(self) -> None:
        self.compiler.close()
        self.interpreter.close()


def relative_error(result: Tensor, reference: Tensor) -> float:
    difference = (result.double() - reference.double()).norm()
    return float(difference / reference.double().norm())


def compare(
    processes: Processes,
    name: str,
    dtype: torch.dtype,
    edit: Callable[[Program], Program] = lambda program: program,
) -> Comparison:
    """Compile a function of ``FUNCTIONS`` and compare its results; ``edit`` changes the generated code.

    A GPU chooses between configurations of a kernel by timing them. In float32, the first one runs; in bfloat16, the
    last one.
    """
    program = edit(processes.compiler.run(record, name, dtype))
    reference, (inputs, low) = eager(name, torch.float32)[1], eager(name, dtype)
    executed = processes.interpreter.run(program, inputs, 0 if dtype is torch.float32 else -1)
    errors = {key: relative_error(executed.results[key], x) for key, x in reference.items()}
    return Comparison(
        dtype, errors, {key: relative_error(low[key], x) for key, x in reference.items()}, len(executed.launches)
    )
