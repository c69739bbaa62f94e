"""Models of a user's module: the code of docs/adding-a-model.md, run as it is there, from outside of the package."""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked_run import different_tensors, finish, saved_tensors

from torchtrain.checkpoint.weights import check_same_architecture
from torchtrain.config.registry import MODELS
from torchtrain.errors import CheckpointError, ConfigError
from torchtrain.models.llama.model import Transformer, TransformerConfig
from torchtrain.models.model_config import build_model_config
from torchtrain.models.options import ModelConfig
from torchtrain.models.spec import ModelSpec

ROOT = Path(__file__).parent.parent
SIZES = [
    "--model.flavor=",
    *("--model.shape.dim", "32", "--model.shape.n_layers", "2", "--model.shape.n_heads", "4"),
    *("--model.shape.n_kv_heads", "2", "--model.shape.ffn_dim", "64", "--training.local_batch_size", "4"),
    *("--training.steps", "4"),
]
LAYOUTS = {
    "tensor": ["--parallelism.tensor_parallel_degree", "2"],
    "context": ["--parallelism.context_parallel_degree", "2"],
    "pipeline": ["--parallelism.pipeline_parallel_degree", "2"],
}
# The page, and the number of the Python block in it, of each module.
WALKTHROUGHS = {
    "geglu": ("adding-a-model.md", 0),
    "parallel_block": ("adding-a-model.md", 1),
    "sandwich": ("own-architecture.md", 0),
}


def import_from(folder: Path) -> None:
    """What PYTHONPATH does for a process that starts."""
    sys.path.insert(0, str(folder))


def options(name: str) -> list[str]:
    return ["--job.import", name, "--model.name", name, *SIZES]


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def write_modules(folder: Path) -> Path:
    """Write the Python block of each walkthrough as a module."""
    for name, (page, number) in WALKTHROUGHS.items():
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        (folder / f"{name}.py").write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number])
    # The sandwich with LayerNorm, and the function of the page that parallelizes it.
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own-architecture.md").read_text("utf-8"), re.DOTALL)
    code = blocks[0].replace("nn.RMSNorm(config.dim, 1e-6)", "nn.LayerNorm(config.dim, bias=False)")
    code = code.replace(
        "linear_layers=LINEAR_LAYERS,", "linear_layers=LINEAR_LAYERS,\n        parallelize=parallelize,"
    )
    code = code.replace('"sandwich"', '"layer_norm"')
    code = code.replace("LINEAR_LAYERS = {", f"{blocks[1]}\n\nLINEAR_LAYERS = {{")
    (folder / "layer_norm.py").write_text(code)
    return folder


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_modules(tmp_path_factory.mktemp("modules"))


MODELS_OF_PAGES = [*WALKTHROUGHS, "layer_norm"]


def of_models(*fast: str) -> Any:
    """Parametrizes a test by ``trained``; of other models than ``fast`` it is slow."""
    names = [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in MODELS_OF_PAGES]
    return pytest.mark.parametrize("trained", names, indirect=True, scope="module")


def on_layouts(*fast: tuple[str, str]) -> Any:
    """Parametrizes a test by ``trained`` and ``layout``; of other pairs than ``fast`` it is slow."""
    pairs = [
        pytest.param(name, layout, marks=[] if (name, layout) in fast else pytest.mark.slow)
        for name in MODELS_OF_PAGES
        for layout in LAYOUTS
    ]
    return pytest.mark.parametrize(("trained", "layout"), pairs, indirect=["trained"], scope="module")


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, modules: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """The name of a walkthrough's model, and the folder of a run of it on one rank."""
    folder = tmp_path_factory.mktemp("one_rank")
    finish(folder, *options(request.param), ranks=1, hook=partial(import_from, modules))
    return request.param, folder


@pytest.fixture
def imported(modules: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Imports a walkthrough's module into this process."""
    monkeypatch.syspath_prepend(modules)
    return __import__


# Tensor parallelism of each model depends on its modules; the other layouts take blocks as they are.
@on_layouts(("parallel_block", "tensor"), ("layer_norm", "tensor"), ("sandwich", "pipeline"))
def test_own_model_trains_the_same_run_on_two_ranks(
    trained: tuple[str, Path], modules: Path, layout: str, tmp_path: Path
) -> None:
    name, one_rank = trained
    switches = [*LAYOUTS[layout], "--checkpoint.no-enable"]
    finish(tmp_path, *options(name), *switches, ranks=2, hook=partial(import_from, modules))
    assert losses(tmp_path) == pytest.approx(losses(one_rank), rel=1e-5)
    assert len(losses(tmp_path)) == 4


@of_models("sandwich")
def test_own_model_resumes_bitwise_identically(trained: tuple[str, Path], modules: Path, tmp_path: Path) -> None:
    name, one_rank = trained
    hook = partial(import_from, modules)
    finish(tmp_path, *options(name), "--training.steps", "2", "--lr_scheduler.total_steps", "4", ranks=1, hook=hook)
    finish(tmp_path, *options(name), "--lr_scheduler.total_steps", "4", ranks=1, hook=hook)
    assert different_tensors(saved_tensors(tmp_path, 4), saved_tensors(one_rank, 4)) == []


def test_linear_layers_of_the_block_itself_are_rejected() -> None:
    message = r"linear_layers names 'up', a child of the block itself; put it into a child module, such as 'mlp.up'"
    with pytest.raises(ConfigError, match=message):
        ModelSpec(TransformerConfig, Transformer, {}, {"up": "colwise", "down": "rowwise"})


def test_weights_of_another_architecture_are_rejected(imported: Callable[[str], object], tmp_path: Path) -> None:
    imported("geglu")
    try:
        llama, geglu = (build_model_config(ModelConfig(name=name), None, 128) for name in ("llama3", "geglu"))
        assert llama == geglu  # but for the family, which is not compared
        with pytest.raises(CheckpointError, match=r"another architecture.* model.name = 'llama3', here 'geglu'"):
            check_same_architecture(llama, geglu, tmp_path)
        with pytest.raises(
            ConfigError, match=r"model.options.window is not an option of model.name = 'geglu'; there are dim,"
        ):
            build_model_config(ModelConfig(name="geglu", options={"window": 4}), None, 128)
    finally:
        del MODELS._entries["geglu"], sys.modules["geglu"]
