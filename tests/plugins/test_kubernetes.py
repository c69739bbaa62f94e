"""scripts/kubernetes: the manifests are valid, agree with the code, and train as pods that share only a bucket."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_command import checked_command, run_program
from forked_run import logged_losses
from forkserver import context, free_port
from kubernetes_job import ROOT, action_for, container_of, copy_image, manifests, pod_command
from s3_server import S3Server

from torchtrain import errors
from torchtrain.config.parse import parse
from torchtrain.config.schema import section_of
from torchtrain.plugins.replicas.options import ReplicasConfig

BUCKET_SECRET = {"torchtrain-bucket": {"AWS_ACCESS_KEY_ID": "key"}}


def job_of(name: str) -> dict[str, Any]:
    """The Job in job.yaml, or the one that JobSet creates."""
    kinds = manifests(name)
    return kinds["Job"] if "Job" in kinds else kinds["JobSet"]["spec"]["replicatedJobs"][0]["template"]


def test_manifests_are_valid() -> None:
    validation = pytest.importorskip("kubernetes_validate", reason="needs Kubernetes' schemas (kubernetes-validate)")
    # No package has the schema of JobSet itself.
    in_jobset = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "nodes"}, **job_of("jobset/jobset.yaml")}
    for manifest in (*manifests("base/job.yaml").values(), in_jobset):
        for version in ("1.31", validation.latest_version()):
            validation.validate(manifest, version, strict=True)
    in_jobset["spec"]["template"]["spec"]["gracePeriod"] = 1
    with pytest.raises(validation.ValidationError, match="gracePeriod"):
        validation.validate(in_jobset, "1.31", strict=True)


@pytest.mark.parametrize("name", ["base/job.yaml", "jobset/jobset.yaml"])
def test_manifest_agrees_with_the_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(name)
    spec, container = job["spec"], container_of(job)
    words, _ = pod_command(job, 1, BUCKET_SECRET)
    at = words.index("torchtrain.train")
    launcher = dict(word.split("=", 1) for word in words[3 : at - 1])
    assert words[:3] == ["python", "-m", "torchtrain.launch"]
    assert launcher["--nnodes"] == str(spec["completions"]) == str(spec["parallelism"])
    assert launcher["--node-rank"] == "1"
    monkeypatch.chdir(copy_image(tmp_path))  # the config file must be in the image
    config = parse(words[at + 1 :])
    assert config.checkpoint.folder == f"s3://my-bucket/{Path(config.job.dump_folder).name}/checkpoint"
    # A step and a save fit in the time before SIGKILL, which torchrun sends first, then the kubelet.
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    shutdown_seconds = float(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    grace_seconds = spec["template"]["spec"]["terminationGracePeriodSeconds"]
    assert config.faults.stop_grace_seconds < shutdown_seconds < grace_seconds
    assert [name for name in variables if "AWS" in name] == []  # credentials come from the Secret


def test_pods_find_the_pod_with_index_0_by_name() -> None:
    kinds = manifests("base/job.yaml")
    service, job = kinds["Service"], kinds["Job"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert f"--master-addr={job['metadata']['name']}-0.{service['metadata']['name']}" in container_of(job)["args"]
    # JobSet names the pod after the JobSet, the replicated job and two indices, and the Service after the JobSet.
    jobset = manifests("jobset/jobset.yaml")["JobSet"]
    name, replicated = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    address = f"--master-addr={name}-{replicated}-0-0.{name}"
    assert address in container_of(job_of("jobset/jobset.yaml"))["args"]


def test_jobset_has_the_same_pods() -> None:
    job, in_jobset = job_of("base/job.yaml"), job_of("jobset/jobset.yaml")
    pod, pod_in_jobset = job["spec"]["template"]["spec"], in_jobset["spec"]["template"]["spec"]
    assert pod.pop("subdomain") == "torchtrain"  # JobSet sets it
    different = {*container_of(job).pop("args")} ^ {*container_of(in_jobset).pop("args")}
    assert {word.split("=")[0] for word in different} == {"--master-addr"}
    assert pod == pod_in_jobset


@pytest.mark.parametrize("name", ["base/job.yaml", "jobset/jobset.yaml"])
def test_exit_codes_decide_about_a_restart(name: str) -> None:
    job = job_of(name)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    expected = {2: "FailJob", 70: "FailJob", 74: "Count", 75: "Ignore"}
    assert {kind.exit_code for kind in kinds} == expected.keys()
    assert {code: action_for(job, code) for code in expected} == expected
    assert action_for(job, 143) == "Ignore"  # of the launcher, after SIGTERM
    assert [action_for(job, code) for code in (1, 134, 137)] == ["Count"] * 3  # crashes
    if name == "base/job.yaml":
        assert action_for(job, 137, conditions=("DisruptionTarget",)) == "Ignore"
    else:  # a disruption restarts all pods
        rule = manifests(name)["JobSet"]["spec"]["failurePolicy"]["rules"][0]
        assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
        assert job["spec"]["backoffLimit"] == 0


def build_overlay(name: str) -> dict[str, dict[str, Any]]:
    """The objects that an overlay builds, by kind."""
    command = ["kubectl", "kustomize", f"scripts/kubernetes/overlays/{name}"]
    built = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout
    return {entry["kind"]: entry for entry in yaml.safe_load_all(built)}


NEEDS_KUBECTL = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which builds overlays")


@NEEDS_KUBECTL
@pytest.mark.parametrize("name", ["cpu", pytest.param("gpu", marks=pytest.mark.slow), "rdma"])
def test_overlay_is_valid_and_agrees_with_the_code(name: str, tmp_path: Path) -> None:
    validation = pytest.importorskip("kubernetes_validate", reason="needs Kubernetes' schemas (kubernetes-validate)")
    kinds = build_overlay(name)
    assert kinds.keys() == {"ConfigMap", "Job", "Service", "ServiceAccount"}
    for manifest in kinds.values():
        validation.validate(manifest, "1.31", strict=True)
    job, container = kinds["Job"], container_of(kinds["Job"])
    pod = job["spec"]["template"]["spec"]
    words, environment = pod_command(job, 1, BUCKET_SECRET)
    at = words.index("torchtrain.train")
    assert ("--nproc-per-node=1" if name == "cpu" else "--nproc-per-node=gpu") in words[:at]
    assert ("NCCL_IB_HCA" in environment) == (name == "rdma")
    # The options that the pod would get are valid, with the file of the ConfigMap.
    config_map = kinds["ConfigMap"]
    assert {"name": "config", "configMap": {"name": config_map["metadata"]["name"]}} in pod["volumes"]
    (tmp_path / "run.toml").write_text(config_map["data"]["run.toml"])
    options = [word.replace("/config/", f"{tmp_path}/") for word in words[at + 1 :]]
    config = parse(options)
    assert (config.data.path, config.model.tokenizer_path) == ("s3://my-bucket/texts", "s3://my-bucket/tokenizer")
    assert pod["serviceAccountName"] == kinds["ServiceAccount"]["metadata"]["name"]
    resources = container["resources"]["limits"].keys()
    assert ("nvidia.com/gpu" in resources) == (name != "cpu")
    assert any(word.startswith("rdma/") for word in resources) == (name == "rdma")
    assert (container["securityContext"]["capabilities"].get("add") == ["IPC_LOCK"]) == (name == "rdma")
    tolerated = {toleration["key"] for toleration in pod["tolerations"]}
    assert ("nvidia.com/gpu" in tolerated) == (name != "cpu")
    assert "node.kubernetes.io/unreachable" in tolerated  # those of the base remain
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"/dev/shm", "/config", "/torchtrain/outputs"}
    environment = {variable["name"]: variable.get("value", "") for variable in container["env"]}
    assert environment["TORCHTRAIN_CACHE"].startswith("/torchtrain/outputs/")  # on a volume


@NEEDS_KUBECTL
@pytest.mark.parametrize("name", [pytest.param("jobset", marks=pytest.mark.slow), "replicas"])
def test_overlay_of_a_jobset_has_the_pods_of_the_jobs_overlay(name: str) -> None:
    validation = pytest.importorskip("kubernetes_validate", reason="needs Kubernetes' schemas (kubernetes-validate)")
    job, kinds = build_overlay("gpu")["Job"], build_overlay(name)
    others = {"Deployment", "Service"} if name == "replicas" else set()
    assert kinds.keys() == {"ConfigMap", "JobSet", "ServiceAccount"} | others  # JobSet makes the headless Service
    (replicated,) = kinds["JobSet"]["spec"]["replicatedJobs"]
    in_jobset = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **replicated["template"]}
    for manifest in (in_jobset, *(kind for name, kind in kinds.items() if name != "JobSet")):
        validation.validate(manifest, "1.31", strict=True)
    # All else is that of the JobSet without an overlay.
    (plain,) = manifests(f"{name}/{name}.yaml")["JobSet"]["spec"]["replicatedJobs"]
    pod, plain_pod = (one["template"]["spec"]["template"].pop("spec") for one in (replicated, plain))
    assert replicated == plain
    labels = kinds["JobSet"]["metadata"]["labels"]
    assert labels == job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "training"}
    pod_of_job = job["spec"]["template"]["spec"]
    (own,), (of_job,), (of_plain,) = (one["containers"] for one in (pod, pod_of_job, plain_pod))
    pod_of_job.pop("subdomain")
    added = {*of_plain["args"]} - {*container_of(job_of("base/job.yaml"))["args"]}
    assert {*own["args"]} == {*of_job["args"]} - {"--master-addr=torchtrain-0.torchtrain"} | added
    assert own["env"] == [one for one in of_plain["env"] if "valueFrom" in one] + of_job["env"]
    for container in (own, of_job):
        del container["args"], container["env"]
    assert pod == pod_of_job
    (volume,) = (volume for volume in pod["volumes"] if "configMap" in volume)
    assert volume["configMap"]["name"] == kinds["ConfigMap"]["metadata"]["name"]
    if others:
        lighthouse = kinds["Deployment"]["spec"]["template"]["spec"]
        for key in ("serviceAccountName", "imagePullSecrets"):
            assert lighthouse[key] == pod[key]
        assert lighthouse["containers"][0]["securityContext"] == own["securityContext"]


@NEEDS_KUBECTL
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, for other users")
def test_containers_of_the_rdma_overlay_can_pin_memory() -> None:
    """Started as by a container runtime, with the user and capabilities of the securityContext, and a low limit."""
    context = container_of(build_overlay("rdma")["Job"])["securityContext"]
    program = "import ctypes, os; os._exit(ctypes.CDLL(None).mlock(ctypes.create_string_buffer(2**20), 2**20) & 3)"

    def pin(user: int) -> int:
        capabilities = ",".join(["-all", *(f"+{name.lower()}" for name in context["capabilities"]["add"])])
        words = ["prlimit", "--memlock=65536:65536", "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        words += [f"--inh-caps={capabilities}", f"--bounding-set={capabilities}", "--no-new-privs"]
        return subprocess.run([*words, "/usr/bin/env", "python3", "-S", "-c", program], cwd="/", timeout=60).returncode

    assert context["capabilities"]["drop"] == ["ALL"]
    assert context["allowPrivilegeEscalation"] is False
    assert pin(context["runAsUser"]) == 0
    assert pin(1000) == 3  # https://github.com/kubernetes/kubernetes/issues/56374


def test_replicas_are_jobs_that_are_started_again_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = manifests("replicas/replicas.yaml")
    jobset, service, lighthouse = kinds["JobSet"], kinds["Service"], kinds["Deployment"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]
    validation = pytest.importorskip("kubernetes_validate", reason="needs Kubernetes' schemas (kubernetes-validate)")
    in_jobset = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "replica"}, **job}
    for manifest in (service, lighthouse, in_jobset):
        validation.validate(manifest, "1.31", strict=True)
    # The pods are those of a single job, but for what names the replica.
    plain = job_of("base/job.yaml")
    pod, plain_pod = job["spec"]["template"]["spec"], plain["spec"]["template"]["spec"]
    words, _ = pod_command(job, 1, BUCKET_SECRET, {"REPLICA": "3", "POD_IP": "10.0.0.7"})
    different = {*words} ^ {*pod_command(plain, 1, BUCKET_SECRET)[0]}
    assert {word.split("=")[0] for word in different} == {
        *("--master-addr", "--training.sums", "--training.global_batch_size"),
        *("--replicas.lighthouse", "--replicas.id", "--replicas.host"),
    }
    own = container_of(job)["env"]
    assert {variable["name"] for variable in own if "valueFrom" in variable} == {"REPLICA", "POD_IP"}
    assert [variable for variable in own if "value" in variable] == container_of(plain)["env"]
    for of in (pod, plain_pod):
        of.pop("subdomain", None)
        del of["containers"][0]["args"], of["containers"][0]["env"]
    assert pod == plain_pod
    # JobSet names a pod after the JobSet, the replicated job, the number of the Job and that of the pod.
    name = jobset["metadata"]["name"]
    assert f"--master-addr={name}-{replicated['name']}-3-0.{name}" in words
    monkeypatch.chdir(copy_image(tmp_path))
    config = parse(words[words.index("torchtrain.train") + 1 :])
    replicas = section_of(config, ReplicasConfig)
    assert (replicas.own_id, replicas.host) == ("3", "10.0.0.7")
    (port,) = service["spec"]["ports"]
    assert replicas.lighthouse == f"http://{service['metadata']['name']}:{port['port']}"
    assert config.checkpoint.folder.startswith("s3://")  # the pods share only a bucket
    labels = lighthouse["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == lighthouse["spec"]["selector"]["matchLabels"]
    (of_lighthouse,) = lighthouse["spec"]["template"]["spec"]["containers"]
    assert f"--bind=[::]:{port['port']}" in of_lighthouse["args"]
    # Only an error of the user ends the Job of a replica, and so the JobSet.
    actions = {2: "FailJob", 70: "Count", 74: "Count", 75: "Ignore", 143: "Ignore", 137: "Count"}
    assert {code: action_for(job, code) for code in actions} == actions
    assert job["spec"]["backoffLimit"] == plain["spec"]["backoffLimit"]
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 0}


class Cluster:
    """Runs the commands of the page: those of docker and kubectl here, others as they are.

    Pods run on the loopback interface, each in a folder with the files of the image.
    """

    def __init__(self, folder: Path, edits: dict[str, str], options: list[str], variables: dict[str, str]) -> None:
        self.folder, self.edits, self.options, self.variables = folder, edits, options, variables
        self.secrets: dict[str, dict[str, str]] = {}
        self.job: dict[str, Any] = {}
        self.pods: list[BaseProcess] = []
        self.starts = 0

    def run(self, command: str) -> str:
        words = shlex.split(command)
        match words:
            case ["docker", "build", "--file", "scripts/kubernetes/Dockerfile", "--tag", image, "."]:
                copy_image(self.folder / "image")
                self.image = image
            case ["docker", "push", image]:
                assert image == self.image
            case ["kubectl", "create", "secret", "generic", name, "--from-env-file", file]:
                lines = (self.folder / file).read_text().splitlines()
                self.secrets[name] = dict(line.split("=", 1) for line in lines)
            case ["kubectl", "apply", "--filename", "scripts/kubernetes/base/job.yaml"]:
                self.job = manifests("base/job.yaml", self.edits)["Job"]
                assert container_of(self.job)["image"] == self.image
                container_of(self.job)["args"] += self.options
                self.start()
            case ["kubectl", "logs", "--follow", "--selector", selector]:
                index = f"batch.kubernetes.io/job-completion-index=0,job-name={self.job['metadata']['name']}"
                assert selector == index
                log = self.folder / f"start-{self.starts}/pod-0.log"
                return log.read_text() if log.exists() else ""  # of a pod that is just starting
            case ["kubectl", "patch", "job", name, "--patch", patch]:
                assert name == self.job["metadata"]["name"]
                suspend = json.loads(patch)["spec"]["suspend"]
                self.stop() if suspend else self.start()
            case ["python", "-m", module, *arguments]:
                return checked_command(module, *arguments, environment=self.secrets["torchtrain-bucket"]).stdout
            case _:
                raise AssertionError(f"unknown command {command!r}")
        return ""

    def start(self) -> None:
        self.starts += 1
        folder = self.folder / f"start-{self.starts}"
        for index in range(self.job["spec"]["completions"]):
            disk = copy_image(folder / f"disk-{index}")
            words, environment = pod_command(self.job, index, self.secrets)
            environment.update(self.variables)
            process = context().Process(target=run_pod, args=(disk, folder / f"pod-{index}.log", words, environment))
            process.start()
            self.pods.append(process)

    def stop(self) -> None:
        """What suspending a Job does: SIGTERM to its pods."""
        for pod in self.pods:
            os.kill(pod.pid or 0, signal.SIGTERM)
        for pod in self.pods:
            pod.join(60)
        assert [action_for(self.job, pod.exitcode or 0) for pod in self.pods] == ["Ignore"] * len(self.pods)
        self.pods.clear()

    def kill(self) -> None:
        """Kill the pods with their ranks, which would survive their launcher."""
        for pod in self.pods:
            for children in Path(f"/proc/{pod.pid}/task").glob("*/children"):
                for rank in map(int, children.read_text().split()):
                    with suppress(ProcessLookupError):  # it has just ended
                        os.kill(rank, signal.SIGKILL)
            pod.kill()
            pod.join()

    def wait_for_log(self, command: str, text: str) -> None:
        deadline = time.monotonic() + 100
        while text not in (output := self.run(command)):
            assert time.monotonic() < deadline, output
            assert all(pod.is_alive() for pod in self.pods), output
            time.sleep(0.2)


def run_pod(disk: Path, log: Path, words: list[str], environment: dict[str, str]) -> None:
    """Run ``python -m torchtrain.launch`` in this process."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(disk)
    assert words[:2] == ["python", "-m"]
    run_program(words[2], words[3:], environment)


