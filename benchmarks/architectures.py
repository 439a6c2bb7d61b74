"""Which architectures train, and how: a tiny random model of every causal type of the installed transformers through
train.py, under each kind of strategy, packed, with adapters, exported and forecast.

    python benchmarks/architectures.py

Writes benchmarks/results/architectures.json, the facts of cookbook/facts/model_types.json and both as
docs/architectures.md, each type as soon as it is done. `--types llama gpt_oss` tries these and keeps the other rows,
`--columns packed lora` only these ways to train. A whole row of another machine or other versions joins the record with
both, and a cell does not; `--missing` tries types without a row, `--page` writes the page again
from the results. `--quick` tries one architecture and writes nothing.

A way to train that the table refuses because nobody knows is tried, with the curve of one process as the judge. One
that it refuses for a reason is not: take the text out of the line to have it tried again.
"""

import argparse
import contextlib
import functools
import io
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # runs share the cores; before torch is imported

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import compiled_layers, model_facts  # noqa: E402
from benchmarks.architectures_page import LIMIT, PAGE, RESULTS, WAYS, faults, is_served, is_wrong, page  # noqa: E402
from benchmarks.records import differences, dump, processor  # noqa: E402
from benchmarks.tiny_models import default_config, tiny_config, tiny_model  # noqa: E402
from cookbook.commands.cli import main as cookbook  # noqa: E402
from cookbook.commands.rehearse.recompute import round_experts  # noqa: E402
from cookbook.config.sections import AdapterSection  # noqa: E402
from cookbook.facts.language_part import has_tower, language_config  # noqa: E402
from cookbook.facts.meshes import (  # noqa: E402
    expert_problem,
    pipeline_problem,
    sequence_problem,
    tensor_problem,
)
from cookbook.facts.model_types import COMMAND, TABLE, TYPES, ModelType, look_up  # noqa: E402
from cookbook.facts.packing import packing_problem  # noqa: E402
from cookbook.system.files import RecipeError  # noqa: E402
from cookbook.training.adapters.insertion import quantization_options  # noqa: E402
from cookbook.training.models.structure import not_served  # noqa: E402
from tests.curves import Curve, Lab  # noqa: E402

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes")
REFUSED = 2
"""The exit code of what no run takes."""
STEPS = 4
LIMIT_SECONDS = 120
"""For one run, of a few seconds."""
CAUSAL = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
TOWERS = sorted(name for name, facts in TYPES.items() if facts.language_part is not None and name not in CAUSAL)

LORA = {"adapter": "{name: lora, rank: 8}", "optim.learning_rate": "1.0"}
QLORA = {**LORA, "adapter": "{name: qlora, rank: 8}"}
COLUMNS: dict[str, tuple[str, dict[str, str]]] = {
    "plain": ("single", {}),
    "ddp": ("ddp", {}),
    "fsdp2": ("fsdp2", {}),
    "zero3": ("zero3", {}),
    "packed": ("single", {"data.packing": "true"}),
    "tp": ("tp", {}),
    "sp": ("ddp_sp", {}),
    "pp": ("pp", {}),
    "ep": ("fsdp2_ep", {}),
    "lora": ("single", LORA),
    "qlora": ("single", QLORA),
}
TRAIN = ("train.py",)
NAMES = sorted({*CAUSAL, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})
"""Model types that can be measured."""
ALL = (*COLUMNS, "compiled", "plan")
ADAPTERS = ("lora", "qlora")
COMMON = {"run.max_steps": str(STEPS), "schedule.warmup_steps": "0", "optim.learning_rate": "0.02"}


class Failed(Exception):
    """A run that came neither to its end nor to a refusal: its last line."""


class Refused(Exception):
    """A run that is refused: its reason."""


def library_loss(lab: Lab, folder: Path, export: Path | None, quantized: bool) -> float:
    """transformers' mean loss on the held-out rows, of a model's folder and the export, or adapter, of a run."""
    is_adapter = export is not None and (export / "adapter_config.json").exists()
    source = folder if export is None or is_adapter else export
    options = quantization_options(AdapterSection(name="qlora"), "no") if quantized else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, dtype="float32", trust_remote_code=False, use_safetensors=True, **options
    )
    if quantized:
        round_experts(model)
    if is_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(export))
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # its repacked weights must have whole blocks in each row
    return lab.held_out_loss(model.eval(), AutoTokenizer.from_pretrained(folder, trust_remote_code=False))[0]


