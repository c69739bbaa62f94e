"""Faults that other trainers of mixtures of experts had are noticed, and named by torchtrain.verify_layouts."""

import importlib
import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
from draw_architecture import ROOT

from torchtrain.verify_layouts import main

pytestmark = pytest.mark.usefixtures("mixtures_of_experts")
PACKAGE = ROOT / "scripts/moe/torchtrain_moe"
CONFIG = """
[model]
name = "olmoe"
shape.n_layers = 2
[model.options]
batch_balance_weight = 0.1
sequence_balance_weight = 0.1
z_weight = 0.01
"""


class Fault(NamedTuple):
    """``new`` replaces ``old`` in ``file``, on more than one rank. The command must then name ``key``."""

    file: str
    old: str
    new: str
    layout: str
    key: str
    step: int = 1


EXPERTS = "shard=2,moe.expert_parallel_degree=2"
FAULTS = {
    "router gradient not summed over ranks": Fault(
        "router.py",
        "Partial() if sharded_input else Replicate()\n        self.weight",
        "Replicate()\n        self.weight",
        "tensor=2",
        "layers.1.feed_forward.router.weight gradient",
    ),
    "router gradient of one part of the experts": Fault(
        "model.py",
        "to_local(grad_placements=[Partial()])",
        "to_local(grad_placements=[Replicate()])",
        "tensor=2",
        "layers.1.feed_forward.router output gradient",
    ),
    "expert gradients doubled": Fault(
        "experts.py",
        "exchange(grads[0], received, sent, ctx.group)",
        "exchange(2 * grads[0], received, sent, ctx.group)",
        EXPERTS,
        "layers.1.feed_forward.experts.w1 gradient",
    ),
    "balance loss of a sequence by rank": Fault(
        "router.py",
        "                dist.all_reduce(counts, group=group)\n",
        "                pass\n",
        "context=2",
        "layers.1.feed_forward.router output gradient",
    ),
    "balance loss of a batch by rank": Fault(
        "parallel.py",
        "    all_reduce(sums, group=mesh.stage.get_group())\n",
        "",
        "shard=2",
        "layers.1.feed_forward.router output gradient",
        step=2,
    ),
    "tokens of one rank dropped": Fault(
        "experts.py",
        "self.compute(arrived[order], sizes_of(",
        "self.compute((arrived * (torch.arange(len(arrived)) < received_sizes[0])[:, None])[order], sizes_of(",
        EXPERTS,
        "layers.0.feed_forward output",
    ),
    "rows returned in the order of their experts": Fault(
        "experts.py",
        "AllToAll.apply(outputs[order.argsort()]",
        "AllToAll.apply(outputs",
        EXPERTS,
        "layers.0.feed_forward output",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_can_be_planted(name: str) -> None:
    fault = FAULTS[name]
    assert (PACKAGE / fault.file).read_text().count(fault.old) == 1


QUICK = "balance loss of a batch by rank"  # noticed in the second step


@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_fault_is_named(modules: Callable[[str, str], None], tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    module = f"fault_of_experts_{list(FAULTS).index(name)}"
    planted = (fault.file, fault.old, fault.new, "torchtrain_moe")
    modules(
        module,
        "import os\n"
        "import torchtrain_moe\n"
        "from planted import plant\n"
        'if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # not in this process, and not on one rank\n'
        f"    plant(*{planted!r})\n",
    )
    (tmp_path / "config.toml").write_text(CONFIG)
    config = ("--job.config_file", str(tmp_path / "config.toml"), "--job.import", "torchtrain_moe", module)
    with redirect_stdout(io.StringIO()) as output:
        code = main([*config, "--layouts", fault.layout, "--timeout_seconds", "120", "--json"])
    (entry,) = json.loads(output.getvalue())["layouts"]
    assert code == 1
    assert entry["verdict"] == "differs", entry
    assert (entry["difference"]["step"], entry["difference"]["key"]) == (fault.step, fault.key)


@pytest.mark.usefixtures("process_group")
def test_wrong_scale_of_the_chosen_experts_differs_from_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has it, too: it is no fault of a layout."""
    test_moe, router = importlib.import_module("test_moe"), importlib.import_module("torchtrain_moe.router")
    choose = router.Router.choose

    def normalized(self: object, logits: object) -> object:
        probabilities, chosen, weights = choose(self, logits)
        return probabilities, chosen, weights / weights.sum(-1, keepdim=True)

    monkeypatch.setattr(router.Router, "choose", normalized)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        test_moe.test_family_computes_what_transformers_does(tmp_path, "olmoe", 16, False)
