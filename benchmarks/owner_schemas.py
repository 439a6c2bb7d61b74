"""Write `cookbook/config/owners`: the keys, types and defaults of other projects' files, from their own sources.

python benchmarks/owner_schemas.py                        # of the packages that are installed here
python benchmarks/owner_schemas.py --sources DIR axolotl  # of a checkout in DIR, with the name of its repository
python benchmarks/owner_schemas.py --words                # the table of words in docs/troubleshooting.md

Sources are read as syntax trees; nothing of them is imported or run.
"""

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sysconfig
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cookbook.config.foreign import tables

INSTALLED = Path(sysconfig.get_paths()["purelib"])
ROOT = Path(__file__).parents[1]
OWNERS = ROOT / "cookbook" / "config" / "owners"
PAGE = ROOT / "docs" / "troubleshooting.md"


@dataclass(frozen=True)
class Source:
    """Where an owner has its keys."""

    classes: tuple[str, ...] = ()
    """Files whose dataclasses and pydantic models are taken, in this order of precedence."""
    lookups: tuple[str, ...] = ()
    """Files of scripts whose `cfg.X` and `cfg.get("X", default)` are taken."""
    parameters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By section, files whose functions and classes are named there and take its other keys as arguments; the first
    text is a regular expression of their names."""
    others: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By section, in the same way, those that have arguments which the ones in `parameters` lack."""
    flags: tuple[str, dict[str, str]] = ("", {})
    """A file whose parser of a command line has the keys of sections, and by section a regular expression of the title
    of their group and the name."""
    selector: str = "_component_"
    """The key of a section that names the function or class."""
    roots: str = ""
    """A regular expression of the classes that a file's keys are in, with those that they extend or have as types."""
    has_methods: bool = False
    """True if classes stand for methods, of which a file has one: what each extends is kept."""
    package: str | None = None
    """The installed package, or None if only a checkout has it."""
    repository: str = ""
    """Its folder in `--sources`."""


