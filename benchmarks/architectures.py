"""Which architectures train, and how: a tiny random model of each through train.py, padded, packed, sharded, with LoRA.

    python benchmarks/architectures.py --others

Writes benchmarks/results/architectures.json and docs/architectures.md, in about 15 minutes on two cores. `--quick`
tries one architecture and writes nothing; `--types llama gpt_oss` tries these and keeps the other rows, `--others`
compares the rest of transformers' within one process, and `--page` writes the page again from the results.
"""

import argparse
import copy
import json
import platform
import re
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.records import differences  # noqa: E402
from cookbook.config.sections import AdapterSection  # noqa: E402
from cookbook.planning.language_part import has_tower  # noqa: E402
from cookbook.planning.meshes import (  # noqa: E402
    expert_problem,
    pipeline_problem,
    sequence_problem,
    tensor_problem,
)
from cookbook.planning.packing import packing_problem  # noqa: E402
from cookbook.system.files import RecipeError  # noqa: E402
from cookbook.training.adapters import quantization_options  # noqa: E402
from cookbook.training.checkpoint.write_model import saved_buffers  # noqa: E402
from cookbook.training.models.loss import add_loss  # noqa: E402
from cookbook.training.models.structure import not_served, random_parts  # noqa: E402
from tests.curves import Curve, Lab  # noqa: E402
from tests.target_grid import from_grid  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "architectures.json"
PAGE = ROOT / "docs" / "architectures.md"
COMMAND = "python benchmarks/architectures.py --others"
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes")
LIMIT = 2e-6
"""Largest error of a loss: SGD_LOSS of tests/test_equivalence.py."""
REFUSED = 2
"""The exit code of what no run takes."""
STEPS = 4
LARGEST = 30_000_000
"""Parameters of a model that is tiny."""
MAX_LENGTH = 96
"""Tokens of a sequence, as in the recipe of tests/curves.py."""

TYPES = (
    "apertus",
    "arcee",
    "bloom",
    "cohere2",
    "deepseek_v3",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma4_text",
    "glm4_moe",
    "gpt2",
    "gpt_oss",
    "granite",
    "lfm2",
    "llama",
    "llama4_text",
    "mamba2",
    "mistral",
    "mixtral",
    "nemotron_h",
    "olmo2",
    "olmoe",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "stablelm",
)
"""Tried in full; all others that transformers has are only compared within one process."""

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 128,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_num_experts": 4,
    "moe_k": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    # latent attention
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    # linear attention, state space
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_n_groups": 1,
    "state_size": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 16,
    "expand": 2,
    "block_size": 16,
    # further names of the sizes above
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "n_inner": 96,
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 4,
    "num_heads": 4,
    "num_layers": 2,
    "attention_heads": 4,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 512,
    "num_kv_shared_layers": 0,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "rotary_dim": 8,
}
"""Given to a configuration as far as it has them."""
CHANGES: dict[str, dict[str, Any]] = {
    "axk1": {"num_key_value_heads": 4, "head_dim": 8},
    "bamba": {"layer_types": ["linear_attention", "full_attention"]},
    "deepseek_v2": {"num_key_value_heads": 4, "head_dim": 8},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 8},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "gpt_oss": {"sliding_window": 32},
    "granite": {"logits_scaling": 8.0},  # as published models have it
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "youtu": {"num_key_value_heads": 4, "head_dim": 8},
}

