"""Planted faults that hurt on a GPU, and which tests notice them: python scripts/faults/gpu_faults.py

Each is a mistake that a change could make, and that a run on a CPU would hardly show. On a GPU the host waits, work is
done twice, memory is kept, or a stream reads what another one writes. One fault at a time is planted into a copy of the
repository, in which tests of the default run follow. Prints a table of the faults and of the tests that notice them.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIMULATION, STREAMS, LOWERING = (
    "tests/plugins/test_simulation.py",
    "tests/plugins/test_streams.py",
    "tests/plugins/test_lowering.py",
)
ESTIMATE, COMPILE = "tests/plugins/planner/test_estimate.py", "tests/test_compile.py"
HOST = "tests/test_host_synchronization.py"


@dataclass(frozen=True)
class Fault:
    """A mistake: the ``replacements`` of text in a file of torchtrain/, and the arguments of pytest for the tests."""

    name: str
    file: str
    replacements: Sequence[tuple[str, str]]
    tests: Sequence[str]

    def plant(self, package: Path) -> None:
        path = package / self.file
        text = path.read_text(encoding="utf-8")
        for old, new in self.replacements:
            assert text.count(old) == 1, f"{self.file} has {text.count(old)} times {old!r}"
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")


FAULTS = [
    Fault(
        "`.item()` in the block",
        "models/llama/model.py",
        [
            (
                "        return h + self.feed_forward(self.ffn_norm(h))  # type: ignore[no-any-return]\n",
                "        if h.isnan().any().item():\n"
                '            raise FloatingPointError("attention returned NaN")\n'
                "        return h + self.feed_forward(self.ffn_norm(h))  # type: ignore[no-any-return]\n",
            )
        ],
        [SIMULATION, "-k", "matching_collectives and shards"],
    ),
    Fault(
        "products in float32: the gradient of the output layer",
        "models/loss/output_loss.py",
        [
            (
                "logits_grad.flatten(0, 1).T @ (_local(hidden) * scale).flatten(0, 1)\n",
                "logits_grad.flatten(0, 1).T.float() @ (_local(hidden) * scale).flatten(0, 1).float()\n"
                "            product = product.to(weight.dtype)\n",
            )
        ],
        [SIMULATION, "-k", "matching_collectives and shards"],
    ),
    Fault(
        "a lost fusion: RoPE by complex numbers",
        "models/llama/model.py",
        [
            (
                "    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)\n",
                "    rotated = torch.complex(first, second) * torch.complex(cos, sin)\n"
                "    return torch.cat((rotated.real, rotated.imag), dim=-1).type_as(x)\n",
            )
        ],
        [LOWERING, "-k", "8b_compiles"],
    ),
    Fault(
        "a copy of a non-contiguous tensor: the values, before attention",
        "models/llama/model.py",
        [("k.transpose(1, 2), v.transpose(1, 2), mask)", "k.transpose(1, 2), v.transpose(1, 2).contiguous(), mask)")],
        [LOWERING, "-k", "8b_compiles"],
    ),
    Fault(
        "a spill: `flex_attention` without its options",
        "models/llama/model.py",
        [('    (9, 0, 128): {"bwd_num_stages": 2},\n', "")],
        [LOWERING, "-k", "options_compile"],
    ),
    Fault(
        "attention in the math backend: grouped heads in float32",
        "models/llama/model.py",
        [("(mask is not None or q.dtype is torch.float32)", "mask is not None")],
        [SIMULATION, "-k", "grouped_query or matching_collectives"],
    ),
    Fault(
        "recompilation: each block counts its calls",
        "models/llama/model.py",
        [
            (
                "        self.feed_forward = self.feed_forward_class(config)\n",
                "        self.feed_forward = self.feed_forward_class(config)\n        self.calls = 0\n",
            ),
            (
                "        h = x + self.attention(self.attention_norm(x), cos, sin, mask)",
                "        self.calls += 1\n        h = x + self.attention(self.attention_norm(x), cos, sin, mask)",
            ),
        ],
        [COMPILE, "-k", "share_one_graph"],
    ),
    Fault(
        "a float32 gather: keys and values of context parallelism",
        "parallelisms/context_parallel.py",
        [
            (
                "DTensor.from_local(torch.stack((k, v)), self.mesh",
                "DTensor.from_local(torch.stack((k, v)).float(), self.mesh",
            ),
            ("to_local(grad_placements=[Partial()])\n", "to_local(grad_placements=[Partial()]).type_as(q)\n"),
        ],
        [SIMULATION, "-k", "matching_collectives"],
    ),
    Fault(
        "no flash attention with context parallelism",
        "parallelisms/context_parallel.py",
        [("ContextParallelAttention(mesh, flash=flash))", "ContextParallelAttention(mesh))")],
        [SIMULATION, "-k", "attention_of_a_layout"],
    ),
    Fault(
        "a blocking copy: batches without `non_blocking`",
        "parallelisms/microbatches.py",
        [("t.to(self.device, non_blocking=True)", "t.to(self.device)")],
        [STREAMS, "-k", "trainer_has"],
    ),
    Fault(
        "positions of RoPE made on the host",
        "parallelisms/microbatches.py",
        [("torch.arange(tokens.shape[1], device=self.device)[None]", "torch.arange(tokens.shape[1])[None]")],
        [SIMULATION, "-k", "matching_collectives and shards"],
    ),
    Fault(
        "the last block gathered again in backward",
        "parallelisms/fsdp.py",
        [("by_default = i < len(blocks) - 1 and", "by_default = i < len(blocks) and")],
        [ESTIMATE, "-k", "fsdp_traffic"],
    ),
    Fault(
        "one rank copies gradients as it would reduce them",
        "distributed/gradient_reducer.py",
        [("return NoReduceScatter(records_stream=self.mesh.ndim > 1) if self.mesh.size() == 1 else", "return")],
        ["tests/test_data_parallel.py", "-k", "one_rank_reduces"],
    ),
    Fault(
        "a dropped wait: memory of gradients used again",
        "distributed/gradient_reducer.py",
        [("                torch.cuda.current_stream().wait_stream(self.stream)\n", "                pass\n")],
        [STREAMS, "-k", "step_has"],
    ),
    Fault(
        "a checkpoint's buffers that are not pinned",
        "checkpoint/states.py",
        [
            (
                "        self._buffers |= pinned_like({name: part for name, part in new.items() if part.is_cuda})\n",
                "",
            )
        ],
        [STREAMS, "-k", "trainer_has"],
    ),
    Fault(
        "the thread that reads data without its device",
        "datasets/dataloader.py",
        [("            torch.cuda.set_device(self._device)\n", "            pass\n")],
        [STREAMS, "-k", "trainer_has"],
    ),
    Fault(
        "one kernel of AdamW per parameter",
        "optimizers/adamw.py",
        [('len(group["params"]) if self.state_dtype is torch.float32 else 1', "1")],
        [ESTIMATE, "-k", "update_has"],
    ),
    Fault(
        "a copy of each gradient in the update",
        "optimizers/adamw.py",
        [("[local(parameter.grad).float() for", "[local(parameter.grad).to(torch.float32, copy=True) for")],
        [ESTIMATE, "-k", "update_has"],
    ),
    Fault(
        "a host that waits for the gradient norm",
        "optimizers/clipping.py",
        [
            (
                "    torch._foreach_mul_(",
                "    if norm > max_norm:\n        torch._foreach_mul_(",
            )
        ],
        [SIMULATION, "-k", "matching_collectives and shards"],
    ),
    Fault(
        "recomputing too much: attention of cuDNN",
        "parallelisms/activation_checkpoint.py",
        [("    torch.ops.aten._scaled_dot_product_cudnn_attention.default,\n", "")],
        [SIMULATION, "-k", "cudnn_attention_is_saved"],
    ),
    Fault(
        "an all-reduce for each norm under tensor parallelism",
        "parallelisms/tensor_parallel.py",
        [
            (
                "    all_reduce(sums, group=mesh.get_group())\n",
                "    for part in torch.split(sums, [g.numel() for g in gradients]):\n"
                "        all_reduce(part, group=mesh.get_group())\n",
            )
        ],
        ["tests/test_communication.py"],
    ),
    Fault(
        "unsharded gradients of pipeline stages, kept for all microbatches",
        "parallelisms/pipeline_llama.py",
        [('GradReducingStage if parallelism.fsdp_gradient_accumulation == "sharded" else Stage', "Stage")],
        [ESTIMATE, "-k", "pipeline or gradients"],
    ),
    Fault(
        "messages of the pipeline one by one",
        "parallelisms/pipeline_llama.py",
        [
            (
                "    for work in dist.batch_isend_irecv(list(messages)):\n",
                "    for work in [m.op(m.tensor, m.peer, m.group) for m in messages]:\n",
            )
        ],
        [SIMULATION, "-k", "offload_has"],
    ),
    Fault(
        "a mask of all pairs of tokens",
        "models/document_mask.py",
        [("= compiled_create_block_mask()(may_attend", "= create_block_mask(may_attend")],
        [LOWERING, "-k", "options_compile"],
    ),
    Fault(
        "a dropped wait: pinned copies of replicas",
        "plugins/replicas/group.py",
        [("            stream.wait_event(self._copied_back[key])\n", "            pass\n")],
        [STREAMS, "-k", "small_program or replicas"],
    ),
    Fault(
        "metrics that are read in each step",
        "metrics/recorder.py",
        [
            (
                "        self.unwritten = step, loss, grad_norm, lr\n",
                "        if not loss.total.isfinite():\n"
                '            logger.warning("step %d: the loss is not finite", step)\n'
                "        self.unwritten = step, loss, grad_norm, lr\n",
            )
        ],
        [HOST, "-k", "host_synchronizes"],
    ),
    Fault(
        "flags of the host copied to the device in each step",
        "fault_tolerance/step_check.py",
        [
            (
                "torch.full((), float(value), dtype=torch.float64, device=device)",
                "torch.tensor(float(value), dtype=torch.float64, device=device)",
            )
        ],
        [STREAMS, "-k", "trainer_has or step_has"],
    ),
    Fault(
        "exchanges of Muon that are waited for",
        "plugins/muon/muon.py",
        [
            (
                "handle = dist.all_to_all_single(received, sent, list(sizes), sent_sizes, self.group, async_op=True)\n",
                "dist.all_to_all_single(received, sent, list(sizes), sent_sizes, self.group)\n",
            ),
            ("            handle.wait()\n", ""),
        ],
        [STREAMS, "-k", "step_has"],
    ),
    Fault(
        "a contiguous copy of tall matrices in Muon",
        "plugins/muon/muon.py",
        [("    x = matrix.T if is_tall else matrix\n", "    x = matrix.T.contiguous() if is_tall else matrix\n")],
        [ESTIMATE, "-k", "update_has"],
    ),
    Fault(
        "logits of two chunks at a time",
        "models/loss/output_loss.py",
        [("            del logits, grad  # before those of the next chunk are allocated\n", "")],
        ["tests/test_loss.py", "tests/plugins/planner/test_loss_memory.py"],
    ),
    Fault(
        "float32 logits, kept for backward by z-loss",
        "models/loss/z_loss.py",
        [
            ("ctx.save_for_backward(logits, log_z,", "ctx.save_for_backward(logits.float(), log_z,"),
        ],
        ["tests/test_loss.py", "tests/plugins/planner/test_loss_memory.py"],
    ),
    Fault(
        "gradients kept until the next step",
        "optimizers/container.py",
        [("            optimizer.zero_grad()\n", "            optimizer.zero_grad(set_to_none=False)\n")],
        [ESTIMATE, "-k", "gradients_are_freed"],
    ),
    Fault(
        "averaged weights copied to the host one by one",
        "optimizers/ema.py",
        [("        copies[name].copy_(tensor, non_blocking=True)\n", "        copies[name].copy_(tensor)\n")],
        [SIMULATION, STREAMS, "-k", "ema or trainer_has"],
    ),
]


def run_tests(fault: Fault | None, tests: Sequence[str]) -> str:
    """Run ``tests`` in a copy of the repository that has the ``fault``; returns pytest's line on the failed test."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "torchtrain"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "outputs", "build"))
        if fault is not None:
            fault.plant(copy / "torchtrain")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "500"}
        ran = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (.*)", ran.stdout, re.MULTILINE)
    assert ran.returncode == 1, f"{' '.join(command)}\n{ran.stdout}\n{ran.stderr}"
    assert found, ran.stdout
    return found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="faults whose name or file has a text")
    parser.add_argument("--without", action="store_true", help="run the tests without the faults: all must pass")
    arguments = parser.parse_args()
    print("| fault | in | noticed by |\n| --- | --- | --- |", flush=True)
    unnoticed = 0
    for fault in FAULTS:
        if not any(text in f"{fault.name} {fault.file}" for text in arguments.only):
            continue
        line = run_tests(None if arguments.without else fault, fault.tests)
        test, _, message = line.partition(" - ")
        unnoticed += not test
        name = test.rpartition("/")[2].replace("::", ": ")
        print(f"| {fault.name} | `{fault.file}` | {f'`{name}`' if name else 'nothing'} |", flush=True)
        print(f"{fault.name}: {message}", file=sys.stderr, flush=True)
    if arguments.without == (unnoticed == 0):
        raise SystemExit("a test fails without a fault" if arguments.without else "a fault is not noticed")


if __name__ == "__main__":
    main()