HF_TRAINER = ("trl/trainer/base_config.py", "trl/trainer/sft_config.py", "trl/trainer/dpo_config.py")
SOURCES = {
    "transformers": Source(("transformers/training_args.py", "transformers/trainer_utils.py"), package="transformers"),
    "seq2seq": Source(("transformers/training_args_seq2seq.py",), package="transformers"),
    "trl": Source(
        (
            *HF_TRAINER,
            "trl/trainer/kto_config.py",
            "trl/experimental/cpo/cpo_config.py",
            "trl/experimental/orpo/orpo_config.py",
            "trl/trainer/reward_config.py",
            "trl/trainer/model_config.py",
            "trl/scripts/utils.py",
            "trl/scripts/grpo.py",
            "trl/trainer/grpo_config.py",
            "trl/trainer/*_config.py",
            "trl/experimental/*/*_config.py",
        ),
        has_methods=True,
        package="trl",
    ),
    "alignment-handbook": Source(("src/alignment/configs.py",), repository="alignment-handbook"),
    "open-r1": Source(("src/open_r1/configs.py",), repository="open-r1"),
    "llama-factory": Source(
        (
            *(
                f"src/llamafactory/hparams/{name}_args.py"
                for name in ("data", "finetuning", "model", "training", "generating", "evaluation", "megatron_bridge")
            ),
            "src/llamafactory/extras/constants.py",
        ),
        repository="LLaMA-Factory",
    ),
    "llama-factory-v1": Source(
        tuple(
            f"src/llamafactory/v1/config/{name}.py"
            for name in ("data_args", "model_args", "training_args", "sample_args", "arg_utils")
        ),
        repository="LLaMA-Factory",
    ),
    "axolotl": Source(
        (
            "src/axolotl/utils/schemas/config.py",
            "src/axolotl/utils/schemas/*.py",
            "src/axolotl/integrations/*/args.py",
        ),
        roots="AxolotlInputConfig|.*Args|KDTrainingArgsMixin|SwanLabConfig",
        repository="axolotl",
    ),
    "ms-swift": Source(
        (
            "swift/arguments/base_args/*.py",
            "swift/arguments/*_args.py",
            "swift/trainers/arguments.py",
            "swift/rlhf_trainers/arguments.py",
        ),
        repository="ms-swift",
    ),
    "automodel": Source(
        lookups=("nemo_automodel/recipes/llm/train_ft.py", "nemo_automodel/recipes/_typed_config.py"),
        parameters={
            "step_scheduler": ("StepSchedulerConfig", "nemo_automodel/components/training/step_scheduler.py"),
            "lr_scheduler": ("LRSchedulerConfig", "nemo_automodel/components/optim/optimizer.py"),
            "optimizer": ("AdamW|Adam|SGD", "torch/optim/adamw.py", "torch/optim/adam.py", "torch/optim/sgd.py"),
            "distributed": ("FSDP2Config|DDPConfig", "nemo_automodel/components/distributed/config.py"),
            "checkpoint": ("CheckpointingConfig", "nemo_automodel/components/checkpoint/config.py"),
            "compile": ("CompileConfig", "nemo_automodel/components/utils/compile_utils.py"),
            "peft": ("PeftConfig", "nemo_automodel/components/_peft/lora.py"),
            "dataset": (
                "(HellaSwag|Chat|ColumnMappedTextInstruction)Dataset|HellaSwag|make_squad_dataset",
                "nemo_automodel/components/datasets/llm/*.py",
            ),
            "wandb": ("WandbConfig", "nemo_automodel/components/loggers/loggers.py"),
            "dataloader": ("DataLoader", "torch/utils/data/dataloader.py"),
            "rng": ("StatefulRNG", "nemo_automodel/components/training/rng.py"),
        },
        others={
            "dataset": ("(make|build)_.*dataset|[^_].*Dataset(Config)?", "nemo_automodel/components/datasets/*/*.py")
        },
        selector="_target_",
        repository="Automodel",
    ),
    "accelerate": Source(
        ("accelerate/commands/config/config_args.py",),
        roots="ClusterConfig",
        flags=(
            "accelerate/commands/launch.py",
            {
                "fsdp_config": "FSDP Arguments/.*",
                "deepspeed_config": "DeepSpeed Arguments/.*",
                "parallelism_config": "ParallelismConfig Arguments/.*",
                "fp8_config": "FP8 Arguments/(?:fp8_)?(.*)",
                "dynamo_config": "Resource Selection Arguments/dynamo_.*",
                "mpirun_config": "MPI Arguments/.*",
                "megatron_lm_config": "Megatron-LM Arguments/.*",
            },
        ),
        package="accelerate",
    ),
    "torchtune": Source(
        lookups=tuple(
            f"recipes/{name}.py" for name in ("*finetune*", "*dpo*", "*distillation*", "ppo*", "qat*", "dev/early*")
        ),
        parameters={
            "model": ("(?!.*(tokenizer|transform)).*", "torchtune/models/*/_model_builders.py"),
            "tokenizer": (".*tokenizer", "torchtune/models/*/_model_builders.py"),
            "dataset": (".*(?<!packed)_dataset", "torchtune/datasets/_*.py"),
            "checkpointer": (".*Checkpointer", "torchtune/training/checkpointing/_checkpointer.py"),
            "lr_scheduler": ("get_.*", "torchtune/training/lr_schedulers.py"),
            "metric_logger": (".*Logger", "torchtune/training/metric_logging.py"),
            "loss": (".*Loss.*", "torchtune/modules/loss/*.py", "torchtune/rlhf/loss/*.py"),
            "profiler": ("setup_.*", "torchtune/training/_profiler.py"),
            "optimizer": ("AdamW|SGD", "torch/optim/adamw.py", "torch/optim/sgd.py"),
        },
        repository="torchtune",
    ),
}