def distance(curve: Curve, reference: Curve) -> float:
    """The largest difference of two losses, of steps and evaluations."""
    ours, theirs = (run.losses + [loss for _, loss, _ in run.evaluations] for run in (curve, reference))
    assert len(ours) == len(theirs) == STEPS + 2
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def train(lab: Lab, folder: Path, column: str, program: tuple[str, ...] = TRAIN) -> tuple[Curve, str | None]:
    """The run of a column, and the targets of its adapter where its refusal had to name them.

    Raises:
        Refused, Failed: it has no end.
    """
    strategy, settings = COLUMNS[column]
    settings = {**COMMON, "model": f"{{name_or_path: {folder}}}", **settings}
    result = folder.parent / f"{folder.name}-{column}"
    code, output = start(lab, strategy, settings, result, program)
    # Experts are no linear layers: the note on all-linear has their names, with which they get adapters too.
    named = re.search(r"write adapter\.targets: (\[.*\])", output)
    if named:
        settings["adapter"] = settings["adapter"].replace("}", f", targets: {named[1]}}}")
        code, output = start(lab, strategy, settings, result, program)
    if code == REFUSED:
        raise Refused(reason_of(output, folder))
    if code:
        raise Failed(" ".join(output.split())[-400:])
    return Curve(result), named[1] if named else None


def start(
    lab: Lab, strategy: str, settings: dict[str, str], result: Path, program: tuple[str, ...] = TRAIN
) -> tuple[int, str]:
    """One run into a new folder: its exit code, and what it printed."""
    shutil.rmtree(result, ignore_errors=True)
    asked = {**settings, "run.output_dir": str(result)}
    done = lab.start(strategy, asked, program=program, limit=LIMIT_SECONDS)
    return done.returncode, done.stdout


def reason_of(output: str, folder: Path) -> str:
    """The mistake that a refused run reports, without the names of this run."""
    *_, line = (text for text in output.splitlines() if ": " in text and not text.startswith("[transformers]"))
    for name in (repr(str(folder)), f"model {folder}", str(folder)):
        line = line.replace(name, "the model")
    return line.strip(" -").removeprefix("the model: ")


def predicted(column: str, config: PreTrainedConfig) -> str | None:
    """Reason to refuse a configuration alone, as at the start of a run."""
    return {
        "tp": lambda: tensor_problem(config),
        "packed": lambda: packing_problem(config),
        "sp": lambda: sequence_problem(config, 2),
        "pp": lambda: pipeline_problem(config, 2),
        "ep": lambda: expert_problem(config, 2),
    }.get(column, lambda: None)()


def try_column(
    lab: Lab, folder: Path, column: str, plain: Curve | None, program: tuple[str, ...]
) -> tuple[dict[str, Any], float, Curve | None]:
    """Outcome of one run; how far its export lies from its last evaluation; and its curve, if it has one.

    Args:
        plain: the curve of one process, with which those of strategies are compared.
    """
    try:
        if problem := predicted(column, AutoConfig.from_pretrained(folder, trust_remote_code=False)):
            return {"refused": problem}, 0.0, None
        curve, targets = train(lab, folder, column, program)
        (_, first, _), (_, last, _) = curve.evaluations
        quantized = column == "qlora"
        export = abs(library_loss(lab, folder, curve.folder / "export", quantized) - last)
        if plain is not None and column not in ADAPTERS:
            error = distance(curve, plain)
        else:
            error = abs(library_loss(lab, folder, None, quantized) - first)
    except Refused as why:
        return {"refused": str(why)}, 0.0, None
    except Failed as why:
        return {"failed": str(why)}, 0.0, None
    except Exception as why:
        return {"failed": f"{type(why).__name__}: {why}"[:400]}, 0.0, None
    return {"loss": error, **({"targets": targets} if targets else {})}, export, curve


def compiled(folder: Path) -> dict[str, Any]:
    """How far compiled layers lie from others, recomputed ones if they can be, and why parts are not compiled."""
    limits: dict[str, Any] = {}
    try:
        try:
            change = compiled_layers.compare(folder, recomputed=True)
        except RecipeError as why:
            change, limits = compiled_layers.compare(folder), {"kept": str(why)}
        if not limits and change["reasons"]:
            limits["kept"] = f"recomputed, its layers run uncompiled: {'; '.join(change['reasons'])}"
            change = compiled_layers.compare(folder)
    except RecipeError as why:
        return {"refused": str(why)}
    except Exception as why:
        return {"failed": f"{type(why).__name__}: {why}"[:400]}
    if change["reasons"]:
        limits["uncompiled"] = change["reasons"]
    return {"loss": change["loss"], "gradient": change["gradient"], **limits}


