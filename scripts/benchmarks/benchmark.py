"""Compare the speed of the trainer with other trainers.

``python scripts/benchmarks/benchmark.py [--gpu] [--only GROUP ...]``

Each entrant is a separate process that initializes, warms up, and then trains for a few steps in each of its turns, so
that other load on the machine affects all entrants of a group equally. On a GPU, whose memory may be too small for two,
each entrant ends before the next begins. A ratio is the median over the turns. On a busy machine, use the ratio of CPU
seconds, best with ``--threads 1``. torchtrain runs its own training loop in the environment of its launcher, including
tokenization, metrics and garbage collection; the others read random tokens from memory. The bare loop has torchtrain's
attention, and computes all logits at once.
``pip install -e '.[bench]'`` brings transformers' Trainer and litgpt; what is not installed is left out.
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from typing import Any

WARMUP_STEPS = 2
WIDE = "wide"  # one layer, eight times as wide as the debug model's: nearly all of a step is matrix products
# What run_llama_train.sh sets on a CPU, and so for ours alone.
LAUNCHER_ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184"}


@dataclass(frozen=True)
class Entrant:
    """One thing to measure, and all that its process needs to know."""

    kind: str  # ours, bare, transformers, litgpt
    flavor: str = "debugmodel"
    vocab_size: int = 4096
    seq_len: int = 256
    batch_size: int = 8
    dtype: str = "bfloat16"
    compile: bool = False
    ranks: int = 1
    options: tuple[str, ...] = ()  # of the trainer
    device: str = "cpu"

    @property
    def name(self) -> str:
        ranks = f" {self.ranks} ranks" if self.ranks > 1 else ""
        words = [word.removeprefix("--").split(".", 1)[1].replace("=", " ") for word in self.options]
        return " ".join([self.kind + ranks, self.dtype, "compiled" if self.compile else "eager", *words])


@dataclass(frozen=True)
class Group:
    """Entrants that take turns on a CPU, and run one after the other on a GPU; ratios are to the first."""

    name: str
    entrants: tuple[Entrant, ...]
    steps_per_turn: int = 3


@dataclass
class Result:
    seconds: list[float] = field(default_factory=list)  # of a step, by turn
    cpu_seconds: list[float] = field(default_factory=list)  # the same, of all threads of the (first) process
    first_step_seconds: float = math.inf  # from the start of the process; of the fastest
    memory_gib: float = 0.0


def cpu_groups() -> Iterator[Group]:
    for dtype in ("bfloat16", "float32"):
        for compile in (False, True):
            peers = [Entrant(kind, dtype=dtype, compile=compile) for kind in ("bare", "transformers", "litgpt")]
            yield Group(
                f"{dtype} {'compiled' if compile else 'eager'}",
                (Entrant("ours", dtype=dtype, compile=compile), *peers),
            )
    ours = Entrant("ours")
    ways = (ours, replace(ours, dtype="float32"), replace(ours, compile=True), replace(ours, ranks=2))
    yield Group("dtype, compile and ranks", ways)
    yield Group("width of 2048", tuple(replace(way, flavor=WIDE) for way in ways), 1)
    large = replace(ours, vocab_size=128256)
    yield Group("vocabulary of 128,256", (large, replace(large, options=("--training.loss_chunk_tokens=0",))), 1)


def gpu_groups() -> Iterator[Group]:
    for flavor, seq_len, batch_size in (("1B", 2048, 4), ("1B", 8192, 1), ("3B", 2048, 2)):
        ours = Entrant(
            "ours", flavor, vocab_size=128256, seq_len=seq_len, batch_size=batch_size, compile=True, device="cuda"
        )
        size = f"{flavor} seq {seq_len}"
        if flavor == "1B":
            eager = replace(ours, compile=False)
            yield Group(f"{size} compiled", (ours, replace(ours, kind="bare")), 10)
            yield Group(f"{size} eager", (eager, replace(eager, kind="bare")), 10)
            yield Group(f"{size} transformers", (ours, replace(ours, kind="transformers")), 10)
            yield Group(f"{size} litgpt", (ours, replace(ours, kind="litgpt")), 10)
        variants = {
            "compile": replace(ours, compile=False),
            "float8 tensorwise": replace(ours, options=("--float8.recipe=tensorwise",)),
            "float8 rowwise": replace(ours, options=("--float8.recipe=rowwise",)),
            "selective": replace(ours, options=("--activation_checkpoint.mode=selective",)),
            "full": replace(ours, options=("--activation_checkpoint.mode=full",)),
            "all logits": replace(ours, options=("--training.loss_chunk_tokens=0",)),
        }
        for name, variant in variants.items():
            yield Group(f"{size} {name}", (ours, variant), 10)


class Gate:
    """Lets a training loop run only in its turns. Its process talks to the parent in lines of JSON."""

    def __init__(self, steps_per_turn: int, synchronize: Callable[[], None], memory_gib: Callable[[], float]):
        self.steps_per_turn = steps_per_turn
        self.synchronize = synchronize
        self.memory_gib = memory_gib
        self.steps = 0
        self.since = 0.0
        self.cpu_since = 0.0
        self.channel = os.fdopen(int(os.environ["BENCHMARK_CHANNEL"]), "w", buffering=1)

    def step(self) -> None:
        """Call it after each step."""
        self.steps += 1
        if self.steps == 1:
            self.synchronize()
            self.channel.write(json.dumps({"first": True}) + "\n")
        turn, rest = divmod(self.steps - WARMUP_STEPS, self.steps_per_turn)
        if turn < 0 or rest:
            return
        self.synchronize()
        seconds = (time.perf_counter() - self.since) / self.steps_per_turn
        cpu_seconds = (time.process_time() - self.cpu_since) / self.steps_per_turn
        message = {"seconds": seconds, "cpu_seconds": cpu_seconds, "memory_gib": self.memory_gib()}
        self.channel.write(json.dumps(message) + "\n")
        if sys.stdin.readline() != "go\n":
            os._exit(0)
        self.since, self.cpu_since = time.perf_counter(), time.process_time()


def make_gate(entrant: Entrant, steps_per_turn: int) -> Gate:
    import torch

    if entrant.device == "cuda":
        return Gate(steps_per_turn, torch.cuda.synchronize, lambda: torch.cuda.max_memory_allocated() / 2**30)
    return Gate(steps_per_turn, lambda: None, lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def shape(entrant: Entrant) -> Any:
    from torchtrain.models.model_config import flavor_config

    if entrant.flavor == WIDE:
        config = replace(flavor_config("llama3", "debugmodel"), dim=2048, ffn_dim=6144, n_heads=16, n_layers=1)
    else:
        config = flavor_config("llama3", entrant.flavor)
    return replace(config, vocab_size=entrant.vocab_size, max_seq_len=entrant.seq_len)


def run_ours(entrant: Entrant, steps_per_turn: int) -> None:
    """The trainer, which hands over at the end of each round of its loop."""
    from unittest.mock import patch

    import torchtrain.trainer
    from torchtrain.metrics.profiler import Profiler
    from torchtrain.train import main

    arguments = [
        f"--job.dump_folder={tempfile.mkdtemp()}",
        f"--job.device={entrant.device}",
        f"--training.local_batch_size={entrant.batch_size // entrant.ranks}",
        f"--training.seq_len={entrant.seq_len}",
        f"--training.mixed_precision_param={entrant.dtype}",
        "--training.steps=1000000",
        "--checkpoint.no-enable",
        "--comm.train_timeout_seconds=3600",  # the others' turns count, too
        *(["--compile.enable"] if entrant.compile else []),
        *entrant.options,
    ]
    first = os.environ.get("RANK", "0") == "0"
    gate = make_gate(entrant, steps_per_turn) if first else None
    # The vocabulary of the size that is measured, not of the tokenizer at hand.
    with (
        patch.object(torchtrain.trainer, "build_model_config", lambda *_: shape(entrant)),
        patch.object(Profiler, "step", lambda *_: gate.step() if gate else None),
    ):
        sys.exit(main(arguments))


def run_bare(entrant: Entrant, steps_per_turn: int) -> None:
    """What one writes by hand for the same model: autocast, fused AdamW, clipping."""
    import torch
    import torch.nn.functional as F

    from torchtrain.cpu.build import apply_batched_attention_backward
    from torchtrain.models.llama import Transformer

    model = Transformer(shape(entrant)).to(entrant.device)
    if entrant.device == "cpu":
        apply_batched_attention_backward(model, "auto", getattr(torch, entrant.dtype))

    def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    if entrant.compile:
        for block in model.layers.values():
            block.compile(fullgraph=True)
        cross_entropy = torch.compile(cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    gate = make_gate(entrant, steps_per_turn)
    while True:
        inputs, labels = random_tokens(entrant)
        with torch.autocast(entrant.device, torch.bfloat16, enabled=entrant.dtype == "bfloat16"):
            loss = cross_entropy(model(inputs), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        gate.step()


def random_tokens(entrant: Entrant) -> Any:
    import torch

    tokens = torch.randint(entrant.vocab_size, (entrant.batch_size, entrant.seq_len + 1), device=entrant.device)
    return tokens[:, :-1], tokens[:, 1:]


def run_transformers(entrant: Entrant, steps_per_turn: int) -> None:
    """transformers' Trainer on its own Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    model = shape(entrant)
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.ffn_dim,
        num_hidden_layers=model.n_layers,
        num_attention_heads=model.n_heads,
        num_key_value_heads=model.n_kv_heads,
        max_position_embeddings=model.max_seq_len,
        tie_word_embeddings=model.tied_embeddings,
        attn_implementation="sdpa",
        use_cache=False,
    )
    gate = make_gate(entrant, steps_per_turn)

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate.step()

    class Tokens(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> Any:
            tokens = torch.randint(entrant.vocab_size, (entrant.seq_len,))
            return {"input_ids": tokens, "labels": tokens}

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=entrant.batch_size,
        max_steps=1_000_000,
        learning_rate=3e-4,
        weight_decay=0.1,
        optim="adamw_torch_fused",
        bf16=entrant.dtype == "bfloat16",
        torch_compile=entrant.compile,
        use_cpu=entrant.device == "cpu",
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=Tokens(), callbacks=[Turns()]).train()


