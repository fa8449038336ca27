"""Two "hosts" on one machine: network namespaces, a cable between them, and torchrun in each.

`unshare ... python tests/launch/two_hosts.py SCRIPT ARGUMENTS...`, see OWN_NAMESPACE. Exits with the first status that
is not 0. Each host has a name and an address of its own, and no way to anything else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OWN_NAMESPACE = ("unshare", "--user", "--map-root-user", "--net", "--fork", "--kill-child")
"""Whatever is made in there ends with the command, and needs no rights outside."""
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29417
CABLE = ("ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1")

BOOT = """
read connected
mount --bind "$1" /etc/hosts
hostname "$2"
ip addr add "$3/24" dev "$4"
ip link set "$4" up
ip link set lo up
shift 4
exec "$@"
"""
"""A host waits for its end of the cable, sets up its network, and becomes its job."""


def can_make_hosts() -> bool:
    """Whether the tools are there, and the system allows it."""
    if sys.platform != "linux" or not all(map(shutil.which, ("unshare", "ip", "mount", "hostname"))):
        return False
    return subprocess.run([*OWN_NAMESPACE, *CABLE], capture_output=True).returncode == 0


def start_host(number: int, names: Path, command: list[str]) -> subprocess.Popen[bytes]:
    """torchrun on one host, as docs/guide/launch.md has it. It waits for a line on its standard input."""
    cable = f"cable{number}"
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
        "--rdzv-backend=c10d", "--rdzv-id=two_hosts", f"--rdzv-endpoint=host0:{PORT}",
    ]  # fmt: skip
    boot = ["sh", "-ec", BOOT, "boot", str(names), f"host{number}", ADDRESSES[number], cable]
    return subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", *boot, *torchrun, *command],
        stdin=subprocess.PIPE,
        env={**os.environ, "GLOO_SOCKET_IFNAME": cable},
    )


def network_of(process: int) -> str:
    """Which network namespace a process is in."""
    return os.readlink(f"/proc/{process}/ns/net")


def connect(hosts: list[subprocess.Popen[bytes]]) -> None:
    """Lay a cable, one end in each host, and let them go on."""
    for host in hosts:
        while network_of(host.pid) == network_of(os.getpid()):  # `unshare` has yet to make it
            time.sleep(0.01)
    subprocess.run(CABLE, check=True)
    for number, host in enumerate(hosts):
        subprocess.run(("ip", "link", "set", f"cable{number}", "netns", str(host.pid)), check=True)
    for host in hosts:
        assert host.stdin is not None
        host.stdin.write(b"connected\n")
        host.stdin.close()


def main() -> int:
    with tempfile.NamedTemporaryFile("w") as names:
        names.write("127.0.0.1 localhost\n")
        names.writelines(f"{address} host{number}\n" for number, address in enumerate(ADDRESSES))
        names.flush()
        hosts = [start_host(number, Path(names.name), sys.argv[1:]) for number in range(2)]
        try:
            connect(hosts)
            while any(host.poll() is None for host in hosts) and not any(host.poll() for host in hosts):
                time.sleep(0.1)
            return next((host.returncode for host in hosts if host.returncode), 0)
        finally:
            for host in hosts:
                host.kill()


if __name__ == "__main__":
    sys.exit(main())
