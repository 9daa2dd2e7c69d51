"""Simulated hosts on one machine with separate addresses, processes and mounts.

`unshare` starts each host as a process in separate namespaces. A bridge in another network
namespace connects the hosts. When a host ends, all its processes end; when this process ends, all
hosts end.
"""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from train_runs import REPO, lives, python_path, wait_until

UNSHARE = "setpriv --pdeathsig KILL unshare --mount --net --uts --pid --fork --kill-child"
PATIENCE_S = 300


@dataclass
class Job:
    """Command that runs on a host; its output goes to a log file."""

    process: subprocess.Popen
    log: Path

    @property
    def text(self):
        return self.log.read_text(errors="replace")

    def wait(self):
        return self.process.wait(PATIENCE_S)

    def succeed(self):
        assert self.wait() == 0, self.text
        return self.text


@dataclass
class Host:
    """Simulated host, made by `Network.start`."""

    name: str
    number: int
    network: "Network"
    unshare: subprocess.Popen
    pid: int  # first process of the host; when it ends, all others end

    def command(self, *argv, cwd=REPO):
        spaces = ["--net", "--uts", "--mount", "--pid"]
        entered = ["nsenter", "--target", self.pid, *spaces, "env", f"--chdir={cwd}"]
        return [str(word) for word in [*entered, *argv]]

    def run(self, *argv):
        """Run a short command on the host; raise an error if it fails."""
        subprocess.check_output(self.command(*argv))

    def start(self, *argv, cwd=REPO, **environment):
        """Start a command on one core; write its output to a new log file."""
        log = self.network.folder / f"host{self.number}_{time.monotonic_ns()}.log"
        cores = sorted(os.sched_getaffinity(0))
        core = str(cores[self.number % len(cores)])
        path = python_path(REPO, REPO / "tests")
        variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | environment
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.command("taskset", "--cpu-list", core, *argv, cwd=cwd),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Job(process, log)

    def kill(self):
        """Remove the network link, then kill all processes, so that no message gets out."""
        if self.number:
            argv = self.network.switch.command("ip", "link", "delete", f"port{self.number}")
            subprocess.run(argv, capture_output=True)  # fails if the host has no link yet
        self.unshare.kill()
        self.unshare.communicate()
        wait_until(lambda: not lives(self.pid))

    def link(self, state):
        """Disconnect the host from the network ("down") or connect it again ("up")."""
        self.network.switch.run("ip", "link", "set", f"port{self.number}", state)


@dataclass
class Network:
    """Network switch with hosts, numbered from 1; host 1 has the address 10.9.0.1.

    An entry of `names` may hold several names, separated by spaces; the last one is the hostname.
    """

    folder: Path
    names: tuple[str, ...]
    hosts: dict[str, Host] = field(default_factory=dict)

    def __post_init__(self):
        entries = [f"10.9.0.{number} {name}" for number, name in enumerate(self.names, 1)]
        (self.folder / "etc_hosts").write_text("\n".join(["127.0.0.1 localhost", *entries, ""]))
        bridge = "ip link add bridge type bridge && ip link set bridge up"
        self.switch = self._unshare("switch", 0, bridge)

    def start(self, name, setup="true"):
        """Start a host, or a replacement with the same name and address.

        Args:
            name: an entry of `names`.
            setup: shell commands that the host runs first.
        """
        number = self.names.index(name) + 1
        own = f"mount --bind {self.folder}/etc_hosts /etc/hosts && {setup}"
        host = self.hosts[name] = self._unshare(name, number, own)
        port = f"port{number}"
        # Enter only the network namespace of the switch. In its process namespace, the process id
        # of the host would be unknown.
        switch = ["nsenter", "--target", str(self.switch.pid), "--net"]
        pair = [port, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid)]
        subprocess.check_call([*switch, "ip", "link", "add", *pair])
        self.switch.run("ip", "link", "set", port, "master", "bridge", "up")
        host.run("ip", "address", "add", f"10.9.0.{number}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        return host

    def _unshare(self, name, number, setup):
        own_name = f"hostname {name.split()[-1]} && ip link set lo up"
        start = f"mount -t proc proc /proc && {own_name} && {setup} && echo ready"
        argv = [*UNSHARE.split(), "sh", "-c", f"{start} && exec sleep infinity"]
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        if process.stdout.readline() != "ready\n":
            raise OSError(process.communicate()[1].strip())
        (first,) = psutil.Process(process.pid).children()
        return Host(name, number, self, process, first.pid)

    def close(self):
        for host in [*self.hosts.values(), self.switch]:
            if host.unshare.returncode is None:
                host.kill()


@contextmanager
def connected_or_skip(folder, *names):
    """Start a network of hosts; skip the test if namespaces cannot be created."""
    try:
        network = Network(folder, names)
        for name in names:
            network.start(name)
    except OSError as error:
        pytest.skip(f"needs root and Linux, for network namespaces as hosts: {error}")
    try:
        yield network
    finally:
        network.close()


def torchrun(host, *flags, nodes="2", conf="", cwd=REPO):
    """Start a torchrun agent with one rank of train_distributed.py.

    The agents use the first host as rendezvous endpoint.
    """
    options = {
        "nnodes": nodes,
        "nproc-per-node": 1,
        "max-restarts": 3,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"{host.network.names[0]}:29500",
        "rdzv-id": "job",
        "rdzv-conf": conf,
    }
    argv = [sys.executable, "-m", "torch.distributed.run"]
    argv += [f"--{name}={value}" for name, value in options.items()]
    argv += [REPO / "train_distributed.py", *flags]
    return host.start(*argv, cwd=cwd, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