class Reader:
    """The classes of an owner's files, by name."""

    def __init__(self, root: Path, selector: str = "") -> None:
        self.root = root
        self.selector = selector
        self.classes: dict[str, ast.ClassDef] = {}
        self.constants: dict[str, Any] = {}

    def trees(self, patterns: tuple[str, ...]) -> Iterator[tuple[Path, ast.Module]]:
        seen: set[Path] = set()
        for pattern in patterns:
            if not (files := sorted(self.root.glob(pattern)) or sorted(INSTALLED.glob(pattern))):
                print(f"{pattern}: no such file in {self.root}")
            for path in files:
                if path not in seen:
                    seen.add(path)
                    yield path, ast.parse(path.read_text(encoding="utf-8"))

    def read_classes(self, patterns: tuple[str, ...], roots: str = "") -> dict[str, Any]:
        for _, tree in self.trees(patterns):
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and "NamedTuple" not in map(ast.unparse, node.bases):
                    self.classes.setdefault(node.name, node)
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    known, value = self.literal(node.value)
                    if known:
                        self.constants.setdefault(node.targets[0].id, value)
        return {
            name: keys
            for name, node in self.classes.items()
            if (not roots or name in self.reachable(roots)) and (keys := self.keys_of(node))
        }

    def reachable(self, roots: str) -> set[str]:
        """The classes whose names match, those that they extend, and those of their keys."""
        names = [name for name in self.classes if re.fullmatch(roots, name)]
        for name in names:  # which grows
            node = self.classes[name]
            parts = [*node.bases, *(item.annotation for item in node.body if isinstance(item, ast.AnnAssign))]
            words = re.findall(r"\w+", " ".join(map(ast.unparse, parts)))
            names += [word for word in dict.fromkeys(words) if word in self.classes and word not in names]
        return set(names)

    def keys_of(self, node: ast.ClassDef) -> dict[str, list[Any]]:
        keys: dict[str, list[Any]] = {}
        for item in node.body:
            if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                continue
            if (
                item.target.id.startswith("_")
                or "init=False" in ast.unparse(item)
                or "ClassVar" in (kind := ast.unparse(item.annotation))
            ):
                continue
            default, alias = self.default_of(item.value)
            keys[item.target.id] = [kind, *default]
            if alias is not None:
                keys[alias] = [kind, *default]
        return keys

    def default_of(self, node: ast.expr | None) -> tuple[list[Any], str | None]:
        """A default in a list, empty if there is none or the owner computes it; and another name of the key."""
        if node is None:
            return [], None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("field", "Field", "dataclasses.field"):
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            alias = ast.literal_eval(named["alias"]) if "alias" in named else None
            if (factory := named.get("default_factory")) is not None:
                if isinstance(factory, ast.Lambda):
                    return self.default_of(factory.body)[0], alias
                empty: dict[str, list[Any]] = {"list": [[]], "dict": [{}]}
                return empty.get(ast.unparse(factory), []), alias
            return self.default_of(named.get("default") or next(iter(node.args), None))[0], alias
        known, value = self.literal(node)
        return ([value] if known else []), None

    def literal(self, node: ast.expr) -> tuple[bool, Any]:
        """True if a node is a value of JSON, and this value."""
        if isinstance(node, ast.Name) and node.id in self.constants:
            return True, self.constants[node.id]
        if isinstance(node, ast.Attribute):  # a member of an enumeration
            owner = self.classes.get(ast.unparse(node.value))
            for item in owner.body if owner else ():
                if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == node.attr:
                    return self.literal(item.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("pp_int", "int") and node.args:
            node = ast.parse(f"{float(ast.literal_eval(node.args[0])):.0f}", mode="eval").body
        try:
            value = ast.literal_eval(node)
            json.dumps(value)
        except (ValueError, TypeError):
            return False, None
        return True, list(value) if isinstance(value, tuple) else value

    def read_lookups(self, patterns: tuple[str, ...]) -> dict[str, list[Any]]:
        """Keys by their dotted paths."""
        keys: dict[str, list[Any]] = {}
        for _, tree in self.trees(patterns):
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and _is_config(node.func, ".get") and node.args:
                    known, name = self.literal(node.args[0])
                    if not known or not isinstance(name, str):
                        continue
                    default = self.default_of(node.args[1])[0] if len(node.args) > 1 else [None]
                    keys[name] = ["", *default]
                elif isinstance(node, ast.Attribute) and (
                    match := re.fullmatch(r"cfg\.(?!get$)(\w+)", ast.unparse(node))
                ):
                    keys.setdefault(match[1], [""])
        return {name: keys[name] for name in sorted(keys)}

    def read_parameters(self, section: str, patterns: tuple[str, ...]) -> dict[str, list[Any]]:
        """Arguments of functions and classes, by the path of a key; without a default where theirs differ."""
        keys: dict[str, list[Any]] = {f"{section}.{self.selector}": ["str"]}
        for _, declared, arguments in self.callables(patterns):
            keys |= {f"{section}.{name}": entry for name, entry in declared.items()}
            for name, entry in arguments.items():
                known = keys.setdefault(f"{section}.{name}", entry)
                if known[1:] != entry[1:]:
                    keys[f"{section}.{name}"] = known[:1]
        return keys

    def read_others(self, section: str, patterns: tuple[str, ...], known: Container[str]) -> dict[str, list[str]]:
        """By the path of an unknown key, the functions and classes that have it."""
        keys: dict[str, list[str]] = {}
        for owner, declared, arguments in self.callables(patterns):
            for name in {**declared, **arguments}:
                if (path := f"{section}.{name}") not in known and owner not in keys.setdefault(path, []):
                    keys[path].append(owner)
        return {path: sorted(keys[path]) for path in sorted(keys)}

    def callables(self, patterns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, list[Any]], dict[str, list[Any]]]]:
        """Name, declared fields and arguments of each function and class whose name matches the first pattern."""
        names, *files = patterns
        for _, tree in self.trees(tuple(files)):
            for node in tree.body:
                if not isinstance(node, ast.ClassDef | ast.FunctionDef) or not re.fullmatch(names, node.name):
                    continue
                is_class = isinstance(node, ast.ClassDef)
                body = node.body if isinstance(node, ast.ClassDef) else [node]
                declared = self.keys_of(node) if isinstance(node, ast.ClassDef) else {}
                arguments: dict[str, list[Any]] = {}
                for function in body:
                    if isinstance(function, ast.FunctionDef) and (not is_class or function.name == "__init__"):
                        arguments |= self.arguments_of(function)
                yield node.name, declared, arguments

    def read_flags(self, pattern: str, sections: dict[str, str]) -> dict[str, list[Any]]:
        """Options of a parser, by the paths of keys; texts of a default are read as a file's are."""
        keys: dict[str, list[Any]] = {}
        titles: dict[str, str] = {}
        for _, tree in self.trees((pattern,)):
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign) and ast.unparse(node.value).endswith(")"):
                    title = re.search(r"add_argument_group\('([^']+)'", ast.unparse(node.value))
                    titles |= {ast.unparse(node.targets[0]): title[1]} if title else {}
            for node in ast.walk(tree):
                function = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if not isinstance(node, ast.Call) or function.removesuffix(".add_argument") not in titles:
                    continue
                group, name = titles[function.removesuffix(".add_argument")], ast.literal_eval(node.args[0]).lstrip("-")
                for section, wanted in sections.items():
                    if match := re.fullmatch(wanted, f"{group}/{name}"):
                        given = {keyword.arg: keyword.value for keyword in node.keywords}
                        default = self.default_of(given.get("default"))[0]
                        default = [yaml.safe_load(text) if isinstance(text, str) else text for text in default]
                        kind = ast.unparse(given["type"]) if "type" in given else ""
                        for key in {name, match.group(len(match.groups()))} if match.groups() else {name}:
                            keys[f"{section}.{key}"] = [kind, *default]
        return {name: keys[name] for name in sorted(keys)}

    def arguments_of(self, function: ast.FunctionDef) -> dict[str, list[Any]]:
        plain, keyword = function.args.args, function.args.kwonlyargs
        defaults = [None] * (len(plain) - len(function.args.defaults)) + [*function.args.defaults]
        pairs = [*zip(plain, defaults, strict=True), *zip(keyword, function.args.kw_defaults, strict=True)]
        return {
            argument.arg: [
                ast.unparse(argument.annotation) if argument.annotation else "",
                *self.default_of(default)[0],
            ]
            for argument, default in pairs
            if argument.arg not in ("self", "cls")
        }


