"""Start SLURM on this machine: slurmctld and two virtual nodes on loopback, each with eight fake GPUs."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from forkserver import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun")
NODES = ("n1", "n2")
END_STATES = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")


def missing_requirement() -> str:
    """The reason why SLURM cannot run here, or an empty string."""
    if os.geteuid() != 0:
        return "starting SLURM needs root, because slurmd starts steps as other users"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return (
        f"SLURM is not installed (no {', '.join(missing)}): apt-get install slurmctld slurmd slurm-client"
        if missing
        else ""
    )


class Slurm:
    """A SLURM cluster, from ``start`` to ``stop``; its state and logs are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        for name in ("state", "run", "log", "dev", "spool/n1", "spool/n2"):
            (self.folder / name).mkdir(parents=True)
        for i in range(8):
            os.mknod(self.folder / "dev" / f"gpu{i}", 0o20666, os.makedev(1, 3))  # the device numbers of /dev/null
        (self.folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={self.folder}/dev/gpu[0-7]\n")
        (self.folder / "slurm.conf").write_text(self.config())
        subprocess.run(["slurmctld", "-i"], env=self.env, check=True)
        for node in NODES:
            self.start_node(node)
        self.wait_for(lambda: self.ask("sinfo", "-h", "-N", "-o", "%N %t").split() == ["n1", "idle", "n2", "idle"], 30)

    def start_node(self, node: str) -> None:
        subprocess.run(["slurmd", "-N", node], env=self.env, check=True)

    def config(self) -> str:
        ports = {node: free_port() for node in NODES}
        nodes = "".join(
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} "
            "CPUs=64 RealMemory=500000 Gres=gpu:8\n"
            for node, port in ports.items()
        )
        return f"""\
ClusterName=ci
SlurmctldHost={socket.gethostname().split(".")[0]}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
EnforcePartLimits=ALL
ReturnToService=2
KillWait=10
SlurmdTimeout=20
MailProg=/bin/true
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
SlurmctldPidFile={self.folder}/run/slurmctld.pid
SlurmdPidFile={self.folder}/run/slurmd.%n.pid
SlurmctldLogFile={self.folder}/log/slurmctld.log
SlurmdLogFile={self.folder}/log/slurmd.%n.log
{nodes}PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""

    def stop(self) -> None:
        self.ask("scancel", "--user", "root")
        # Steps survive slurmd: wait until the jobs have ended.
        self.wait_for(lambda: not self.ask("squeue", "-h"), 30)
        for pid_file in sorted((self.folder / "run").glob("*.pid")):
            os.kill(int(pid_file.read_text()), signal.SIGTERM)

    def ask(self, *command: str) -> str:
        """Run a SLURM command and return its output."""
        return subprocess.run(command, env=self.env, check=True, capture_output=True, text=True, timeout=60).stdout

    def state(self, job: str) -> str:
        """The state of a job: PENDING, RUNNING, COMPLETED, FAILED, ..."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        words = self.ask("scontrol", "show", "job", "-o", job).split()
        return next(word.removeprefix(name + "=") for word in words if word.startswith(name + "="))

    def wait_for_end(self, job: str, seconds: float) -> str:
        """Wait until ``job`` has ended and return its final state."""
        self.wait_for(lambda: self.state(job) in END_STATES, seconds)
        return self.state(job)

    def wait_for(self, holds, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                logs = "".join(path.read_text()[-2000:] for path in (self.folder / "log").iterdir())
                raise AssertionError(f"the condition did not hold within {seconds} s\n{self.ask('squeue')}\n{logs}")
            time.sleep(0.3)
