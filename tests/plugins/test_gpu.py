"""What one GPU can prove: short runs on CUDA beside the same runs on a CPU in float32. Run ``pytest -m gpu``.

The cases of the device "cpu" execute the same code where there is no GPU. Most of them are slow tests.
"""

import gc
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_run import different_tensors, saved_tensors
from torch.distributed.device_mesh import init_device_mesh

from torchtrain.config.parse import parse
from torchtrain.distributed.mesh import local
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.parallelisms.attention_backend import choose_attention_backend
from torchtrain.parallelisms.compile import apply_compile
from torchtrain.parallelisms.options import ActivationCheckpointConfig
from torchtrain.parallelisms.tensor_parallel import apply_tensor_parallel
from torchtrain.plugins.comparison.runs import RunFolder, compare_runs, open_run, relative
from torchtrain.plugins.exact_sums.exact_sums import ExactSums
from torchtrain.plugins.float8.conversion import Float8
from torchtrain.plugins.float8.options import Float8Config
from torchtrain.plugins.planner.request import resolve_gpu, resolve_model_config
from torchtrain.plugins.planner.summary import estimate
from torchtrain.train import main
from torchtrain.trainer import initialize

# A warning of another version of PyTorch or its compiler is no reason to know less about the GPU.
pytestmark = pytest.mark.filterwarnings("default")

ROOT = Path(__file__).parents[2]
STEPS = 5
BASE = [
    *("--model.shape.dim=256", "--model.shape.n_layers=2", "--model.shape.n_heads=4", "--model.shape.n_kv_heads=2"),
    *("--model.shape.ffn_dim=512", "--training.seq_len=128", "--training.local_batch_size=4"),
    *(f"--training.steps={STEPS}", "--optimizer.lr=1e-3", "--lr_scheduler.warmup_steps=1", "--metrics.log_freq=1"),
    *("--metrics.no-enable_tensorboard", "--report.no-enable", "--checkpoint.no-enable"),
]

# Options that change what is computed: the reference on the CPU has them, too.
CHANGES: dict[str, tuple[str, ...]] = {
    "document mask": ("--data.document_mask",),
    "z-loss": ("--training.z_loss_weight=1e-2",),
    "muon": ("--optimizer.name=muon",),
    "bfloat16 states": ("--optimizer.state_dtype=bfloat16",),
    "tied embeddings": ("--model.shape.tied_embeddings=True",),
    "qk norm": ("--model.shape.qk_norm=True",),
}
# Options that change only how it is computed: the reference is the run without them.
KEEPS: dict[str, tuple[str, ...]] = {
    "default": (),
    "float32": ("--training.mixed_precision_param=float32",),
    "microbatches": ("--training.local_batch_size=2", "--training.global_batch_size=4"),
    "unsharded gradients": (
        *("--training.local_batch_size=2", "--training.global_batch_size=4"),
        "--parallelism.fsdp_gradient_accumulation=unsharded",
    ),
    "bfloat16 reduction": ("--training.mixed_precision_reduce=bfloat16",),
    "exact sums": ("--training.sums=exact", "--training.local_batch_size=2", "--training.global_batch_size=4"),
    "selective": ("--activation_checkpoint.mode=selective",),
    "full": ("--activation_checkpoint.mode=full",),
    "loss at once": ("--training.loss_chunk_tokens=0",),
    "small loss chunks": ("--training.loss_chunk_tokens=32",),
    "math attention": ("--training.attention_backend=math",),
    "norms and averages": ("--diagnostics.norms_freq=1", "--ema.enable"),
    "checkpoints": ("--checkpoint.enable", "--checkpoint.interval=2"),
}
ON_CUDA_ONLY: dict[str, tuple[str, ...]] = {
    "cudnn attention": ("--training.attention_backend=cudnn",),
    "flash attention": ("--training.attention_backend=flash",),
    "flash attention 3": ("--training.attention_backend=fa3",),
    "efficient attention": ("--training.attention_backend=efficient", "--model.shape.n_kv_heads=4"),  # has no groups
    "CPU offload": ("--training.enable_cpu_offload",),
    "pinned checkpoints": (
        *("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.async_mode=async_with_pinned_mem"),
    ),
    "float8 tensorwise": ("--float8.recipe=tensorwise",),
    "float8 rowwise": ("--float8.recipe=rowwise",),
}
# PyTorch 2.11 has no memory budget with grouped queries.
COMPILED_ONLY = {"memory budget": ("--activation_checkpoint.mode=memory_budget", "--model.shape.n_kv_heads=4")}
OPTIONS = CHANGES | KEEPS | ON_CUDA_ONLY | COMPILED_ONLY

# Largest relative difference of loss and gradient norm at any of the steps, by the precision of the run on the device.
BOUNDS = {"float32": (1e-4, 1e-3), "bfloat16": (5e-3, 1e-1), "float8": (2e-2, 2e-1)}


