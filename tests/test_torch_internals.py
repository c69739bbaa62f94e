"""The private PyTorch that the package uses is there, does what it is used for, and is used nowhere else unseen."""

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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import torchtrain.torch_internals as internals

PACKAGE = Path(internals.__file__).parent
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def resolve(path: str) -> Any:
    """The object at a dotted path: the longest module in it, and attributes from there."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for name in parts[i:]:
            found = getattr(found, name)
        return found
    raise AssertionError(f"nothing at {path}")


def skip_what_is_new(purpose: str) -> None:
    if "since 2.13" in purpose and VERSION < (2, 13):
        pytest.skip("since 2.13")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", internals.NAMES)
def test_each_name_is_there(name: str) -> None:
    skip_what_is_new(internals.NAMES[name][1])
    assert getattr(internals, name) is not None


@pytest.mark.parametrize("path", internals.MEMBERS)
def test_each_member_is_there(path: str) -> None:
    skip_what_is_new(internals.MEMBERS[path])
    resolve(path)


def test_a_name_that_is_gone_is_named() -> None:
    with (
        patch.dict(internals.NAMES, gone=("torch.nowhere", "nothing")),
        pytest.raises(ImportError, match=r"this PyTorch has no torch.nowhere.gone \(nothing\); take 2.11 to 2.14"),
    ):
        _ = internals.gone


def private_uses(path: Path) -> Iterator[str]:
    """What ``path`` imports or reaches from torch by a private name, as dotted paths; aten's operators are not."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "torch" and parts[1:2] != ["ops"] and any(p.startswith("_") and p[1] != "_" for p in parts):
                yield name


def test_no_other_is_used() -> None:
    for path in PACKAGE.rglob("*.py"):
        for use in private_uses(path) if path.name != "torch_internals.py" else ():
            known = any(f"{use}.".startswith(f"{m}.") or m.startswith(f"{use}.") for m in internals.MEMBERS)
            assert known, f"{path.relative_to(PACKAGE)}: {use} belongs to torch_internals.py"


def test_the_fused_update_reads_found_inf() -> None:
    parameter = nn.Parameter(torch.ones(64))
    parameter.grad = torch.ones(64)
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(parameter, torch.ones(64))
    assert optimizer.state[parameter]["step"] == 0
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert (parameter < 1).all()
    assert optimizer.state[parameter]["step"] == 1


def test_fsdp_asks_for_the_input_and_then_for_the_output(mesh: DeviceMesh) -> None:
    """The custom reduce-scatters tell the two apart by their order."""
    asked: list[Tensor] = []

    class Noting(internals.ReduceScatter):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            asked.append(torch.full(tuple(size), torch.nan, dtype=dtype, device=device))
            return asked[-1]

        def __call__(self, *_: Any, **__: Any) -> None:
            raise AssertionError("on one rank nothing is sent")

    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh["shard"])
    assert isinstance(model, FSDPModule)
    model.set_custom_reduce_scatter(Noting())
    model._set_unshard_async_op(True)
    for _ in range(2):
        asked.clear()
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        filled, given = asked
        assert torch.equal(filled, torch.full((16,), 2.0))
        gradient = model.weight.grad.to_local()
        assert gradient.data_ptr() == given.data_ptr()
        assert torch.equal(gradient, torch.full((4, 4), 2.0))


def test_a_rowwise_style_prepares_its_output_by_the_method_that_is_replaced(mesh: DeviceMesh) -> None:
    seen = []

    class Noting(RowwiseParallel):
        @staticmethod
        def _prepare_output_fn(layouts: Any, use_local: bool, _module: Any, outputs: Any, _mesh: Any) -> Any:
            seen.append((layouts, use_local))
            return outputs.to_local()

    style = Noting(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(nn.Embedding(8, 4), mesh["shard"], style)(torch.zeros(1, 2, dtype=torch.int64))
    assert seen == [((Shard(1),), True)]


def test_groups_of_several_axes_and_their_time_out(mesh: DeviceMesh) -> None:
    both = mesh["replicate", "shard"]._flatten("both")
    assert both.mesh_dim_names == ("both",)
    assert DeviceMesh._concatenate([mesh["replicate"], mesh["shard"]]).mesh_dim_names == ("replicate", "shard")
    assert dist.group.WORLD in internals.all_groups()
    assert both.get_group() in internals.all_groups()
    for group in internals.all_groups():
        internals.set_group_timeout(timedelta(seconds=77), group)
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


def test_the_flight_recorders_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d: Any = torch._C._distributed_c10d
    assert "version" in json.loads(c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    # NCCL has one of its own. A torch that is built for CPUs has neither.
    entries = [{"process_group": ["0", "default_pg"], "state": "scheduled"}]
    dump = Mock(return_value=json.dumps({"entries": entries}).encode())
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", dump, raising=False)
    assert internals.flight_record()[-1:] == entries


def test_what_compiled_blocks_rely_on() -> None:
    from torch._functorch import partitioners

    assert isinstance(internals.inductor_compiled_code, torch._ops.HigherOrderOperator)
    assert list(inspect.signature(partitioners.has_recomputable_rng_ops).parameters) == ["fx_g"]
    assert "has_recomputable_rng_ops(" in inspect.getsource(partitioners.min_cut_rematerialization_partition)
