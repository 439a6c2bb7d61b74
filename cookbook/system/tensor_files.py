"""The header of a safetensors file: https://huggingface.co/docs/safetensors, "Format". No torch, no numpy."""

import json
import math
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_WEIGHTS = re.compile(r"pytorch_model.*\.bin|.*\.gguf")
"""Files of weights that transformers reads, and this project does not."""
MAX_HEADER = 100_000_000
"""Bytes, as in the library (safetensors/src/tensor.rs, MAX_HEADER_SIZE)."""
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Bits of an element of each dtype."""


class BadHeader(ValueError):
    """Why a file is no whole safetensors file, for the middle of a sentence that begins with its name."""


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """`dtype`, `shape` and `data_offsets` of each tensor, and the byte of the file at which its data begins. They fill
    the data without a gap or overlap, as the library wants it.

    Raises:
        OSError: it cannot be read.
        BadHeader: it is no file, or its header is not that of a whole file.
    """
    if (why := why_no_file(path)) is not None:
        raise BadHeader(why)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise BadHeader("does not begin as safetensors do (cut off, or another file)")
        text = file.read(length)
    try:
        header = json.loads(text.decode(), object_pairs_hook=_each_once)
        metadata = header.get("__metadata__", {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise BadHeader("has metadata in its header that is not text")
        tensors = {key: entry for key, entry in header.items() if key != "__metadata__"}
        spans = sorted((*_span(key, entry), key) for key, entry in tensors.items())
    except BadHeader:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadHeader("does not begin as safetensors do (cut off, or another file)") from None
    end = 0
    for begin, after, key in spans:
        if begin != end:
            raise BadHeader(f"has {key} at byte {begin:,} of its data, and the tensor before it ends at {end:,}")
        end = after
    if size != 8 + length + end:
        raise BadHeader(f"has {size:,} bytes, and by its header {8 + length + end:,}")
    return tensors, 8 + length


def weight_files(folder: Path) -> tuple[list[Path], str | None]:
    """The files of a model's folder from which transformers reads its weights, or why there are none. A file elsewhere
    that an index names is none of the folder's.
    """
    if os.path.lexists(folder / WEIGHTS):
        return [folder / WEIGHTS], None
    if not os.path.lexists(folder / INDEX):
        return [], f"it has no weights in safetensors; {_way_to_weights(folder)}"
    names, why = _names_in_index(folder / INDEX)
    return [folder / name for name in names], why and f"it has no weights in safetensors: {INDEX} {why}"


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights, or a part or an index of them, in any format that transformers reads."""
    ends = (".safetensors", INDEX)
    return any(name.endswith(ends) or OTHER_WEIGHTS.fullmatch(name) for name in os.listdir(folder))


def _way_to_weights(folder: Path) -> str:
    """Advise what to do where there is neither `WEIGHTS` nor `INDEX`."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    parts = [name for name in names if name.endswith(".safetensors")]
    if shards := [name for name in parts if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)]:
        return f"it has {_first_of(shards)}, but no {INDEX}, which names them: fetch that too"
    if parts:
        return f"it has {_first_of(parts)}, but no {WEIGHTS}, which is the name that is read: fetch that"
    if others := [name for name in names if OTHER_WEIGHTS.fullmatch(name)]:
        gguf = ", gguf_file=NAME" * others[0].endswith(".gguf")
        way = f"AutoModelForCausalLM.from_pretrained(OLD{gguf}).save_pretrained(NEW) writes it so"
        return f"it has {_first_of(others)}, and no other format is read: {way}"
    inside = sorted(path.parent.name for name in (WEIGHTS, INDEX) for path in folder.glob(f"*/{name}"))
    return f"its folder {inside[0]} has some: name that" if inside else f"fetch {WEIGHTS} of the model"


def _first_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _names_in_index(path: Path) -> tuple[list[str], str | None]:
    try:
        if (why := why_no_file(path)) is not None:
            return [], why
        index = json.loads(path.read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
        odd = [name for name in names if not re.fullmatch(r"[\w.-]+\.safetensors", name)]
    except OSError as error:
        return [], f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [], "has no weight_map from the name of each tensor to its file"
    if odd or not names:
        return [], f"names {odd[0]!r}, which is no safetensors file of this folder" if odd else "names no file"
    if not isinstance(index.get("metadata"), dict):  # transformers 5.23, utils/hub.py, get_checkpoint_shard_files
        return [], 'has no metadata, without which transformers does not read it; write "metadata": {} into it'
    return names, None


def why_no_file(path: Path) -> str | None:
    """Why what lies there cannot be read as a file, for a sentence that begins with its name: to open a pipe waits
    without end.

    Raises:
        OSError: nothing is there, or a link that leads nowhere.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return None
    return "is a folder" if stat.S_ISDIR(mode) else "is no file (a pipe or a device)"


def _each_once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise BadHeader(f"has {key} twice in its header")
        values[key] = value
    return values


def _span(key: str, entry: dict[str, Any]) -> tuple[int, int]:
    """First byte of a tensor's data, and the one after its last."""
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (_are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
        raise BadHeader(f"has no shape and place for {key} in its header")
    if dtype not in BITS:
        raise BadHeader(f"has {key} in a dtype that is not known ({dtype!r:.40})")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * BITS[dtype]:
        raise BadHeader(f"has {end - begin:,} bytes for {key}, whose shape and dtype need another number")
    return begin, end


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)
