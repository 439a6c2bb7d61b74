#!/usr/bin/env python3
"""c++ without debug information. The twelve files of DeepSpeed's asynchronous I/O get torch's headers compiled once,
which takes 20 s in each; PRECOMPILED is a folder for what they become.
"""

import fcntl
import os
import subprocess
import sys
from pathlib import Path


def header_for(flags: list[str], folder: Path) -> Path:
    """A header with its compiled form beside it, where GCC looks for that."""
    header, compiled = folder / "torch.h", folder / "torch.h.gch"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ninja compiles files side by side
        if not compiled.exists():
            header.write_text("#include <torch/extension.h>\n")
            subprocess.run(["c++", *flags, "-x", "c++-header", header, "-o", compiled], check=True)
    return header


def main() -> None:
    words = sys.argv[1:]
    if "-c" in words:
        flags = [*words[3 : words.index("-c")], "-g0"]  # behind -MMD -MF FILE
        words.append("-g0")
        if "-DTORCH_EXTENSION_NAME=async_io" in words:
            words += ["-include", str(header_for(flags, Path(os.environ["PRECOMPILED"])))]
    os.execvp("c++", ["c++", *words])


if __name__ == "__main__":
    main()
