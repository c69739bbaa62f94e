"""Private PyTorch APIs: the listed ones exist and behave as the package needs, and no other one is used."""

import ast
import inspect
import json
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from gloo_pool import GlooPool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.optim.adamw import adamw

import torchtrain.torch_internals as internals
from torchtrain.distributed.connections import gloo_backend
from torchtrain.distributed.process_group import destroy_process_group

PACKAGE = Path(internals.__file__).parent
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def resolve(path: str) -> Any:
    """Import the object at a dotted path: its longest prefix that is a module, and attributes of it."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for name in parts[i:]:
            found = getattr(found, name)
        return found
    raise AssertionError(f"{path} does not exist")


def skip_if_absent(purpose: str) -> None:
    if "since 2.13" in purpose and VERSION < (2, 13):
        pytest.skip("since 2.13")
    if "until 2.14" in purpose and VERSION > (2, 14):
        pytest.skip("until 2.14")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group(gloo_backend(), store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", internals.NAMES)
def test_every_listed_name_exists(name: str) -> None:
    skip_if_absent(internals.NAMES[name][1])
    assert getattr(internals, name) is not None


@pytest.mark.parametrize("path", internals.MEMBERS)
def test_every_listed_member_exists(path: str) -> None:
    skip_if_absent(internals.MEMBERS[path])
    resolve(path)


def test_missing_name_raises_an_import_error_that_names_it() -> None:
    with (
        patch.dict(internals.NAMES, missing=("torch.removed", "nothing")),
        pytest.raises(ImportError, match=r"this PyTorch has no torch.removed.missing \(nothing\); take 2.11 to 2.15"),
    ):
        _ = internals.missing


def first_name(node: ast.expr) -> str:
    """The first word of a dotted name; empty if the attribute is one of another expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_uses(path: Path) -> Iterator[str]:
    """Yield the private names of torch that ``path`` imports or uses, as dotted paths; not operators in torch.ops."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and first_name(node) == "torch":
            names = [ast.unparse(node)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "torch" and parts[1:2] != ["ops"] and any(p.startswith("_") and p[1] != "_" for p in parts):
                yield name


def members_beside(path: Path) -> dict[str, str]:
    """Members of PyTorch that the modules in the folder of ``path`` may use; a plugin may have a list of its own."""
    own = path.with_name("torch_internals.py")
    if own.parent == PACKAGE or not own.exists():
        return internals.MEMBERS
    name = own.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".")
    return internals.MEMBERS | import_module(name).MEMBERS


def test_no_unlisted_private_name_is_used() -> None:
    for path in PACKAGE.rglob("*.py"):
        members = members_beside(path)
        for use in private_uses(path) if path.name != "torch_internals.py" else ():
            known = any(f"{use}.".startswith(f"{m}.") or m.startswith(f"{use}.") for m in members)
            assert known, f"{path.relative_to(PACKAGE)}: {use} belongs to torch_internals.py"


def test_fused_adamw_reads_found_inf() -> None:
    parameter, gradient, mean, square_mean = torch.ones(64), torch.ones(64), torch.zeros(64), torch.zeros(64)
    step = torch.zeros(())

    def update(found_inf: float) -> None:
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
        tensors = [parameter], [gradient], [mean], [square_mean], [], [step]
        found = torch.tensor(found_inf)
        adamw(*tensors, found_inf=found, fused=True, foreach=False, amsgrad=False, maximize=False, **options)

    update(1.0)
    assert torch.equal(parameter, torch.ones(64))
    assert step == 0
    update(0.0)
    assert (parameter < 1).all()
    assert step == 1


def test_fsdp_allocates_the_reduce_scatter_input_before_the_output(mesh: DeviceMesh) -> None:
    """The custom reduce-scatters distinguish the two by their order."""
    allocated: list[Tensor] = []

    class Recording(internals.ReduceScatter):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            allocated.append(torch.full(tuple(size), torch.nan, dtype=dtype, device=device))
            return allocated[-1]

        def __call__(self, *_: Any, **__: Any) -> None:
            raise AssertionError("a group of one rank needs no reduce-scatter")

    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh["shard"])
    assert isinstance(model, FSDPModule)
    model.set_custom_reduce_scatter(Recording())
    model._set_unshard_async_op(True)
    for _ in range(2):
        allocated.clear()
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        filled, output = allocated
        assert torch.equal(filled, torch.full((16,), 2.0))
        gradient = model.weight.grad.to_local()
        assert gradient.data_ptr() == output.data_ptr()
        assert torch.equal(gradient, torch.full((4, 4), 2.0))


def test_rowwise_parallel_calls_the_output_method_that_the_package_overrides(mesh: DeviceMesh) -> None:
    seen = []

    class Recording(RowwiseParallel):
        @staticmethod
        def _prepare_output_fn(layouts: Any, use_local: bool, _module: Any, outputs: Any, _mesh: Any) -> Any:
            seen.append((layouts, use_local))
            return outputs.to_local()

    style = Recording(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(nn.Embedding(8, 4), mesh["shard"], style)(torch.zeros(1, 2, dtype=torch.int64))
    assert seen == [((Shard(1),), True)]


def test_flattened_mesh_axes_and_group_timeouts(mesh: DeviceMesh) -> None:
    both = mesh["replicate", "shard"]._flatten("both")
    assert both.mesh_dim_names == ("both",)
    assert DeviceMesh._concatenate([mesh["replicate"], mesh["shard"]]).mesh_dim_names == ("replicate", "shard")
    assert dist.group.WORLD in internals.all_groups()
    assert both.get_group() in internals.all_groups()
    for group in internals.all_groups():
        internals.set_group_timeout(timedelta(seconds=77), group)
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


def test_flight_recorders_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d: Any = torch._C._distributed_c10d
    assert "version" in json.loads(c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    # NCCL has its own recorder, which a CPU build of torch does not have.
    entries = [{"process_group": ["0", "default_pg"], "state": "scheduled"}]
    dump = Mock(return_value=json.dumps({"entries": entries}).encode())
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", dump, raising=False)
    assert internals.flight_record()[-1:] == entries


def test_private_functions_of_compiled_blocks() -> None:
    from torch._functorch import partitioners

    assert isinstance(internals.inductor_compiled_code, torch._ops.HigherOrderOperator)
    assert list(inspect.signature(partitioners.has_recomputable_rng_ops).parameters) == ["fx_g"]
    assert "has_recomputable_rng_ops(" in inspect.getsource(partitioners.min_cut_rematerialization_partition)


def gather_result(first_groups: int) -> list[float]:
    """Return the result of an operation on a sharded tensor."""
    for _ in range(first_groups):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    tensor = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Replicate()], src_data_rank=None)
    gathered: list[float] = (tensor + 1).full_tensor().tolist()
    return gathered


def gather_on_two_process_groups(store: Path) -> tuple[list[float], list[float]]:
    """The first of two equal meshes has groups of other names, some of which exist for the second one, too."""
    rank, first = dist.get_rank(), gather_result(3)
    destroy_process_group()
    dist.init_process_group(gloo_backend(), init_method=f"file://{store}", rank=rank, world_size=4)
    return first, gather_result(0)


def test_meshes_of_an_earlier_process_group_are_forgotten(gloo: GlooPool, tmp_path: Path) -> None:
    numbers = list(range(1, 9))
    assert gloo.run(4, gather_on_two_process_groups, tmp_path / "store") == [(numbers, numbers)] * 4