LORA = {"adapter": "{name: lora, rank: 8}", "optim.learning_rate": "1.0"}
QLORA = {**LORA, "adapter": "{name: qlora, rank: 8}"}
COLUMNS: dict[str, tuple[str, dict[str, str]]] = {
    "plain": ("single", {}),
    "packed": ("single", {"data.packing": "true"}),
    "fsdp2": ("fsdp2", {}),
    "zero3": ("zero3", {}),
    "tp": ("tp", {}),
    "sp": ("ddp_sp", {}),
    "pp": ("pp", {}),
    "ep": ("fsdp2_ep", {}),
    "lora": ("single", LORA),
    "qlora": ("single", QLORA),
}
ADAPTERS = ("lora", "qlora")
COMMON = {"run.max_steps": str(STEPS), "schedule.warmup_steps": "0", "optim.learning_rate": "0.02"}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A small configuration that has all kinds of layers of this architecture."""
    written = AutoConfig.for_model(model_type).to_dict()
    sizes = {
        key: value
        for key, value in SIZES.items()
        if written.get(key) is not None or (key == "head_dim" and key in written)
    }
    if kinds := list(dict.fromkeys(written.get("layer_types") or ())):
        sizes["num_hidden_layers"] = max(2, len(kinds))
        sizes["layer_types"] = (kinds * 2)[: sizes["num_hidden_layers"]]
    config = AutoConfig.for_model(model_type, **{**sizes, **CHANGES.get(model_type, {})})
    for key in random_parts(config):
        setattr(config, key, 0.0)
    config.pad_token_id, config.eos_token_id, config.bos_token_id = 0, 2, 1
    return config


def has_no_row(config: PreTrainedConfig) -> str | None:
    """Why this type is not trained as it is, or None."""
    if has_tower(config):
        return "it has a tower; the language part is trained, whose type has a row of its own"
    return not_served(config)


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Random weights, large enough for attention to matter; on the CPU, float32."""
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(copy.deepcopy(config)).num_parameters()
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters; its sizes have other names")
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    for name in saved_buffers(model):
        buffer = model.get_buffer(name)
        buffer += 0.1 * torch.rand(buffer.shape, generator=generator)
    return model


def library_loss(lab: Lab, folder: Path, export: Path | None, quantized: bool) -> float:
    """transformers' mean loss on the held-out rows, of a model's folder and the export, or adapter, of a run."""
    is_adapter = export is not None and (export / "adapter_config.json").exists()
    source = folder if export is None or is_adapter else export
    options = quantization_options(AdapterSection(name="qlora"), "no") if quantized else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, **options
    )
    if is_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(export))
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # its repacked weights must have whole blocks in each row
    return lab.held_out_loss(model.eval(), AutoTokenizer.from_pretrained(folder, trust_remote_code=False))[0]


def distance(curve: Curve, reference: Curve) -> float:
    """The largest difference of two losses, of steps and evaluations."""
    ours, theirs = (one.losses + [loss for _, loss, _ in one.evaluations] for one in (curve, reference))
    assert len(ours) == len(theirs) == STEPS + 2
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def try_column(lab: Lab, folder: Path, column: str, plain: Curve | None) -> tuple[dict[str, Any], Curve | None]:
    """What became of one run, and its curve if it came to its end.

    Args:
        plain: the curve of one process, with which those of strategies are compared.
    """
    if problem := predicted(column, AutoConfig.from_pretrained(folder, trust_remote_code=False)):
        return {"refused": problem}, None
    strategy, settings = COLUMNS[column]
    settings = {**COMMON, "model": f"{{name_or_path: {folder}}}", **settings}
    result, output = lab.attempt(strategy, settings)
    # Experts are no linear layers: the note on all-linear has their names, with which they get adapters too.
    named = re.search(r"write adapter\.targets: (\[.*\])", output)
    if named:
        settings["adapter"] = settings["adapter"].replace("}", f", targets: {named[1]}}}")
        result, output = lab.attempt(strategy, settings)
    code = int((result / "exit_code").read_text())
    if code == REFUSED:
        return {"refused": reason_of(output, folder)}, None
    if code:
        return {"failed": output.strip().splitlines()[-1][-300:]}, None
    curve = Curve(result)
    (_, first, _), (_, last, _) = curve.evaluations
    quantized = column == "qlora"
    errors = [abs(library_loss(lab, folder, result / "export", quantized) - last)]
    if plain is None or column in ADAPTERS:
        errors.append(abs(library_loss(lab, folder, None, quantized) - first))
    else:
        errors.append(distance(curve, plain))
    return {"loss": max(errors), **({"targets": named[1]} if named else {})}, curve


def predicted(column: str, config: PreTrainedConfig) -> str | None:
    """What a configuration alone is refused for, as at the start of a run."""
    return {
        "tp": lambda: tensor_problem(config),
        "packed": lambda: packing_problem(config),
        "sp": lambda: sequence_problem(config, 2),
        "pp": lambda: pipeline_problem(config, 2),
        "ep": lambda: expert_problem(config, 2),
    }.get(column, lambda: None)()


def reason_of(output: str, folder: Path) -> str:
    """The mistake that a refused run reports, without the names of this run."""
    line = output.strip().splitlines()[-1]
    for name in (repr(str(folder)), f"model {folder}", str(folder)):
        line = line.replace(name, "the model")
    return line.strip(" -").removeprefix("the model: ")


