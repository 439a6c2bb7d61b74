"""A Hugging Face folder as one GGUF file, by llama.cpp's own converter where a checkout of it is."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cookbook.system.files import RecipeError

CONVERTER = "convert_hf_to_gguf.py"
OUTTYPES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "as-is": "auto"}


def find_converter(folder: Path, target: Path) -> Path:
    """The converter on PATH.

    Args:
        folder, target: for the two lines that somebody without it is told.

    Raises:
        RecipeError: there is none, or something is in the target's place.
    """
    if target.exists() or target.is_symlink():
        raise RecipeError(f"--gguf {target}: exists; name another file")
    if not target.absolute().parent.is_dir():
        raise RecipeError(f"--gguf {target}: no such folder; make it first")
    if (converter := shutil.which(CONVERTER)) is None:
        raise RecipeError(
            f"--gguf: {CONVERTER} of llama.cpp is not on PATH; add a checkout of it, or write\n"
            f"  git clone --depth 1 https://github.com/ggml-org/llama.cpp\n"
            f"  python llama.cpp/{CONVERTER} {folder} --outfile {target}"
        )
    return Path(converter)


def write_gguf(converter: Path, folder: Path, target: Path, dtype: str) -> None:
    """Convert a folder. The file appears whole, or not at all.

    Args:
        dtype: a key of `OUTTYPES`.

    Raises:
        RuntimeError: the converter failed; with its last line. Or what it left is no GGUF file.
    """
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}.") as build:
        built = Path(build) / target.name
        command = [sys.executable, str(converter), str(folder), "--outfile", str(built), "--outtype", OUTTYPES[dtype]]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if done.returncode or not built.is_file():
            said = [line for line in done.stdout.splitlines() if line.strip()]
            raise RuntimeError(f"{converter} ended with {done.returncode}: {said[-1] if said else 'without a word'}")
        if not _has_tensors(built):
            raise RuntimeError(f"{converter} ended with 0, and left no GGUF file with tensors")
        try:
            target.touch(exist_ok=False)  # never over a file that has come meanwhile; many disks have no hard links
        except FileExistsError:
            raise RuntimeError(f"{target}: has come meanwhile, and was left as it is") from None
        built.replace(target)


def _has_tensors(path: Path) -> bool:
    """Return whether the header has GGUF's magic number and counts tensors (gguf 0.19, class GGUFReader)."""
    with path.open("rb") as file:
        head = file.read(16)  # the magic number, the version, the number of tensors
    return head[:4] == b"GGUF" and len(head) == 16 and int.from_bytes(head[8:], "little") > 0
