"""Two network namespaces with a cable between them: all that two machines have in common is the disk. As root."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.needs import need_namespaces

ADDRESSES = ("10.88.0.1", "10.88.0.2")


@contextmanager
def two_machines() -> Iterator[list[str]]:
    """The names of the namespaces, for `ip netns exec`; their addresses are `ADDRESSES`."""
    need_namespaces()
    names = [f"cookbook{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            _ip(f"netns add {name}")
        _ip(f"link add cable netns {names[0]} type veth peer name cable netns {names[1]}")
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip(f"-n {name} address add {address}/24 dev cable")
            _ip(f"-n {name} link set cable up")
            _ip(f"-n {name} link set lo up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name])


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
