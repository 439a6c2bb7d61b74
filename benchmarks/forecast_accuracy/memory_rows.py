"""The published runs of memory_published.csv: what of a row and its program a forecast needs to know.

Where a program differs from this project in what it documents or shows in its code (16-bit weights, whole logits, other
checkpointing), `PROGRAMS` has it for all its rows alike. `setup_of` gives for each row what it needs to be run, or why
it cannot be compared; nothing in it was fitted to a row.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

FACTS = Path(__file__).resolve().parent / "memory_published.csv"

Loss = Literal["whole, float32", "whole, bf16", "shifted copy", "in eight parts"]
Checkpointing = Literal["none", "full", "every second product"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """How a program trains, for all its rows."""

    weights: Literal["bf16", "fp32 shards"]
    """In bf16 weights, their gradients and both moments have 2 bytes each."""
    loss: Loss
    where: str
    """That it is so."""
    dropout: float = 0.0
    """Dropout of its adapters, by default."""
    keeps_inputs_of_4_bits: bool = False
    """bitsandbytes kept the input of every 4-bit layer for the backward, which never reads it, until it was found in
    July 2024 (bitsandbytes PR 1270)."""
    fp16_of_4_bits: bool = False
    """bitsandbytes 0.41 made of a 4-bit weight one of fp16, and of that one of bf16 (Params4bit.cuda)."""
    head_in_4_bits: bool = False
    whole_gradients: bool = False
    """Between micro-batches of a step, under FSDP1's no_sync: of whole units, what is frozen in them included (torch's
    _flat_param.py has one gradient for a flat parameter)."""
    keeps_logits: bool = False
    """The model's output is still a variable during the backward."""
    one_product_for_qkv: bool = False
    """Values are a view of the result, which stays whole as long as they do."""


PROGRAMS = {
    "torchtitan": Program(
        weights="fp32 shards",
        loss="whole, float32",
        where="parallelize.py: MixedPrecisionPolicy bf16/fp32; loss.py: cross_entropy(pred.float())",
    ),
    "torchtune": Program(
        weights="bf16",
        loss="whole, float32",
        where="recipes/configs: dtype bf16; its README names the change of each row",
    ),
    "litgpt": Program(
        weights="bf16",
        loss="whole, bf16",
        where="resource-tables.md: bf16-true; finetune/lora.py: dropout 0.05, quantize on every linear layer,"
        " no_backward_sync while it accumulates; model.py: one product for query, key and value; bitsandbytes 0.41.1",
        dropout=0.05,
        keeps_inputs_of_4_bits=True,
        fp16_of_4_bits=True,
        head_in_4_bits=True,
        whole_gradients=True,
        one_product_for_qkv=True,
    ),
    "PEFT": Program(
        weights="bf16",
        loss="whole, float32",
        where="method_comparison/MetaMathQA, run.py and default_training_params.json: dtype bfloat16, no autocast,"
        " transformers' own loss, `outputs` lives on",
        keeps_logits=True,
    ),
    "answer.ai": Program(
        weights="bf16",
        loss="shifted copy",
        where="fsdp_qlora/train.py: precision bf16, lora_rank 64, dropout 0.1, six of the seven linear layers of a"
        " layer, `output` lives on; transformers and bitsandbytes of March 2024",
        dropout=0.1,
        keeps_inputs_of_4_bits=True,
        keeps_logits=True,
    ),
    "prime-rl": Program(
        weights="fp32 shards",
        loss="whole, float32",
        where="benchmarks/scripts/run_single_benchmark.py: --model.compile, --model.ac, two micro-batches of one"
        " sample; trainer/sft/train.py: cross_entropy of whole float32 logits, which it deletes before the backward,"
        " and max_memory_reserved",
    ),
    "Liger": Program(
        weights="fp32 shards",
        loss="shifted copy",
        where="examples/huggingface/run_qwen.sh: --bf16 --fsdp full_shard, for which accelerate makes what is trained"
        " float32; transformers of August 2024",
    ),
}


HABITS = ("keeps_inputs_of_4_bits", "fp16_of_4_bits", "whole_gradients", "keeps_logits", "one_product_for_qkv")
"""Habits of a program that nobody would tell a planner. Each was found in its code, after a first forecast had
missed; so each row is forecast without them too."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A row, as something that can be run."""

    program: str
    model: str
    rows: int
    length: int
    loss: Loss
    checkpointing: Checkpointing = "none"
    adapter: tuple[int, tuple[str, ...]] | None = None
    """Rank, and the linear layers."""
    four_bits: float = 0.0
    """Bytes of a weight that is held in 4 bits, its scales included."""
    processes: int = 1
    shards: Literal["", "fsdp1", "fsdp2"] = ""
    shards_nothing: bool = False
    """FSDP1's NO_SHARD."""
    reshards: bool = True
    root_has_ends: bool = False
    """Embedding, last norm and head are one unit that stays gathered (torchtitan until its PR 1094, July 2025)."""
    is_compiled: bool = False
    """Each decoder layer, by torch.compile."""
    on_cpu: bool = False
    """Weights, gradients and moments lie in host memory."""
    first_step: bool = False
    """Measured before the optimizer had states."""
    accumulates: bool = False
    without_habits: bool = False
    split_of_rows: int = 1
    """Processes of a tensor- and sequence-parallel group: a lower bound gives each so large a part of all."""
    kind: Literal["allocated", "reserved", "weights"] = "allocated"
    gpu_gib: float = 0.0
    """Memory of the GPU; 0 if it is not stated."""


