"""Runs train.py until the model is in the engine's hands, with the bytes that this process's model has where.

Every process writes FOLDER/loading-<rank>.json. Usage: loading_bytes.py FOLDER [arguments of train.py]
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import train


def bytes_by_device(model: Any) -> dict[str, int]:
    """Bytes of a model's tensors, each storage once; of a DTensor, this process's part."""
    num_bytes: Counter[str] = Counter()
    seen: set[tuple[str, int]] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        place = storage.device.type, 0 if storage.device.type == "meta" else storage.data_ptr()
        if place not in seen or storage.device.type == "meta":
            seen.add(place)
            num_bytes[storage.device.type] += storage.nbytes()
    return dict(num_bytes)


def resident() -> int:
    """Bytes of memory that this process has written, without what it shares with a file (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def stop_after_prepare(folder: Path) -> None:
    from cookbook.training.engine import Engine
    from cookbook.training.models import language_model

    read, prepare = language_model.load_model, Engine.prepare
    record: dict[str, Any] = {}

    def load_model(*arguments: Any, **options: Any) -> Any:
        before = resident()
        model = read(*arguments, **options)
        record["read"] = bytes_by_device(model)
        record["resident"] = resident() - before
        return model

    def prepare_and_stop(engine: Engine, model: Any, optimizer: Any, **options: Any) -> None:
        prepare(engine, model, optimizer, **options)
        record["prepared"] = bytes_by_device(engine.transformer())
        (folder / f"loading-{engine.world.rank}.json").write_text(json.dumps(record))
        engine.close()
        sys.stdout.flush()
        os._exit(0)

    language_model.load_model, Engine.prepare = load_model, prepare_and_stop  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    stop_after_prepare(Path(sys.argv.pop(1)))
    sys.exit(train.main())
