"""A cable between two network namespaces on which each packet takes some time: two TUN devices and what carries packets
between them. The kernel's own way (tc's netem) is missing in many kernels of containers and CI.

    python tests/slow_cable.py SECONDS NAME NAME    makes both devices, prints a line, and carries until its input ends
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, TUN_WITHOUT_HEADER = 0x400454CA, 0x0001 | 0x1000  # linux/if_tun.h
LARGEST = 2**16


def open_device(name: str) -> int:
    """A TUN device, which stays this process's when it is moved to a namespace."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), TUN_WITHOUT_HEADER))
    return device


def carry(seconds: float, ends: list[int]) -> None:
    """Until standard input ends."""
    on_the_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        ready, _, _ = select.select([sys.stdin, *ends], [], [], wait)
        if sys.stdin in ready:
            return
        for end in ready:
            on_the_way.append((time.monotonic() + seconds, ends[end == ends[0]], os.read(end, LARGEST)))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, end, packet = on_the_way.popleft()
            os.write(end, packet)


if __name__ == "__main__":
    devices = [open_device(name) for name in sys.argv[2:]]
    print("ready", flush=True)
    carry(float(sys.argv[1]), devices)