ATTENTION = ("q_proj", "v_proj")
TARGETS = {"phi-1.5": ATTENTION, "StableLM-Alpha-3B": ("query_key_value",)}
"""litgpt's adapters of query and value, in the names of transformers; gpt_neox has one matrix for all three."""
ANSWER_AI = ("k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj")


def program_of(setup: Setup) -> Program:
    """The program, as far as it is taken to be known."""
    program = PROGRAMS[setup.program]
    if not setup.without_habits:
        return program
    return replace(
        program,
        keeps_inputs_of_4_bits=False,
        fp16_of_4_bits=False,
        whole_gradients=False,
        keeps_logits=False,
        one_product_for_qkv=False,
    )


Row = dict[str, str]


def read_facts() -> list[Row]:
    """The published rows."""
    with FACTS.open(newline="") as file:
        return list(csv.DictReader(file))


def is_out_of_memory(row: Row) -> bool:
    """True if the run ran out of memory."""
    return row["reported_GiB_or_GB"] == "OOM"


def setup_of(row: Row) -> Setup | str:
    """How to run a row; or why it cannot be compared."""
    general = _unfit(row)
    if general:
        return general
    source, notes = row["source"], row["kernels_notes"]
    for beginning, read in READERS.items():
        if source.startswith(beginning):
            return read(row, notes)
    return "a program whose setup is not stated"


def _unfit(row: Row) -> str | None:
    if row["trust"] == "1":
        return "a formula or an estimate, not a measurement"
    if is_out_of_memory(row):
        return None
    # litgpt's FSDP rows lack one setting, and its code has it: Block is what its FSDPStrategy recomputes.
    if row["trust"] != "3" and "state sharding; litgpt" not in row["strategy"]:
        return "read from a chart, or which kind of memory or which settings is not said"
    if not row["seq_len"].isdigit() or not row["micro_batch"].isdigit():
        return "length or micro-batch is not stated"
    if "99th percentile" in row["what_is_measured"]:
        return "a percentile over batches whose lengths are not stated"
    return None


def _torchtitan(row: Row, notes: str) -> Setup | str:
    strategy, source = row["strategy"], row["source"]
    if any(word in notes for word in ("float8", "mxfp8", "NVFP4", "MXFP8")):
        return "trains in 8 or 4 bits, which this project does not"
    if any(word in strategy for word in ("SimpleFSDP", "graph_trainer")):
        return "an engine that this project does not have"
    if source.startswith("torchao"):
        return "the version of the program is not stated, and three results of one setup are 14 GiB apart"
    split = 1
    if "TP" in strategy or "CP" in strategy:
        if not is_out_of_memory(row):
            return "tensor or context parallel beside FSDP, which this project does not have"
        split = int(strategy.rpartition("TP")[2])
    stated = row["activation_checkpointing"]
    is_before_training = "after init" in row["what_is_measured"]
    if (
        not is_out_of_memory(row)
        and not is_before_training
        and (stated in ("", "see page") or "compile not stated" in notes)
    ):
        return "checkpointing or compilation is not stated"
    # Where it is not stated, a row that ran out of memory must do so under full checkpointing, the least that it needs.
    least: Checkpointing = "full" if is_out_of_memory(row) else "none"
    checkpointing: dict[str, Checkpointing] = {"none": "none", "full": "full", "": least}
    return Setup(
        program="torchtitan",
        model=row["model"],
        rows=int(row["micro_batch"]),
        length=int(row["seq_len"]),
        loss="in eight parts" if "; chunked" in notes else PROGRAMS["torchtitan"].loss,
        is_compiled="compile" in notes,
        checkpointing=checkpointing.get(stated, "every second product"),
        processes=int(row["world_size"]),
        shards="fsdp2",
        reshards="never" not in strategy,
        root_has_ends=not any(year in source for year in ("2025-08", "2025-09", "2025-11", "2026")),
        first_step="step 1" in notes and "step 10" not in notes,
        kind="weights" if is_before_training else "reserved",
        split_of_rows=split,
        gpu_gib=95.0 if "96GB" in notes or is_out_of_memory(row) else 0.0,
    )


