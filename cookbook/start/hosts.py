"""The machines of a run: which one this is, and the network interface that leads to the others. No torch."""

import ipaddress
import os
import re
import socket
import subprocess
from collections.abc import MutableMapping
from dataclasses import dataclass
from socket import AF_INET, AF_INET6

import psutil

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
PORT = 29500
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which a launcher gives a process its place."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The machines of a run, and which of them this is."""

    count: int = 1
    index: int = 0
    """Number of this machine, from 0."""
    first: str = ""
    """Name or address of machine 0."""
    port: int = PORT
    """On which machine 0 waits for the others."""


def read_hosts(count: int | None, index: int | None, first: str | None, port: int | None) -> tuple[Hosts, list[str]]:
    """The machines that the flags of `launch` describe, without flags those of Slurm; and the mistakes in them."""
    hosts = Hosts(count=count or 1, index=index or 0, first=first or "", port=port or PORT)
    given = {"--machine": index, "--first": first, "--port": port}
    written = ", ".join(name for name, value in given.items() if value is not None)
    if count is None:
        return (hosts, [f"{written}: would be ignored without --machines; add it"]) if written else slurm_hosts()
    mistakes, last = [], hosts.count - 1
    if index is None and last:
        mistakes.append(f"--machine is missing: write the number of this machine, 0 to {last}, 0 on the first")
    elif not 0 <= hosts.index <= last:
        mistakes.append(f"--machine is {index}, with --machines {count}; write {f'0 to {last}' if last else 0}")
    if not first and last:
        what = "is missing" if first is None else "is empty"  # an unset variable of a system
        mistakes.append(f"--first {what}: write the address of machine 0, the same on all machines")
    if not 0 < hosts.port < 65536:
        mistakes.append(f"--port is {hosts.port}; write 1 to 65535")
    return hosts, mistakes


def slurm_hosts() -> tuple[Hosts, list[str]]:
    """The machines of a Slurm step, which `srun` started as one task on each; else one machine. And the mistakes."""
    count, tasks = (os.environ.get(f"SLURM_STEP_NUM_{name}", "1") for name in ("NODES", "TASKS"))
    if count == "1":
        return Hosts(), []
    if tasks != count:
        advice = "start one on each, with --ntasks-per-node=1: it starts the processes of its machine"
        return Hosts(), [f"srun started {tasks} tasks on {count} nodes; {advice}"]
    try:
        name = _scontrol("hostnames", os.environ["SLURM_STEP_NODELIST"]).split()[0]
        address = re.search(r"\bNodeAddr=(\S+)", _scontrol("node", name))
    except (OSError, subprocess.CalledProcessError) as error:
        return Hosts(), [f"scontrol cannot name the first node: {error}; write --machines, --machine and --first"]
    first, port = address[1] if address else name, PORT + int(os.environ["SLURM_JOB_ID"]) % 1000
    return Hosts(count=int(count), index=int(os.environ["SLURM_NODEID"]), first=first, port=port), []


def _scontrol(*words: str) -> str:
    return subprocess.run(["scontrol", "show", *words], check=True, capture_output=True, text=True).stdout


def set_interfaces(first: str, environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Makes gloo and NCCL use the interface of the route to machine 0, unless the user set theirs. By themselves both
    may take another, gloo that of the machine's own name, which Debian's /etc/hosts resolves to 127.0.1.1.

    Returns:
        The mistakes: an interface that is not here or leads nowhere, an address that cannot be reached.
    """
    missing = [name for name in INTERFACES if not environment.get(name)]
    mistakes = [problem for name in INTERFACES if (problem := interface_problem(name, environment, first))]
    if missing:
        try:
            name = interface_to(first)
            # NCCL would take a bare name for the beginning of one.
            environment.update({variable: f"={name}" if variable.startswith("NCCL") else name for variable in missing})
        except OSError as error:
            advice = f"correct the address, or set {' and '.join(missing)} (one of {', '.join(_interfaces())})"
            mistakes.append(f"machine 0 at {first}: {error.strerror or error}; {advice}")
    return mistakes


def interface_problems(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """The mistakes in `INTERFACES` of a run on one machine."""
    return [problem for name in INTERFACES if (problem := interface_problem(name, environment))]


def interface_to(address: str) -> str:
    """The network interface through which this machine reaches a name or an address.

    Raises:
        OSError: no such name, no route, or a name that means another machine on each.
    """
    family, kind, protocol, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)  # sends nothing
        own = probe.getsockname()[0]
    if ipaddress.ip_address(own).is_loopback and own != address:
        raise OSError(f"this name resolves to {place[0]} here, which no other machine reaches")
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in addresses):
            return name
    raise OSError(f"no interface has {own}")


def address_warning(hosts: Hosts) -> str | None:
    """A warning where machine 0 waits at an address that none of its interfaces has: the others, and it itself, would
    try to connect until the time is out. A network that translates addresses may lead there all the same.
    """
    if hosts.index or not hosts.first:
        return None
    try:
        named = {place[0] for *_, place in socket.getaddrinfo(hosts.first, hosts.port, type=socket.SOCK_STREAM)}
    except OSError:  # a mistake of `set_interfaces`
        return None
    own = {address.address.partition("%")[0] for group in psutil.net_if_addrs().values() for address in group}
    if named & own or any(ipaddress.ip_address(address).is_loopback for address in named):
        return None
    what = "but this is machine 0 and no interface of it has that address"
    return f"warning: --first is {hosts.first}, {what}; write one of its own, unless the network translates it"


def interface_problem(variable: str, environment: MutableMapping[str, str] = os.environ, first: str = "") -> str | None:
    """The mistake in one of `INTERFACES`, with which processes fail to connect, or wait: there is no such interface, or
    it does not lead out of this machine.

    Args:
        first: name or address of machine 0, on several machines.
    """
    value = environment.get(variable, "")
    if not value or value.startswith("^"):  # ^ names those to leave out
        return None
    exact = variable.startswith("GLOO") or value.startswith("=")
    wanted = [name for name in value.lstrip("=").split(",") if name]
    chosen = [own for own in _interfaces() if any(name == own if exact else own.startswith(name) for name in wanted)]
    others = [name for name in _interfaces() if not _is_loopback(name)]
    if not chosen:
        return f"{variable}={value}: no such network interface; here are {', '.join(_interfaces())}"
    if first and not _is_here(first) and not set(chosen) & set(others):
        advice = f"; write {' or '.join(others)}" * bool(others)
        return f"{variable}={value} does not leave this machine, and machine 0 is {first}{advice}"
    return None


def _is_here(name: str) -> bool:
    """Return whether a name or an address is this machine's loopback."""
    try:
        addresses = {str(place[0]) for *_, place in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def _is_loopback(interface: str) -> bool:
    entries = psutil.net_if_addrs().get(interface, ())
    addresses = [entry.address for entry in entries if entry.family in (AF_INET, AF_INET6)]
    return bool(addresses) and all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses)


def _interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())