def try_type(lab: Lab, model_type: str, columns: tuple[str, ...] = tuple(COLUMNS)) -> dict[str, Any]:
    """A row of the record: what became of each column."""
    config = tiny_config(model_type)
    if problem := has_no_row(config):
        return {"refused": problem}
    folder = lab.folder / "models" / model_type
    if not folder.exists():
        shutil.copytree(tokenizer_folder(lab), folder)
        tiny_model(config).save_pretrained(folder)
    plain_row, plain = try_column(lab, folder, "plain", None)
    if plain is None:
        return plain_row
    rest = {column: try_column(lab, folder, column, plain)[0] for column in columns if column != "plain"}
    return {"plain": plain_row, **rest}


def tokenizer_folder(lab: Lab) -> Path:
    """The files of a tokenizer and template that fit the rows of `lab`."""
    folder = lab.folder / "tokenizer"
    if not folder.exists():
        AutoTokenizer.from_pretrained(lab.run("single").folder / "export", trust_remote_code=False).save_pretrained(
            folder
        )
    return folder


HEADINGS = ("one process", "packed", "`fsdp2`", "`zero3`", "`tp`", "`ddp_sp`", "`pp`", "`fsdp2_ep`", "LoRA", "QLoRA")
WITHIN_PROCESS = 1e-4
"""Largest error of a token's loss, of models with large random weights."""
PAGE_TEXT = """\
# Architectures

What each architecture was seen to do, and what is refused. Written by `{command}` from its record,
`benchmarks/results/architectures.json`; a test compares them.

Each model type is a tiny random model with all its kinds of layers, trained by `train.py` for a few steps with SGD on
padded rows of uneven length, without dropout. A number is the largest error of a loss, in natural units; the limit is
{limit}. The held-out losses of one process, before training and of the exported model, are compared with transformers'
own loss, one sample at a time; so are those of LoRA and QLoRA. Packed rows and strategies are compared with the curve
of one process, step by step, and their exports with transformers. `fsdp2_ep` ran as four processes, all other
strategies as two. Dropout, where a configuration has it, depends on the number of processes, which a run notes at its
start.

{table}

`*`: with `adapter.targets` as the refusal of `all-linear` names them: experts are one tensor each and get no adapter,
and QLoRA leaves them in full precision.

`no`: the run is refused at its start, with exit code 2, for the reason of this number:

{reasons}

Windows: a model type with sliding attention is packed only if its window holds `data.max_length`; the numbers above are
of such windows.

## Refused

| why | model types |
|---|---|
{refused}

Of a model of images and text [the language part is trained](recipes.md#a-model-with-an-image-or-audio-tower), if it can
be: the row of `gemma3_text` is then that of `gemma3`.

## All others

The loss of padded rows of these was compared with each sample alone, within one process and without training; it agreed
within {within}: {alike}.

Not compared, since the sizes of the tiny model do not suit them: {untried}.

{versions}; {machine}.
"""

LENGTHS = [7, 1, 12, 3, 9, 40]


@torch.no_grad()
def compare_within_process(model_type: str) -> dict[str, Any]:
    """Our loss of padded rows against each sample alone through transformers' own model, without dropout."""
    try:
        config = tiny_config(model_type)
        if problem := has_no_row(config):
            return {"refused": problem}
        model = tiny_model(config).eval()
        generator = torch.Generator().manual_seed(1)
        samples = [torch.randint(3, 512, (length + 1,), generator=generator) for length in LENGTHS]
        alone = [
            F.cross_entropy(model(input_ids=s[None, :-1]).logits[0].float(), s[1:], reduction="none") for s in samples
        ]
    except Exception as error:
        return {"not built": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
    ids, targets = (
        torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64),
        torch.full((len(LENGTHS), max(LENGTHS)), -100),
    )
    for row, sample in enumerate(samples):
        ids[row, : len(sample) - 1], targets[row, : len(sample) - 1] = sample[:-1], sample[1:]
    try:
        add_loss(model)
    except RecipeError as error:
        return {"refused": str(error)}
    return {"loss": float((model(input_ids=ids, **from_grid(targets)) - torch.cat(alone)).abs().max())}