def _is_config(node: ast.expr, end: str) -> bool:
    return re.fullmatch(rf"(self\.)?(_?cfg|_raw){re.escape(end)}", ast.unparse(node)) is not None


def found(name: str, sources: Path | None) -> tuple[Path, str] | None:
    """The folder of an owner's files, and its version; None if they are not here."""
    source = SOURCES[name]
    if source.package is not None:
        spec = importlib.util.find_spec(source.package)
        if spec is None or spec.origin is None:
            return None
        return Path(spec.origin).parents[1], importlib.metadata.version(source.package)
    root = None if sources is None else sources / source.repository
    if root is None or not root.is_dir():
        return None
    revision = root / "REVISION"
    if revision.is_file():
        return root, revision.read_text().strip()
    command = ["git", "-C", str(root), "log", "-1", "--format=%cs %H"]
    return root, subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def schema_of(name: str, root: Path, version: str) -> dict[str, Any]:
    source, reader = SOURCES[name], Reader(root, SOURCES[name].selector)
    classes = reader.read_classes(source.classes, source.roots) if source.classes else {}
    keys = reader.read_lookups(source.lookups) if source.lookups else {}
    for section, patterns in source.parameters.items():
        keys |= reader.read_parameters(section, patterns)
    keys |= reader.read_flags(*source.flags) if source.flags[0] else {}
    if keys:
        classes["configuration"] = keys
    others: dict[str, list[str]] = {}
    for section, patterns in source.others.items():
        others |= reader.read_others(section, patterns, keys)
    bases = {name: list(map(ast.unparse, node.bases)) for name, node in reader.classes.items() if node.bases}
    extends = {"extends": bases} if source.has_methods else {}
    return {"version": version, "classes": classes} | extends | ({"others": others} if others else {})


