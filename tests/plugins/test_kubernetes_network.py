"""Pods of kubernetes/base/job.yaml in two network namespaces, with their environment, their disks and one bucket."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from forked_command import checked_command
from forked_run import logged_losses
from kubernetes_job import action_for, container_of, copy_image, manifests, pod_command
from network_namespaces import bridged_namespaces, kill_all_in
from s3_server import S3Server

SUBNET = "10.78.0"
BRIDGE, BRIDGE_ADDRESS = "train-pods", f"{SUBNET}.254"
NAMES = ("torchtrain-0", "torchtrain-1")  # of the pods, and of their namespaces here
SMALL = [
    *("--training.seq_len=32", "--model.shape.dim=64", "--model.shape.n_layers=2", "--model.shape.n_heads=2"),
    *("--model.shape.n_kv_heads=2", "--model.shape.ffn_dim=128", "--training.local_batch_size=1"),
    *("--training.global_batch_size=4", "--training.mixed_precision_param=float32", "--metrics.log_freq=1"),
    "--checkpoint.interval=4",
]


@pytest.fixture
def network() -> Iterator[None]:
    """Two network namespaces on a bridge, in which the names of both pods resolve as in a headless Service."""
    with bridged_namespaces(NAMES, BRIDGE, SUBNET):
        try:
            hosts = "".join(f"{SUBNET}.{node + 1} {name}.torchtrain {name}\n" for node, name in enumerate(NAMES))
            for namespace in NAMES:
                # ip netns exec mounts this file at /etc/hosts.
                file = Path("/etc/netns", namespace, "hosts")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(f"127.0.0.1 localhost\n{hosts}")
            yield
        finally:
            for namespace in NAMES:
                shutil.rmtree(Path("/etc/netns", namespace), ignore_errors=True)


class Pods:
    """The pods of one start, each with a new disk in ``folder`` that has the files of the image."""

    def __init__(
        self, folder: Path, server: S3Server, bucket_folder: str, steps: str, nodes: int = 2, ranks: int = 1
    ) -> None:
        self.job = manifests(
            "base/job.yaml",
            {
                "completions: 2 ": f"completions: {nodes} ",
                "parallelism: 2 ": f"parallelism: {nodes} ",
                "--nnodes=2 ": f"--nnodes={nodes} ",
                "--nproc-per-node=gpu ": f"--nproc-per-node={ranks} ",
                "s3://my-bucket/my-run/checkpoint ": f"{bucket_folder} ",
                'OMP_NUM_THREADS, value: "8"': 'OMP_NUM_THREADS, value: "1"',
            },
        )["Job"]
        container_of(self.job)["args"] += [*SMALL, steps]
        self.disks = [copy_image(folder / f"disk-{node}") for node in range(nodes)]
        self.logs = [folder / f"pod-{node}.log" for node in range(nodes)]
        self.processes = [self.start(node, server.environment) for node in range(nodes)]

    def start(self, node: int, secret: Mapping[str, str]) -> "subprocess.Popen[str]":
        words, environment = pod_command(self.job, node, {"torchtrain-bucket": secret})
        assert words[0] == "python"
        own = {"PATH": os.environ["PATH"], "HOME": str(self.disks[node]), "TMPDIR": str(self.disks[node])}
        in_pod = ["ip", "netns", "exec", NAMES[node], "unshare", "--uts"]
        command = [*in_pod, "sh", "-c", f'hostname {NAMES[node]}; exec "$@"', "sh", sys.executable, *words[1:]]
        with self.logs[node].open("w") as log:
            return subprocess.Popen(
                command, cwd=self.disks[node], env={**own, **environment}, stdout=log, stderr=log, text=True
            )

    def output(self) -> str:
        return "\n".join(f"{log}:\n{log.read_text()}" for log in self.logs)

    def losses(self) -> dict[int, float]:
        return logged_losses(self.disks[0] / "outputs/my-run")

    def wait_for(self, condition: Callable[[], bool], seconds: float = 200) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output()
            assert None in [process.poll() for process in self.processes], self.output()
            time.sleep(0.2)

    def wait(self) -> list[int]:
        return [process.wait(timeout=200) for process in self.processes]

    def lose(self, node: int) -> None:
        """Kill all processes of a pod at once and delete its disk."""
        kill_all_in(NAMES[node])
        self.processes[node].wait()
        shutil.rmtree(self.disks[node])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_continues_from_the_bucket_when_a_node_is_lost_with_its_disk(network: None, tmp_path: Path) -> None:  # noqa: ARG001
    server = S3Server(BRIDGE_ADDRESS)
    bucket = server.make_bucket("my-bucket")
    lost = Pods(tmp_path / "lost", server, f"s3://{bucket}/my-run/checkpoint", "--training.steps=100000")
    lost.wait_for(lambda: "saved s3://my-bucket/my-run/checkpoint/step-4" in lost.output())
    lost.lose(1)
    exit_code = lost.processes[0].wait(timeout=200)
    assert action_for(lost.job, exit_code) == "Count", lost.output()

    objects = server.objects(bucket, "my-run/")
    saved = max(int(name.split("step-")[1].split(".")[0]) for name in objects if name.endswith("manifest.json"))
    steps = f"--training.steps={saved + 4}"
    config = ("--job.config_file=train_configs/debug_model.toml", f"--job.dump_folder={tmp_path / 'reference'}")
    checked_command("torchtrain.train", *config, *SMALL, steps)
    expected = logged_losses(tmp_path / "reference")
    assert len(expected) == saved + 4
    before = lost.losses()
    assert before == pytest.approx({step: expected.get(step, before[step]) for step in before}, rel=1e-5)
    for nodes, ranks in ((1, 1), (2, 2)):
        for name, content in objects.items():
            server.upload(bucket, f"run-{nodes}/{name}", content)
        folder = f"s3://{bucket}/run-{nodes}/checkpoint"
        resumed = Pods(tmp_path / f"resumed-{nodes}", server, folder, steps, nodes=nodes, ranks=ranks)
        assert resumed.wait() == [0] * nodes, resumed.output()
        assert f"resumed from {folder}/step-{saved}" in resumed.output()
        # The disk is new: the losses before come from the bucket.
        assert resumed.losses() == pytest.approx(expected, rel=1e-5)
    server.stop()