def run_litgpt(entrant: Entrant, steps_per_turn: int) -> None:
    """litgpt's model in the loop of its ``pretrain``: Fabric, the whole model compiled."""
    import lightning
    import torch
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    model = shape(entrant)
    config = Config(
        block_size=model.max_seq_len,
        padded_vocab_size=model.vocab_size,
        vocab_size=model.vocab_size,
        n_layer=model.n_layers,
        n_head=model.n_heads,
        n_embd=model.dim,
        n_query_groups=model.n_kv_heads,
        intermediate_size=model.ffn_dim,
        rotary_percentage=1.0,
        rope_base=int(model.rope_theta),
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )
    precision = "bf16-mixed" if entrant.dtype == "bfloat16" else "32-true"
    fabric = lightning.Fabric(accelerator=entrant.device, devices=1, precision=precision)
    with fabric.init_module():
        gpt: Any = GPT(config)
    if model.tied_embeddings:
        gpt.lm_head.weight = gpt.transformer.wte.weight
    gpt = fabric.setup(torch.compile(gpt) if entrant.compile else gpt)
    optimizer = fabric.setup_optimizers(
        torch.optim.AdamW(gpt.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    )
    gate = make_gate(entrant, steps_per_turn)
    while True:
        inputs, labels = random_tokens(entrant)
        loss = chunked_cross_entropy(gpt(inputs), labels, chunk_size=0)
        fabric.backward(loss)
        fabric.clip_gradients(gpt, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        gate.step()


class Worker:
    """A running entrant."""

    def __init__(self, entrant: Entrant, result: Result, steps_per_turn: int, all_threads: int):
        self.result = result
        read, write = os.pipe()
        command = [sys.executable, "-W", "ignore", os.path.abspath(__file__)]
        command += ["--entrant", json.dumps([asdict(entrant), steps_per_turn])]
        environment = {**os.environ, "BENCHMARK_CHANNEL": str(write)}
        if entrant.device == "cpu":
            environment["OMP_NUM_THREADS"] = str(max(1, all_threads // entrant.ranks))
            environment.update(LAUNCHER_ENVIRONMENT if entrant.kind == "ours" else {})
        if entrant.ranks > 1:
            environment.update(WORLD_SIZE=str(entrant.ranks), MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        start = time.perf_counter()
        # Only the first rank talks to us; the others wait for it in their collectives.
        self.process, *self.others = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                text=True,
                pass_fds=[write] if rank == 0 else [],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} if entrant.ranks > 1 else environment,
            )
            for rank in range(entrant.ranks)
        ]
        os.close(write)
        self.channel = os.fdopen(read)
        self.receive()
        first_step_seconds = time.perf_counter() - start
        self.result.first_step_seconds = min(self.result.first_step_seconds, first_step_seconds)
        self.receive()  # warmed up

    def receive(self) -> dict[str, Any]:
        line = self.channel.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"an entrant ended:\n{self.log.read()[-4000:]}")
        message: dict[str, Any] = json.loads(line)
        return message

    def take_turn(self) -> float:
        self.send("go\n")
        message = self.receive()
        self.result.seconds.append(message["seconds"])
        self.result.cpu_seconds.append(message["cpu_seconds"])
        self.result.memory_gib = max(self.result.memory_gib, message["memory_gib"])
        return float(message["seconds"])

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def stop(self) -> None:
        self.send("stop\n")
        self.process.wait()
        for process in self.others:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
        return port


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_installed(entrant: Entrant) -> bool:
    needs = {"transformers": ("transformers", "accelerate"), "litgpt": ("litgpt", "lightning")}
    return all(importlib.util.find_spec(name) for name in needs.get(entrant.kind, ()))


def measure(group: Group, processes: int, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Rows of the table: the first entrant, and the others beside it."""
    results = {entrant: Result() for entrant in group.entrants if is_installed(entrant)}
    for _ in range(processes):
        one_by_one = group.entrants[0].device == "cuda"
        for together in [[entrant] for entrant in results] if one_by_one else [list(results)]:
            workers = [Worker(entrant, results[entrant], group.steps_per_turn, threads) for entrant in together]
            for _ in range(rounds):
                for worker in workers:
                    worker.take_turn()
            for worker in workers:
                worker.stop()
    return [row(group, entrant, result, results[group.entrants[0]]) for entrant, result in results.items()]


def row(group: Group, entrant: Entrant, result: Result, first: Result) -> dict[str, Any]:
    from torchtrain.devices import peak_flops
    from torchtrain.models.spec import flops_per_token

    tokens_per_second = entrant.batch_size * entrant.seq_len / statistics.median(result.seconds)
    mfu = None
    if entrant.device == "cuda":
        import torch

        peak = peak_flops(torch.cuda.get_device_name())
        mfu = tokens_per_second * flops_per_token(shape(entrant), entrant.seq_len) / peak if peak else None
    return {
        "group": group.name,
        "entrant": entrant.name,
        "tokens_per_second": tokens_per_second,
        # Above 1: the first of the group is faster.
        "first_is_faster_by": median_ratio(result.seconds, first.seconds),
        # Ranks do the same: those of the first stand for all.
        "first_takes_less_cpu_by": median_ratio(result.cpu_seconds, first.cpu_seconds)
        * (entrant.ranks / group.entrants[0].ranks),
        "mfu": mfu,
        "memory_gib": result.memory_gib,
        "first_step_seconds": result.first_step_seconds,
        "step_seconds": result.seconds,
        "step_cpu_seconds": result.cpu_seconds,
    }


def median_ratio(values: list[float], references: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(values, references, strict=True))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| entrant | tokens/s | ratio | CPU ratio | MFU | peak GiB | first step |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        mfu = "" if r["mfu"] is None else f"{r['mfu']:.1%}"
        lines.append(
            f"| {r['entrant']} | {r['tokens_per_second']:,.0f} | {r['first_is_faster_by']:.2f} "
            f"| {r['first_takes_less_cpu_by']:.2f} | {mfu} "
            f"| {r['memory_gib']:.2f} | {r['first_step_seconds']:.1f} s |"
        )
    return "\n".join(lines)


def machine(gpu: bool) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    def version_of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {
        "device": torch.cuda.get_device_name() if gpu else f"{cores()} cores of {cpu_name()}",
        "versions": {name: version_of(name) for name in ("torch", "transformers", "litgpt", "torchao")},
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "command": " ".join(sys.argv),
    }


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the set for one GPU of 80 GB or more")
    parser.add_argument("--tiny", action="store_true", help="one short run on a CPU, to try the script")
    parser.add_argument("--only", nargs="+", default=[], metavar="GROUP", help="groups with one of these in their name")
    parser.add_argument("--processes", type=int, default=1, help="fresh processes of each entrant: each has some luck")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each process")
    parser.add_argument("--threads", type=int, default=cores(), help="threads of an entrant, over all its ranks (CPU)")
    parser.add_argument("--output", default="benchmark.json", help="file for the results")
    parser.add_argument("--entrant", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
    if arguments.entrant:
        values, steps_per_turn = json.loads(arguments.entrant)
        entrant = Entrant(**{**values, "options": tuple(values["options"])})
        runs = {"ours": run_ours, "bare": run_bare, "transformers": run_transformers, "litgpt": run_litgpt}
        runs[entrant.kind](entrant, steps_per_turn)
        return
    results: dict[str, Any] = {"machine": machine(arguments.gpu), "rows": []}
    print(json.dumps(results["machine"]))
    tiny = Group("tiny", (Entrant("ours", seq_len=32, batch_size=1, dtype="float32"),), 1)
    for group in [tiny] if arguments.tiny else gpu_groups() if arguments.gpu else cpu_groups():
        if arguments.only and not any(word in group.name for word in arguments.only):
            continue
        rows = measure(group, arguments.processes, arguments.rounds, arguments.threads)
        print(f"\n{group.name}: ratio above 1 means that the first line is faster\n\n{table(rows)}", flush=True)
        results["rows"] += rows
        with open(arguments.output, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
