"""The cells of the race: what benchmarks/vs_peers.py compares with what."""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

MODELS: dict[str, dict[str, int]] = {
    "5 M": dict(vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4),
    "50 M": dict(
        vocab_size=32000, hidden_size=512, intermediate_size=1408, num_hidden_layers=11, num_attention_heads=8
    ),
    "0.6 B": dict(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16
    ),
}
"""The last is for GPUs, with the sizes of Qwen3-0.6B."""
PEERS = {"trl": "TRL", "trainer": "Trainer", "accelerate": "accelerate loop"}
GOALS = {"trl": 2.0, "trainer": 1.5}
PRECISIONS = {"no": "fp32", "bf16": "bf16"}
SEED, LEARNING_RATE, MAX_LENGTH, RANK = 0, 1e-4, 512, 16
MICRO_BATCH_SIZES = {"cpu": 8, "cuda": 64}
ROW_LENGTH = {1: 768, 8: 512}
"""Tokens of a row under TRL's packing. One row has as many as eight samples, which is kind to it: on CPU it makes one
mask over all of a batch, and its own defaults are 8 rows of 1024."""


@dataclass(frozen=True)
class Cell:
    """One row of the table: what we are compared with, and how both train."""

    peer: str
    strategy: str = "single"
    model: str = "5 M"
    precision: str = "no"
    packing: bool = True
    """Ours."""
    packed_rows: int = 0
    """Theirs; 0: padded."""
    checkpointing: bool = False
    lora: bool = False
    objective: str = "sft"

    @property
    def processes(self) -> int:
        return 1 if self.strategy == "single" else 2

    def words(self) -> str:
        """Its name: what is not as in most cells."""
        rows = {0: "", 1: "1 packed row", 8: "8 packed rows"}[self.packed_rows]
        said = [
            *(["LoRA"] if self.lora else []),
            *(["DPO"] if self.objective == "dpo" else []),
            *(["checkpointed"] if self.checkpointing else []),
            *([] if self.packing else ["ours padded"]),
            *([f"theirs {rows}"] if rows else []),
        ]
        parts = [PEERS[self.peer], self.strategy, self.model, PRECISIONS[self.precision], ", ".join(said)]
        return " | ".join(parts)


def all_cells(device: str) -> list[Cell]:
    """In the order of the table; "cpu" or "cuda"."""
    trl, trainer, loop = PEERS
    chosen = []
    *small, large = MODELS
    if device == "cuda":
        cell = partial(Cell, model=large, precision="bf16")
        chosen = [cell(trl), cell(trl, packed_rows=8), cell(trainer), cell(loop), cell(trl, packing=False)]
        return [*chosen, cell(trl, checkpointing=True), cell(trl, lora=True)]
    for model in small:
        for precision in PRECISIONS:
            kind: dict[str, Any] = {"model": model, "precision": precision}
            chosen += [Cell(trl, **kind), Cell(trl, packed_rows=1, **kind), Cell(trainer, **kind)]
    chosen += [Cell(loop), Cell(loop, precision="bf16"), Cell(trl, packed_rows=8)]
    chosen += [Cell(peer, packing=False) for peer in (trl, trainer)]
    chosen += [Cell(peer, checkpointing=True) for peer in (trl, trainer)]
    chosen += [Cell(trl, precision=precision, lora=True) for precision in PRECISIONS]
    chosen += [Cell(trl, precision=precision, objective="dpo") for precision in PRECISIONS]
    return chosen + [Cell(peer, strategy) for strategy in ("ddp", "zero2", "zero3", "fsdp2") for peer in PEERS]


def cell_of(row: dict[str, Any]) -> Cell:
    """The cell of a row of the results, which has more keys."""
    return Cell(**{field.name: row[field.name] for field in fields(Cell)})