def test_path_from_an_empty_bucket_to_a_resumed_run(forked_ranks: dict[str, str], tmp_path: Path) -> None:
    page = (ROOT / "docs/cluster.md").read_text(encoding="utf-8").split("\n## Kubernetes\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    commands = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    start, logs, suspend, resume = (
        next(i for i, command in enumerate(commands) if text in command)
        for text in ("kubectl apply", "kubectl logs", '"suspend": true', '"suspend": false')
    )
    assert start < logs < suspend < resume < len(commands) - 1

    server = S3Server()
    server.make_bucket("my-bucket")
    (tmp_path / "bucket.env").write_text("".join(f"{name}={value}\n" for name, value in server.environment.items()))
    edits = {
        "--nproc-per-node=gpu ": "--nproc-per-node=1 ",
        "--master-addr=torchtrain-0.torchtrain ": "--master-addr=localhost ",
        "--master-port=29500": f"--master-port={free_port()}",
        'OMP_NUM_THREADS, value: "8"': 'OMP_NUM_THREADS, value: "1"',
    }
    options = [
        *("--training.seq_len=32", "--model.shape.dim=32", "--model.shape.n_layers=1", "--model.shape.n_heads=2"),
        *("--model.shape.n_kv_heads=2", "--model.shape.ffn_dim=64", "--training.local_batch_size=1"),
        *("--metrics.log_freq=1", "--training.steps=100000", "--checkpoint.interval=100000"),
        "--report.no-enable",
    ]
    cluster = Cluster(tmp_path, edits, options, {**forked_ranks, "GLOO_SOCKET_IFNAME": "lo"})
    try:
        for command in commands[:logs]:
            cluster.run(command)
        cluster.wait_for_log(commands[logs], " 3/100000")
        cluster.run(commands[suspend])
        saved = re.findall(r"saved (s3://my-bucket/my-run/checkpoint/step-(\d+))", cluster.run(commands[logs]))[-1]
        cluster.run(commands[resume])
        cluster.wait_for_log(commands[logs], f" {int(saved[1]) + 2}/100000")
        assert f"resumed from {saved[0]}" in cluster.run(commands[logs])
        # The first start's metrics, on the disk of the second one.
        assert min(logged_losses(tmp_path / "start-2/disk-0/outputs/my-run")) == 1
        for command in commands[resume + 1 :]:
            assert cluster.run(command).startswith("def ")
    finally:
        cluster.kill()
        server.stop()
