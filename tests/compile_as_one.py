#!/usr/bin/env python3
"""c++ for DeepSpeed's asynchronous I/O, without debug information. Eleven of its fifteen files read torch's headers,
20 s each; those of a folder are compiled as one, in the place of its `py_ds_*.cpp`, and the others are empty.

It is called through a link named c++, so that ninja records the command of a later build. A file of dependencies names
the source only: ninja would rebuild what depends on a temporary copy.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def compile_as_one(source: Path, place: Path, arguments: list[str]) -> int:
    """Compile the whole folder if `source` is `place`, else an empty file."""
    csrc = source.parents[source.parts[::-1].index("csrc") - 1]
    with tempfile.TemporaryDirectory() as name:
        copy, whole = Path(name, "csrc"), Path(name, "one.cpp")
        whole.write_text("")
        if source == place:
            shutil.copytree(csrc, copy)
            for header in copy.rglob("*.h"):  # not all have a guard
                header.write_text(f"#pragma once\n{header.read_text()}")
            copies = sorted((copy / source.parent.relative_to(csrc)).glob("*.cpp"))
            whole.write_text("".join(f'#include "{path}"\n' for path in copies))
        replaced = [str(whole) if word == str(source) else word.replace(str(csrc), str(copy)) for word in arguments]
        return subprocess.run(["c++", *replaced]).returncode


def main() -> int:
    here = str(Path(sys.argv[0]).parent)
    os.environ["PATH"] = os.pathsep.join(path for path in os.environ["PATH"].split(os.pathsep) if path != here)
    arguments = sys.argv[1:]
    if "-c" not in arguments:
        return subprocess.run(["c++", *arguments]).returncode
    arguments.append("-g0")
    source, output, dependencies = (Path(arguments[arguments.index(option) + 1]) for option in ("-c", "-o", "-MF"))
    place = next(source.parent.glob("py_ds_*.cpp"), None)
    if place is None:  # compiled as they are
        return subprocess.run(["c++", *arguments]).returncode
    code = compile_as_one(source, place, arguments)
    dependencies.write_text(f"{output}: {source}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