def page(record: dict[str, Any]) -> str:
    """docs/architectures.md, from the record."""
    rows, reasons = record["rows"], dict[str, int]()
    lines = []
    for name, row in rows.items():
        if "plain" in row:
            lines.append(f"| `{name}` | {' | '.join(cell(name, row[column], reasons) for column in COLUMNS)} |")
    whole = {name: row["refused"] for name, row in rows.items() if "refused" in row}
    others = record["others"]
    alike = [f"`{name}`" for name, found in others.items() if found.get("loss", 1) <= WITHIN_PROCESS]
    whole |= {name: found["refused"] for name, found in others.items() if "refused" in found}
    by_reason: dict[str, list[str]] = {}
    for name, reason in whole.items():
        by_reason.setdefault(without_name(name, reason), []).append(f"`{name}`")
    untried = [f"`{name}`" for name, found in others.items() if "not built" in found]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return PAGE_TEXT.format(
        command=record["command"],
        machine=record["machine"],
        versions=versions,
        limit=f"{LIMIT:.0e}",
        table="\n".join([f"| model type | {' | '.join(HEADINGS)} |", "|---" * (1 + len(COLUMNS)) + "|", *lines]),
        reasons="\n".join(f"{number}. {reason}" for reason, number in reasons.items()),
        refused="\n".join(f"| {reason} | {', '.join(names)} |" for reason, names in sorted(by_reason.items())),
        within=f"{WITHIN_PROCESS:.0e}",
        alike=", ".join(alike),
        untried=", ".join(untried),
    )


def without_name(model_type: str, reason: str) -> str:
    """A reason that several architectures share."""
    reason = re.sub(rf"\b{re.escape(model_type)}\b", "it", reason)
    reason = re.sub(r"\w+ForCausalLM\b", "it", reason)
    return re.sub(r"leaves \d+ of it whole: [^;]+", "leaves some of its matrices whole", reason)


def cell(model_type: str, found: dict[str, Any], reasons: dict[str, int]) -> str:
    """One cell: how far the losses lie apart, or the number of a reason."""
    if "loss" in found:
        distant = found["loss"] > LIMIT
        return f"{'differs: ' if distant else ''}{found['loss']:.0e}{' *' if 'targets' in found else ''}"
    reason = without_name(model_type, found.get("refused") or f"fails: {found['failed']}")
    return f"no ({reasons.setdefault(reason, len(reasons) + 1)})"


def write(record: dict[str, Any]) -> None:
    """Write record and page; what is refused for its configuration is as the code has it now."""
    for name, row in record["rows"].items():
        config = tiny_config(name)
        if problem := has_no_row(config):
            row.clear()
            row["refused"] = problem
        elif "plain" in row:
            row |= {column: {"refused": why} for column in COLUMNS if (why := predicted(column, config))}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(record), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one architecture, in three ways; writes nothing")
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    parser.add_argument("--types", nargs="*", default=list(TYPES), help="tried in full; the other rows stay")
    parser.add_argument("--others", action="store_true", help="compare all others within one process")
    parser.add_argument("--folder", type=Path, help="where the runs go, and are found again")
    arguments = parser.parse_args()
    record = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}, "others": {}}
    if arguments.page:
        write(record)
        return
    with tempfile.TemporaryDirectory() as made:
        lab = Lab(arguments.folder or Path(made))
        if arguments.quick:
            print(json.dumps(try_type(lab, "qwen3_moe", ("plain", "packed", "lora"))))
            lab.close()
            return
        now = {
            "machine": f"{platform.machine()}, CPU only",
            "versions": {name: version(name) for name in PACKAGES},
        }
        is_whole = arguments.others and record["rows"].keys() <= set(arguments.types)
        another = [] if is_whole else differences(record, now, now)
        if another:
            print(f"Some rows cannot join the record, and are printed only: {'; '.join(another)}", flush=True)
        record = {"command": COMMAND, **now, "rows": record["rows"], "others": record["others"]}
        for name in arguments.types:
            record["rows"] = dict(sorted({**record["rows"], name: try_type(lab, name)}.items()))
            print(name, json.dumps(record["rows"][name]), flush=True)
            if not another:
                write(record)
        lab.close()
    if arguments.others:
        names = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(record["rows"]))
        record["others"] = {name: compare_within_process(name) for name in names}
        if another:
            print(json.dumps(record["others"]))
        else:
            write(record)


if __name__ == "__main__":
    main()
