"""Two network namespaces with a cable between them: all that two machines have in common is the disk. As root."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.needs import need_namespaces, need_tun

ADDRESSES = ("10.88.0.1", "10.88.0.2")


@contextmanager
def two_machines(*, delay: float = 0.0) -> Iterator[list[str]]:
    """The names of the namespaces, for `ip netns exec`; their addresses are `ADDRESSES`.

    Args:
        delay: seconds that each packet takes from one to the other.
    """
    need_namespaces()
    if delay:
        need_tun()
    names = [f"cookbook{os.getpid()}{letter}" for letter in "ab"]
    carrier: subprocess.Popen[str] | None = None
    try:
        for name in names:
            _ip(f"netns add {name}")
        if delay:
            carrier = _slow_cable(delay, names)
        else:
            _ip(f"link add cable netns {names[0]} type veth peer name cable netns {names[1]}")
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip(f"-n {name} address add {address}/24 dev cable")
            _ip(f"-n {name} link set cable up")
            _ip(f"-n {name} link set lo up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name])
        if carrier is not None:
            carrier.communicate()


def _slow_cable(delay: float, namespaces: list[str]) -> subprocess.Popen[str]:
    devices = [f"cable{os.getpid()}{letter}" for letter in "ab"]
    program = [sys.executable, str(Path(__file__).with_name("slow_cable.py"))]
    carrier = subprocess.Popen(
        [*program, str(delay), *devices], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert carrier.stdout is not None and carrier.stdout.readline() == "ready\n"
    for device, name in zip(devices, namespaces, strict=True):
        _ip(f"link set {device} netns {name} name cable mtu 32000 txqueuelen 10000")
    return carrier


def set_cable(machine: str, state: str) -> None:
    """Sets a machine's end of the cable "down", so that it hears nothing more and no connection is closed, or "up"."""
    _ip(f"-n {machine} link set cable {state}")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