def plan(lab: Lab, folder: Path) -> dict[str, Any]:
    """Answer of `cookbook plan` on a model's folder."""
    words = ["plan", str(lab.folder / "recipe.yaml"), "--gpus", "2xH100", "--strategy", "fsdp2", "--json"]
    words += ["--set", f"model={{name_or_path: {folder}}}", "--set", "mixed_precision=bf16"]
    said, mistakes = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(mistakes):
            code = cookbook(words)
        if code == REFUSED:
            errors = [error["text"] for error in json.loads(said.getvalue())["errors"]]
            return {"refused": reason_of("\n".join(errors), folder)}
        (forecast,) = (option for option in json.loads(said.getvalue())["forecasts"] if "fsdp2" in option["strategy"])
        if forecast["verdict"] == "cannot run":
            return {"refused": "; ".join(forecast["why"])}
        if forecast["verdict"] == "no forecast":
            return {"failed": "; ".join(forecast["why"])}
        return {"forecast": "yes"}
    except Exception as why:
        return {"failed": f"{type(why).__name__}: {why}"[:400]}


def without_run(model_type: str) -> dict[str, str] | None:
    """The row of a type that is not trained as it is: its language part's type, or why not."""
    config = default_config(model_type)
    if has_tower(config):
        return {"part": language_config(config).model_type}
    problem = not_served(config)
    return {"refused": problem} if problem else None


def try_type(
    lab: Lab, model_type: str, columns: tuple[str, ...] = ALL, program: tuple[str, ...] = TRAIN
) -> dict[str, Any]:
    """A row of the record: what became of each column; that of one process is always there."""
    if not_run := without_run(model_type):
        return not_run
    folder = lab.folder / "models" / model_type
    try:
        make_model(lab, model_type, folder)
    except Exception as why:
        return {"failed": f"no tiny model: {type(why).__name__}: {why}"[:400]}
    row, exports = dict[str, Any](), list[float]()
    cell, export, plain = try_column(lab, folder, "plain", None, program)
    if plain is None:
        return cell
    row["plain"], exports = cell, [export]
    for column in columns:
        if column in COLUMNS and column != "plain":
            row[column], export, _ = try_column(lab, folder, column, plain, program)
            if column in WAYS and export > LIMIT >= row[column]["loss"]:
                row[column] = {"exports": export}
            exports += [] if is_wrong(row[column]) else [export]
    row["export"] = {"loss": max(exports)}
    if "compiled" in columns:
        row["compiled"] = compiled(folder)
    if "plan" in columns:
        row["plan"] = plan(lab, folder)
    for path in folder.parent.glob(f"{model_type}-*"):
        shutil.rmtree(path)
    return row


