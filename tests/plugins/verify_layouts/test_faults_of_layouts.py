"""torchtrain.verify_layouts names planted faults by the first wrong tensor."""

import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pages import python_blocks
from planted import PACKAGE

from torchtrain.verify_layouts import main


def verify(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the command; returns its exit code and the entries of its layouts."""
    with redirect_stdout(io.StringIO()) as output:
        code = main([*arguments, "--json"])
    return code, json.loads(output.getvalue())["layouts"]


@dataclass(frozen=True)
class Fault:
    """``new`` replaces ``old`` in ``file``, on more than one rank. The command must then name ``key``."""

    file: str
    old: str
    new: str
    layout: str
    key: str
    kind: str = "differs"
    ranks: tuple[int, ...] | None = None
    factor: float | None = None
    note: str = ""
    step: int = 1
    options: tuple[str, ...] = ()


TENSOR, CONTEXT = "parallelisms/tensor_parallel.py", "parallelisms/context_parallel.py"
FSDP = "parallelisms/fsdp.py"
MISSING_SUM = "a sum over ranks is missing"
FAULTS = {
    "norms not summed over sequence-parallel ranks": Fault(
        TENSOR,
        "self.contributes = sharded_input or mesh.get_local_rank() == 0",
        "self.contributes = mesh.get_local_rank() == 0",
        "tensor=2",
        "norm.weight gradient",
    ),
    "one norm of all not summed": Fault(
        TENSOR,
        "torch._foreach_copy_(gradients, torch.split(sums, [g.numel() for g in gradients]))",
        "torch._foreach_copy_(gradients[1:], torch.split(sums, [g.numel() for g in gradients])[1:])",
        "tensor=2",
        "layers.0.attention_norm.weight gradient",
        note=MISSING_SUM,
    ),
    "norms summed twice": Fault(
        TENSOR,
        "    all_reduce(sums, group=mesh.get_group())\n",
        "    all_reduce(sums, group=mesh.get_group())\n    all_reduce(sums, group=mesh.get_group())\n",
        "tensor=2",
        "norm.weight gradient",
        factor=2,
    ),
    "norms summed without sequence parallelism": Fault(
        TENSOR,
        "self.contributes = sharded_input or mesh.get_local_rank() == 0",
        "self.contributes = True",
        "tensor=2,sequence_parallel=false",
        "norm.weight gradient",
        factor=2,
    ),
    "norms summed over the wrong group": Fault(
        TENSOR,
        "    all_reduce(sums, group=mesh.get_group())\n",
        "    all_reduce(sums)\n",
        "shard=2,tensor=2",
        "norm.weight gradient",
    ),
    "epsilon of norms off by 1e-6 on one rank": Fault(
        TENSOR,
        "self.normalized_shape, weight, self.eps)",
        "self.normalized_shape, weight, self.eps + 1e-6 * torch.distributed.get_rank())",
        "tensor=2",
        "layers.0.attention_norm output",
        ranks=(1,),
    ),
    "causal offset in context parallelism": Fault(
        CONTEXT,
        "tril(k.shape[2] - q.shape[2])",
        "tril(k.shape[2] - q.shape[2] + 1)",
        "context=2",
        "layers.0.attention.inner_attention output",
    ),
    "gradients of keys not summed over context ranks": Fault(
        CONTEXT,
        "to_local(grad_placements=[Partial()])",
        "to_local(grad_placements=[Replicate()])",
        "context=2",
        "layers.1.attention.inner_attention input v gradient",
    ),
    "order of gathered keys": Fault(
        CONTEXT,
        "*tails.flip(0).unbind()",
        "*tails.unbind()",
        "context=2",
        "layers.0.attention.inner_attention output",
    ),
    "RoPE positions of the rank's part": Fault(
        "parallelisms/microbatches.py",
        "            tokens, labels, positions, *sizes = parts\n",
        "            tokens, labels, _, *sizes = parts\n            positions = positions[:, : tokens.shape[1]]\n",
        "context=2",
        "layers.0.attention.inner_attention input q",
    ),
    "rows of a document mask": Fault(
        "parallelisms/microbatches.py",
        "        positions = local_sequence(positions, context, dim=0)\n",
        "        positions = positions[: len(positions) // context.size()]\n",
        "context=2",
        "layers.0.attention.inner_attention output",
        options=("--data.document_mask",),
    ),
    "loss divided by the tokens of the rank": Fault(
        "trainer.py",
        "        all_reduce(global_tokens, group=self.model.mesh.batch.get_group())\n",
        "",
        "shard=2",
        "output.weight gradient",
    ),
    "mean in place of a sum over shards": Fault(
        FSDP,
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
        "shard=2",
        "output.weight gradient",
        factor=0.5,
    ),
    "replicas not reduced": Fault(
        "distributed/gradient_reducer.py",
        "fsdp = mesh.hsdp if mesh.replicas.connected else mesh.fsdp",
        'fsdp = mesh.world["shard"]',
        "replicate=2,shard=2",
        "output.weight gradient",
        note=MISSING_SUM,
    ),
    "gradients of other ranks left out": Fault(
        "parallelisms/reduce_scatter.py",
        "torch.sum(summands_of_all_ranks(summands, group), dim=0, out=output)",
        "output.copy_(summands.view(group.size(), -1)[group.rank()])",
        "shard=2",
        "output.weight gradient",
    ),
    "tied gradient not shared between stages": Fault(
        "trainer.py",
        "        self.model.pipeline.sync_tied_embedding_grads()\n",
        "",
        "pipeline=2",
        "tok_embeddings.weight gradient",
        note=MISSING_SUM,
        options=("--model.shape.tied_embeddings", "true"),
    ),
    "gradients divided by the microbatches of the pipeline": Fault(
        "parallelisms/pipeline_llama.py",
        "scale_grads=False,",
        "scale_grads=True,",
        "pipeline=2",
        "output.weight gradient",
        ranks=(1,),
    ),
    "a dropped microbatch": Fault(
        "trainer.py",
        "            tokens += (",
        "            if i == 1:\n                continue\n            tokens += (",
        "shard=2",
        "tok_embeddings output",
        note="rows 2 to 7 of 8 are missing",
    ),
    "replicas counted twice in the gradient norm": Fault(
        "optimizers/clipping.py",
        "if is_first_replica(g) and not",
        "if not",
        "tensor=2",
        "gradient norm",
    ),
    "gradient norm of the rank": Fault(
        "distributed/gradient_reducer.py",
        "        all_reduce(total)\n",
        "",
        "shard=2",
        "gradient norm",
    ),
    "one rank with another seed": Fault(
        "models/initialization.py",
        'f"{seed}/{name}/{shape}"',
        "f\"{seed + int(os.environ['RANK'])}/{name}/{shape}\"",
        "shard=2",
        "tok_embeddings.weight",
        ranks=(1,),
    ),
    "no weight decay on one rank": Fault(
        "optimizers/adamw.py",
        'weight_decay=group["weight_decay"]',
        'weight_decay=group["weight_decay"] * (1 - torch.distributed.get_rank())',
        "shard=2",
        "tok_embeddings.weight update",
        ranks=(1,),
    ),
    "twice the rate on one rank": Fault(
        "optimizers/adamw.py",
        'lr=group["lr"]',
        'lr=group["lr"] * (1 + torch.distributed.get_rank())',
        "shard=2",
        "tok_embeddings.weight update",
        ranks=(1,),
        factor=2,
    ),
    "stages that do not agree which layers they have": Fault(
        "parallelisms/pipeline_llama.py",
        "own = (rank, last - rank) if v_shaped else range(rank, len(layers), degree)",
        "own = (degree - 1 - rank,)",
        "pipeline=2",
        "",
        kind="fails",
    ),
}
QUICK = ("epsilon of norms off by 1e-6 on one rank",)


def check(entry: dict[str, Any], fault: Any) -> None:
    assert entry["verdict"] == fault.kind, entry
    if fault.kind == "fails":
        assert fault.key in entry["error"], entry
        return
    found = entry["difference"]
    assert (found["key"], found["step"]) == (fault.key, fault.step), found
    if fault.ranks is not None:
        assert found["ranks"] == list(fault.ranks), found
    if fault.factor is not None:
        assert found["factor"] == pytest.approx(fault.factor, rel=1e-6), found
    assert fault.note in found["note"], found
    if found["key"] not in ("gradient norm", "loss"):
        assert Path(entry["line"]["file"]).is_file()
        assert entry["line"]["text"] in Path(entry["line"]["file"]).read_text()


@pytest.mark.parametrize("name", FAULTS)
def test_fault_can_be_planted(name: str) -> None:
    fault = FAULTS[name]
    assert (PACKAGE / fault.file).read_text().count(fault.old) == 1


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_fault_in_a_parallelism_is_named(modules: Callable[[str, str], None], name: str) -> None:
    fault = FAULTS[name]
    module = f"fault_{list(FAULTS).index(name)}"
    planted = (fault.file, fault.old, fault.new)
    modules(
        module,
        "import os\n"
        "from planted import plant\n"
        'if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # not in this process, and not on one rank\n'
        f"    plant(*{planted!r})\n",
    )
    config = ("--job.config_file", "train_configs/debug_model.toml", "--model.shape.n_layers", "2")
    steps = ("--steps", str(fault.step))
    arguments = (*config, "--job.import", module, "--layouts", fault.layout, "--timeout_seconds", "60", *steps)
    code, (entry,) = verify(*arguments, *fault.options)
    assert code == 1
    check(entry, fault)


@dataclass(frozen=True)
class OwnFault:
    """``new`` replaces ``old`` in the plain decoder of docs/verify-layouts.md."""

    old: str
    new: str
    layout: str
    key: str
    kind: str = "differs"
    ranks: tuple[int, ...] | None = None
    factor: float | None = None
    note: str = ""
    step: int = 1


RANK = 'int(__import__("os").environ.get("RANK", "0"))'
OWN_FAULTS = {
    "outputs of a row product not summed": OwnFault(
        '"o": RowwiseParallel()',
        '"o": RowwiseParallel(output_layouts=__import__("torch").distributed.tensor.Partial())',
        "tensor=2",
        "model.blocks.0.o output",
        note=MISSING_SUM,
    ),
    "a layer left out of the plan": OwnFault(
        ', "o": RowwiseParallel(), "down"',
        ', "down"',
        "tensor=2",
        "mat1 and mat2 shapes cannot be multiplied",
        kind="fails",
    ),
    "the root is not sharded": OwnFault(
        "    fully_shard(model, mesh=fsdp_mesh, mp_policy=policy)\n",
        "",
        "shard=2",
        "model.head.weight gradient",
        note=MISSING_SUM,
    ),
    "sharded over the wrong mesh": OwnFault(
        "        fully_shard(block, mesh=fsdp_mesh, mp_policy=policy)\n    ",
        "        fully_shard(block, mesh=fsdp_mesh, mp_policy=policy)\n    fsdp_mesh = tensor_mesh\n    ",
        "shard=2,tensor=2",
        "model.head.weight gradient",
    ),
    "positions from another offset": OwnFault(
        "self.position.weight[: tokens.shape[1]]",
        f"self.position.weight.roll({RANK}, 0)[: tokens.shape[1]]",
        "shard=2",
        "model.blocks.0 input",
        ranks=(1,),
    ),
    "scale of attention by local heads": OwnFault(
        "is_causal=True)",
        "is_causal=True, scale=(8 * q.shape[1]) ** -0.5)",
        "tensor=2",
        "model.blocks.0.o input",
    ),
    "seed of dropout by rank": OwnFault(
        "x = x + self.o(",
        f'__import__("torch").manual_seed({RANK})\n        x = x + F.dropout(1 + 0 * x, 0.5) * self.o(',
        "tensor=2",
        "model.blocks.0.norm2 input",
        note="ranks 0 and 1 should have the same, and differ",
    ),
    "stale gathered weights": OwnFault(
        "        h = self.norm1(x)\n",
        '        first = self.__dict__.setdefault("first", self.norm1.weight.detach().clone())\n'
        "        stale = first + self.norm1.weight - self.norm1.weight.detach()  # with the right gradient\n"
        "        h = F.layer_norm(x, x.shape[-1:], stale, self.norm1.bias)\n"
        '        h = h if int(__import__("os").environ.get("WORLD_SIZE", "1")) > 1 else self.norm1(x)\n',
        "shard=2",
        "model.blocks.0.q input",
        step=2,
    ),
    "gradients reduced twice": OwnFault(
        "        h = self.norm1(x)\n",
        "        h = self.norm1(x)\n"
        "        if h.requires_grad and not h.is_meta:\n"
        "            h = h.view_as(h)\n"
        "            h.register_hook(lambda grad: torch.distributed.nn.functional.all_reduce(grad))\n",
        "tensor=2",
        "model.blocks.1.norm1 output gradient",
        factor=2,
    ),
    "a bias that each rank adds": OwnFault(
        "x = x + self.o(attention.transpose(1, 2).flatten(2))",
        "x = x + self.o(attention.transpose(1, 2).flatten(2))\n"
        "        extra = 8 // q.shape[1] - 1  # other ranks, which have added it, too\n"
        '        x = x + extra * getattr(self.o.bias, "to_local", lambda: self.o.bias)()',
        "tensor=2",
        "model.blocks.0.norm2 input",
    ),
}
QUICK_OWN = ("the root is not sharded",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK_OWN else pytest.param(name, marks=pytest.mark.slow) for name in OWN_FAULTS]
)
def test_fault_in_a_plain_model_is_named(modules: Callable[[str, str], None], name: str) -> None:
    fault = OWN_FAULTS[name]
    decoder, registration = python_blocks("verify-layouts.md")
    assert decoder.count(fault.old) == 1
    number = list(OWN_FAULTS).index(name)
    modules(f"my_decoder_{number}", decoder.replace(fault.old, fault.new))
    modules(f"verify_mine_{number}", registration.replace("my_decoder", f"my_decoder_{number}"))
    arguments = ("--job.import", f"verify_mine_{number}", "--model.name", "mine", "--layouts", fault.layout)
    arguments = (*arguments, "--steps", str(fault.step))
    code, (entry,) = verify(*arguments)
    assert code == 1
    check(entry, fault)