def dumps(schema: dict[str, Any]) -> str:
    """JSON with a key a line."""
    parts = []
    for name, entry in schema["classes"].items():
        keys = ",\n".join(f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items())
        parts.append(f"  {json.dumps(name)}: {{\n{keys}}}")
    end = ""
    for part in ("extends", "others"):
        lines = [f"  {json.dumps(key)}: {json.dumps(names)}" for key, names in schema.get(part, {}).items()]
        end += f',\n "{part}": {{\n' + ",\n".join(lines) + "\n }" if lines else ""
    return (
        f'{{\n "version": {json.dumps(schema["version"])},\n "classes": {{\n' + ",\n".join(parts) + f"\n }}{end}\n}}\n"
    )


def table_of_words() -> str:
    """The words that a recipe answers, with their answers, as the page has them."""
    answers: dict[str, list[str]] = {}
    for word, answer in tables().elsewhere.items():
        answers.setdefault(answer, []).append(f"`{word}`")
    rows = [f"| {', '.join(words)} | {answer} |" for answer, words in answers.items()]
    table = "\n".join(["| the word | the answer |", "|---|---|", *rows])
    return re.sub(r"docs/([\w.]+)(#[\w-]+)?", r"[docs/\1](\1\2)", table)


def with_words(page: str) -> str:
    begin, end = "<!-- words:begin -->\n", "\n<!-- words:end -->"
    before, _, rest = page.partition(begin)
    return before + begin + table_of_words() + end + rest.partition(end)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("owners", nargs="*", metavar="OWNER", help=", ".join(SOURCES))
    parser.add_argument("--sources", type=Path, help="the folder of checkouts")
    parser.add_argument("--words", action="store_true", help="write the table of words, and nothing else")
    arguments = parser.parse_args()
    if arguments.words:
        PAGE.write_text(with_words(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for name in arguments.owners or SOURCES:
        here = found(name, arguments.sources)
        if here is None:
            print(f"{name}: not here; give --sources")
            continue
        (OWNERS / f"{name}.json").write_text(dumps(schema_of(name, *here)), encoding="utf-8")


if __name__ == "__main__":
    main()