def cases() -> list[Any]:
    """The device, compilation and options of each run; uncompiled runs are first because they take less time."""
    found = []
    for compiled in (False, True):
        for name in OPTIONS:
            if name in COMPILED_ONLY and not compiled:
                continue
            case = f"{'compiled' if compiled else 'eager'} {name}"
            found.append(pytest.param("cuda", compiled, name, marks=pytest.mark.gpu, id=f"cuda {case}"))
            if name not in ON_CUDA_ONLY:
                default = not compiled and name == "document mask"
                marks = [] if default else [pytest.mark.slow]
                found.append(pytest.param("cpu", compiled, name, marks=marks, id=f"cpu {case}"))
    return found


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of short documents."""
    folder = tmp_path_factory.mktemp("texts")
    code = Path(json.decoder.__file__).read_text(encoding="utf-8")
    for number, start in enumerate(range(0, len(code), 300)):
        (folder / f"{number:03}.txt").write_text(code[start : start + 300], encoding="utf-8")
    return folder


class Runs:
    """Trains in this process, on ``texts``."""

    def __init__(self, folders: pytest.TempPathFactory, texts: Path):
        self.folders, self.texts = folders, texts
        self.reference = cache(self._reference)

    def train(self, device: str, *options: str) -> RunFolder:
        torch._dynamo.reset()  # otherwise the blocks of all runs count as recompilations of one function
        folder = self.folders.mktemp("run")
        outputs = [f"--data.path={self.texts}", f"--job.device={device}", f"--job.dump_folder={folder}"]
        choose_attention_backend("auto")  # a run with "auto" keeps the choice of the process
        assert main([*BASE, *outputs, *options]) == 0
        return open_run(folder)

    def _reference(self, *options: str) -> RunFolder:
        return self.train("cpu", "--training.mixed_precision_param=float32", *options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Runs:
    return Runs(tmp_path_factory, texts)


DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_run_resumes_with_the_same_bits(device: str, compiled: bool, texts: Path, tmp_path: Path) -> None:
    def train(folder: str, steps: int) -> dict[str, Any]:
        options = [f"--data.path={texts}", f"--job.device={device}", f"--job.dump_folder={tmp_path / folder}"]
        options += ["--lr_scheduler.total_steps=6", f"--training.steps={steps}", "--training.deterministic"]
        options += ["--checkpoint.enable", *(["--compile.enable"] if compiled else [])]
        command = [sys.executable, "-m", "torchtrain.train", *BASE, *options]
        result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
        assert result.returncode == 0, result.stderr
        return saved_tensors(tmp_path / folder, steps)

    whole = train("whole", 6)
    train("resumed", 3)
    resumed = train("resumed", 6)
    assert different_tensors(whole, resumed) == []


def command(name: str, *options: str | Path) -> str:
    """The output of ``python -m torchtrain.NAME``."""
    words = [sys.executable, "-m", f"torchtrain.{name}", *map(str, options)]
    result = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("device", DEVICES)
def test_commands_read_a_run(device: str, texts: Path, tmp_path: Path) -> None:
    """A step is explained under the weights before it, which two steps restore; text is that of a CPU."""
    run = tmp_path / "run"
    options = [f"--data.path={texts}", f"--job.device={device}", f"--job.dump_folder={run}", "--training.deterministic"]
    options += ["--training.steps=6", "--checkpoint.enable", "--checkpoint.interval=3"]
    command("train", *BASE, *options)
    found = json.loads(command("explain", run, "--step=6", "--json"))
    assert found["weights"] == {"checkpoint_step": 3, "replayed": 2, "exact": True}
    assert found["loss"] == pytest.approx(open_run(run).lines[6]["loss"], rel=BOUNDS["bfloat16"][0])
    greedy = [run, "--prompt=import json", "--temperature=0", "--max_new_tokens=40", "--dtype=float32"]
    text = command("generate", *greedy, f"--device={device}")
    assert text == command("generate", *greedy, "--device=cpu")
    assert command("generate", *greedy[:-1], f"--device={device}").startswith("import json")  # in bfloat16


# Drops the wait between a step's update and the copy of its results to the host.
WITHOUT_WAIT = """
import torch
from torchtrain.checkpoint.states import Stager
stage = Stager.copy_to_host
def stage_at_once(stager, tensors):
    wait, torch.cuda.Stream.wait_stream = torch.cuda.Stream.wait_stream, lambda *_: None
    try:
        return stage(stager, tensors)
    finally:
        torch.cuda.Stream.wait_stream = wait