def _torchtune(row: Row, notes: str) -> Setup | str:
    change = notes.rpartition("; ")[2]
    if "in backward" in row["optimizer"]:
        return "the optimizer runs inside the backward, which this project does not have"
    # Each row adds a change to those of the row before.
    ladder = ["+packed to 4096", "+compile", "+chunked CE", "+activation checkpointing"]
    return Setup(
        program="torchtune",
        model=row["model"],
        rows=int(row["micro_batch"]),
        length=int(row["seq_len"]),
        loss="in eight parts" if ladder.index(change) >= 2 else PROGRAMS["torchtune"].loss,
        is_compiled=ladder.index(change) >= 1,
        checkpointing="full" if row["activation_checkpointing"] == "full" else "none",
        gpu_gib=79.2,
    )


def _litgpt(row: Row, notes: str) -> Setup | str:
    if row["lora_rank"].startswith("adapter"):
        return "an adapter that this project does not have"
    is_full = not row["lora_rank"]
    rank = 32 if row["lora_rank"] == "see config" else int(row["lora_rank"] or 0)
    processes = int(row["world_size"])
    targets = TARGETS.get(row["model"], ATTENTION)
    return Setup(
        program="litgpt",
        model=row["model"],
        rows=int(row["micro_batch"]),
        length=int(row["seq_len"]),
        loss=PROGRAMS["litgpt"].loss,
        checkpointing="full" if processes > 1 else "none",
        adapter=None if is_full else (rank, targets),
        four_bits=_four_bits(row["quantization"]),
        processes=processes,
        shards="fsdp1" if processes > 1 else "",
        accumulates=True,
        gpu_gib=22.06 if "A10G" in notes else 39.4,
    )


def _peft(row: Row, notes: str) -> Setup | str:
    return Setup(
        program="PEFT",
        model=row["model"],
        rows=int(row["micro_batch"]),
        length=int(row["seq_len"]),
        loss=PROGRAMS["PEFT"].loss,
        kind="reserved",
        gpu_gib=44.4,
    )


def _answer_ai(row: Row, notes: str) -> Setup | str:
    return Setup(
        program="answer.ai",
        model=row["model"],
        rows=int(row["micro_batch"]),
        length=int(row["seq_len"]),
        loss=PROGRAMS["answer.ai"].loss,
        checkpointing="full",
        adapter=(64, ANSWER_AI),
        # Blocks of 64 with a scale of 8 bits, which bitsandbytes' layer has by default.
        four_bits=_four_bits("nf4-dq") if row["quantization"] else 0.0,
        processes=int(row["world_size"]),
        shards="fsdp1",
        shards_nothing=row["strategy"] == "DDP",  # so a footnote of its page
        on_cpu="CPU offload" in row["strategy"],
        kind="allocated" if "allocated" in row["what_is_measured"] else "reserved",
        gpu_gib=23.6,
    )


def _liger(row: Row, notes: str) -> Setup | str:
    return Setup(
        program="Liger",
        model=row["model"],
        rows=int(row["micro_batch"]),
        length=int(row["seq_len"]),
        loss=PROGRAMS["Liger"].loss,
        checkpointing="full",
        processes=int(row["world_size"]),
        shards="fsdp1",
        gpu_gib=79.2,
    )


def _prime(row: Row, notes: str) -> Setup | str:
    return Setup(
        program="prime-rl",
        model=row["model"],
        rows=int(row["micro_batch"]),
        length=int(row["seq_len"]),
        loss=PROGRAMS["prime-rl"].loss,
        is_compiled=True,
        checkpointing="full",
        processes=int(row["world_size"]),
        shards="fsdp2",
        accumulates=True,
        kind="reserved",
        gpu_gib={"H100": 79.2, "H200": 139.8, "B200": 178.4, "A6000": 0.0}[notes.partition(";")[0]],
    )


def _four_bits(name: str) -> float:
    """Bytes of a weight: half, and a scale for each 64, of 4 bytes or of 1 with one of 4 for each 256 of them (QLoRA,
    arXiv 2305.14314, section 3)."""
    return {"": 0.0, "nf4": 0.5 + 4 / 64, "nf4-dq": 0.5 + 1 / 64 + 4 / (64 * 256)}[name]


READERS: dict[str, Callable[[Row, str], Setup | str]] = {
    "torchtitan": _torchtitan,
    "torchao": _torchtitan,
    "PyTorch PR": _torchtitan,
    "torchtune README.md@bd2a0fc7 table 2": _torchtune,
    "litgpt": _litgpt,
    "PEFT method": _peft,
    "AnswerDotAI": _answer_ai,
    "Liger": _liger,
    "PrimeIntellect": _prime,
}