def measure(lab: Lab, model_type: str, columns: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A type's row of the record, which is empty if it is no causal type, and its line of the table."""
    old, now = model_facts.read_lines().get(model_type, {}), version("transformers")
    if has_part(default_config(model_type)):
        line = model_facts.line_of(old, model_facts.of_tower(model_type), now)
        with model_facts.assumed(model_type, **line):
            return (without_run(model_type) or {}) if model_type in CAUSAL else {}, line
    if not_run := without_run(model_type):
        return not_run, model_facts.line_of(old, {}, now)
    try:
        facts = model_facts.of_causal(model_type)
    except Exception as why:
        return {"failed": f"no tiny model: {type(why).__name__}: {why}"[:400]}, old
    tried = [way for way in WAYS if way in columns and getattr(look_up(model_type), way) is None]
    draft = model_facts.line_of(old, facts | dict.fromkeys(tried, True), now)
    with model_facts.assumed(model_type, **draft):
        row = try_type(lab, model_type, columns, ("benchmarks/with_facts.py", model_type, json.dumps(draft)))
    for way in tried:
        facts[way] = fact_of(row.get(way, {}), way)
        if isinstance(facts[way], str):
            print(f"{model_type}, {way}: {row[way]}", flush=True)
            row[way] = {"refused": facts[way]}
    return row, model_facts.line_of(old, facts, now)


def has_part(config: PreTrainedConfig) -> bool:
    """True if a configuration is of more than a language model, and has one of its own for that."""
    try:
        return not config.is_encoder_decoder and config.get_text_config() is not config
    except ValueError:  # there are several
        return False


def fact_of(cell: dict[str, Any], way: str) -> bool | str | None:
    """Verdict of a run that was tried on a type: true, why not, or nothing where it was refused for another reason."""
    how = "in packed rows" if way == "packed" else f"under {COLUMNS[way][0]}"
    if "failed" in cell:
        return f"a run {how} ends with an error"
    if "exports" in cell:
        return f"what a run {how} exports has a loss {cell['exports']:.0e} from that of its last evaluation"
    if "loss" not in cell:
        return None
    return cell["loss"] <= LIMIT or f"its losses {how} lay {cell['loss']:.0e} from those of one process"


def make_model(lab: Lab, model_type: str, folder: Path) -> None:
    """A model's folder with weights and tokenizer, unless it is there."""
    if not folder.exists():
        model = tiny_model(tiny_config(model_type))
        shutil.copytree(tokenizer_folder(lab), folder)
        model.save_pretrained(folder)


def tokenizer_folder(lab: Lab) -> Path:
    """The files of a tokenizer and template that fit the rows of `lab`."""
    folder = lab.folder / "tokenizer"
    if not folder.exists():
        AutoTokenizer.from_pretrained(lab.run("single").folder / "export", trust_remote_code=False).save_pretrained(
            folder
        )
    return folder


@functools.cache
def own_lab(folder: Path) -> Lab:
    """This process's, whose warm parent ends with it."""
    return Lab(folder / str(os.getpid()))


def measure_in(folder: Path, model_type: str, columns: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`measure` in a process that measures several."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return measure(own_lab(folder), model_type, columns)


def measure_all(
    folder: Path, types: list[str], columns: tuple[str, ...], workers: int
) -> Iterator[tuple[str, tuple[dict[str, Any], dict[str, Any]]]]:
    """Rows and lines, each as soon as it is there."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        asked = {pool.submit(measure_in, folder, name, columns): name for name in types}
        for done in as_completed(asked):
            yield asked[done], done.result()


def write(record: dict[str, Any], lines: dict[str, Any]) -> None:
    """Write record, table and page; what is refused for its configuration is as the code has it now."""
    TYPES.update({name: ModelType(**line) for name, line in lines.items()})
    for name, row in record["rows"].items():
        if look_up(name).transformers != version("transformers"):  # which may lack the type
            continue
        if not_run := without_run(name):
            row.clear()
            row |= not_run
        elif "plain" in row:
            config = tiny_config(name)
            row |= {column: {"refused": why} for column in COLUMNS if (why := predicted(column, config))}
    texts = {RESULTS: dump(record), PAGE: page(record).rstrip(), TABLE: model_facts.table(lines)}
    for path, text in texts.items():
        if path.read_text(encoding="utf-8") != f"{text}\n":  # runs read the table
            path.write_text(f"{text}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one architecture, in three ways; writes nothing")
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    parser.add_argument(
        "--types", nargs="*", default=[*CAUSAL, *TOWERS], choices=NAMES, metavar="TYPE", help="the other rows stay"
    )
    parser.add_argument("--columns", nargs="*", default=ALL, choices=ALL, metavar="COLUMN", help="the other cells stay")
    parser.add_argument("--missing", action="store_true", help="only types without a row of these versions")
    parser.add_argument("--workers", type=int, default=2, help="types that are tried at once")
    arguments = parser.parse_args()
    now = {"machine": machine(), "versions": {name: version(name) for name in PACKAGES}}
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    if arguments.page:
        write(record, model_facts.read_lines())
        return
    with tempfile.TemporaryDirectory() as made:
        if arguments.quick:
            lab = Lab(Path(made))
            print(json.dumps(try_type(lab, "qwen3_moe", ("packed", "lora", "plan"))))
            lab.close()
            return
        columns = tuple(arguments.columns)
        is_whole = arguments.types == [*CAUSAL, *TOWERS] and columns == ALL and not arguments.missing
        if is_whole:
            record = {"command": COMMAND, **now, "rows": {}}
        types = [name for name in arguments.types if not (arguments.missing and name in {**record["rows"], **TYPES})]
        for name, (row, line) in measure_all(Path(made), types, columns, arguments.workers):
            print(name, json.dumps(row), json.dumps(line), flush=True)
            if another := differences(record.get("apart", {}).get(name, record), now, now) if columns != ALL else []:
                print(f"{name}: its cells cannot join its row, and are printed only: {'; '.join(another)}", flush=True)
            elif row:
                add_row(record, name, row, now)
            if wrong := faults(row):
                print(f"{name} gets no line: {'; '.join(wrong)}", flush=True)
            write(record, model_facts.read_lines() | ({} if wrong else {name: line}))


def add_row(record: dict[str, Any], name: str, row: dict[str, Any], now: dict[str, Any]) -> None:
    """Put a row into the record, with its machine and versions if they are not those of the record.

    Args:
        row: a whole one, or cells for one of the same machine and versions.
    """
    row = joined(record["rows"].get(name, {}), row)
    record["rows"] = dict(sorted({**record["rows"], name: row}.items()))
    apart = record.pop("apart", {}) | {name: now}
    apart = {other: own for other, own in sorted(apart.items()) if differences(record, own, now)}
    record |= {"apart": apart} if apart else {}


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A row in which new cells take the place of old ones."""
    if not (is_served(old) and is_served(new)):
        return new
    exports = {"loss": max(row["export"]["loss"] for row in (old, new))} if new.keys() < old.keys() else new["export"]
    return {**old, **new, "export": exports}


def machine() -> str:
    """In words."""
    return f"{os.cpu_count()} cores of {processor()}, no GPU"


if __name__ == "__main__":
    main()