Stager.copy_to_host = stage_at_once
"""


@pytest.mark.gpu
@pytest.mark.parametrize("planted", [False, True], ids=["", "planted"])
def test_streams_do_not_race(planted: bool, texts: Path, tmp_path: Path) -> None:
    """By PyTorch's sanitizer: gradient accumulation, prefetched batches, and saves that overlap with steps."""
    options = [*BASE, "--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.async_mode=async_with_pinned_mem"]
    options += ["--training.global_batch_size=8", f"--data.path={texts}", f"--job.dump_folder={tmp_path}"]
    code = (
        f"import sys\n{WITHOUT_WAIT if planted else ''}\nfrom torchtrain.train import main\nsys.exit(main({options}))"
    )
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, capture_output=True)
    assert ("possible data race" in result.stderr) == planted, result.stderr
    assert (result.returncode == 0) == (not planted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def test_exact_sums_are_the_same_bits_in_any_order_and_on_a_cpu(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(257, 33, generator=generator).to(dtype) * 10.0**-n for n in range(8)]

    def total(device: str, order: list[torch.Tensor]) -> torch.Tensor:
        sums = ExactSums(torch.device(device))
        sums.exponent = 3
        sums.begin(len(order))
        rounded = torch.stack([sums.rounded(gradient.to(device)) for gradient in order])
        return rounded.sum(0).cpu()

    expected = total("cpu", gradients)
    assert expected.count_nonzero() == expected.numel()
    assert torch.equal(total(device, gradients), expected)
    assert torch.equal(total(device, gradients[::-1]), expected)


def block_in_float8(device: str, recipe: Any, compiled: bool, tensor_parallel: bool) -> list[torch.Tensor]:
    """Output of a block, then the gradients of its input and its parameters."""
    float8 = Float8(Float8Config(recipe=recipe), emulate=device == "cpu")
    with torch.device("meta"):
        model = Transformer(TransformerConfig(256, 1, 4, 2, 512, 64, max_seq_len=128, qkv_bias=True)).bfloat16()
    float8.convert(model, shards=1)
    if tensor_parallel:
        mesh = init_device_mesh(device, (1,), mesh_dim_names=("tensor",))
        apply_tensor_parallel(model, mesh, sequence_parallel=True, styles=float8.styles())
    model.to_empty(device=device)
    initialize([model], 0, torch.device(device))
    block = model.layers["0"]
    if compiled:
        apply_compile(model, ActivationCheckpointConfig())
    x, gradient = torch.randn(2, 2, 128, 256, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    x.requires_grad_()
    out = block(x, model.rope_cos[None, :, None], model.rope_sin[None, :, None])
    out.backward(gradient)
    gradients = [local(parameter.grad) for _, parameter in sorted(block.named_parameters())]
    return [out.detach(), local(x.grad), *gradients]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(
    ("device", "compiled"),
    [
        pytest.param("cuda", False, marks=pytest.mark.gpu),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
        pytest.param("cpu", False, marks=pytest.mark.slow),
    ],
)
def test_float8_with_tensor_parallelism_computes_as_without(device: str, compiled: bool, recipe: str) -> None:
    """A group of a single rank: the layouts of the matrices are those that ``torch._scaled_mm`` needs."""
    pytest.importorskip("torchao")
    torch._dynamo.reset()
    expected = block_in_float8(device, recipe, compiled, tensor_parallel=False)
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    found = block_in_float8(device, recipe, compiled, tensor_parallel=True)
    errors = [((a - b).float().norm() / b.float().norm()).item() for a, b in zip(found, expected, strict=True)]
    print(f"{device} {recipe}: {max(errors):.1e}")  # noqa: T201
    assert max(errors) < 1e-2


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("device", DEVICES)
def test_peak_memory_is_the_estimate_of_the_planner(device: str, mode: str, runs: Runs) -> None:
    """On a CPU, where the whole process is measured, the estimate is only a lower bound."""
    options = ["--model.shape.dim=1024", "--model.shape.ffn_dim=4096", "--model.shape.n_heads=16"]
    options += ["--training.seq_len=512", "--training.steps=3", f"--activation_checkpoint.mode={mode}"]
    config = parse([*BASE, *options, "--estimate.world_size=1"])
    (rank,) = estimate(config, resolve_model_config(config), resolve_gpu(config)).as_dict()["ranks"]
    planned = rank["peak_active_gib"]
    gc.collect()
    before = 0
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    measured = max(line["memory_gib"] for line in runs.train(device, *options).lines.values()) - before / 2**30
    print(f"{mode}: {measured:.3f} GiB measured, {planned:.3f} GiB planned")  # noqa: T201
    assert planned < measured if device == "cpu" else abs(planned - measured) < 0.05 * measured + 0.1


@pytest.mark.parametrize(("device", "compiled", "name"), cases())
def test_option_trains_as_on_a_cpu_in_float32(device: str, compiled: bool, name: str, runs: Runs) -> None:
    precision = "float32" if name == "float32" else "float8" if name.startswith("float8") else "bfloat16"
    if precision == "float8":
        pytest.importorskip("torchao")
    if name == "flash attention 3":
        pytest.importorskip("flash_attn_interface")
    ours = runs.train(device, *OPTIONS[name], *(["--compile.enable"] if compiled else []))
    changed = [option for option in OPTIONS[name] if name in CHANGES or "n_kv_heads" in option]
    reference = runs.reference(*changed)
    assert sorted(ours.lines) == sorted(reference.lines) == list(range(1, STEPS + 1))
    report = "\n".join(compare_runs(ours, reference)["logged"]["lines"])
    print(f"{device} {name}: {report}")  # noqa: T201
    for key, bound in zip(("loss", "grad_norm"), BOUNDS[precision], strict=True):
        assert max(relative(ours, reference, step, key) for step in ours.lines) <= bound, report
