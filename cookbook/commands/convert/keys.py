"""The keys of a recipe from those of converted files: by `cookbook.config.foreign` where one has one counterpart, and
here what is derived from several.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cookbook.config.foreign import ADAPTER, EVALUATION, PROJECTS, SAVING, NoCounterpart, Project
from cookbook.system.files import Document, KeyPath, RecipeError, kind_in_words, read_document, show


class Conversion:
    """Our keys, collected from one or more files."""

    def __init__(self, processes: int | None) -> None:
        self.processes = processes
        self.recipe: dict[str, Any] = {}
        """By dotted key."""
        self.other: dict[str, Any] = {}
        """By `~X` and `strategy.X`: from which further keys are derived."""
        self.places: dict[str, str] = {}
        """File, line, key and value behind each of these."""
        self.given: set[str] = set()
        """Those that the files have, also with a value that could not be converted."""
        self.notes: list[str] = []
        self.others: list[str] = []
        """What makes another training, of which no recipe would be the same."""
        self.folder = Path()

    def read(self, document: Document, project: Project) -> None:
        """Take over the keys of a file; those of a file that was read earlier have precedence.

        Raises:
            RecipeError: they make another strategy.
        """
        self.folder = Path(document.name).parent
        for path, value in _leaves(document.values, project):
            key = project.keys.get(".".join(map(str, path)))
            place = f"{document.place(*path)} is {_short(value)}"
            if isinstance(value, str) and re.fullmatch(r"\$\{\w+\}", value):  # torchtune's reference to another key
                value = document.values.get(value[2:-1], value)
            if other := project.other_training(".".join(map(str, path)), value):
                self.others.append(f"{place}: {other}")
                continue
            if key is None:
                self.notes.append(f"{place}: no counterpart is known; docs/recipes.md has all keys")
                continue
            self.given.add(key.ours or "")
            try:
                translated = key.translate(value)
            except NoCounterpart as problem:
                (self.others if key.decides else self.notes).append(f"{place}: {problem}")
            except (TypeError, ValueError, AttributeError):
                self.notes.append(f"{place}: a value of another kind was expected; {key.answer}")
            else:
                self._put(key.ours, translated, place)
                if left_out := key.left_out(value):
                    self.notes.append(f"{place}: {left_out}")

    def _put(self, ours: str | None, value: Any, place: str) -> None:
        if ours is None or value is None:
            return
        home = self.other if ours.startswith(("~", "strategy.")) else self.recipe
        if ours in home and home[ours] != value:
            is_of_two = place.partition(":")[0] != self.places[ours].partition(":")[0]
            if is_of_two and ours.startswith("strategy."):
                raise RecipeError(f"{place}, but {self.places[ours]}: these are two strategies; convert one at a time")
            self.notes.append(f"{place}: {ours.lstrip('~')} is {show(home[ours])} already, from {self.places[ours]}")
            return
        home[ours], self.places[ours] = value, place

    def _take(self, name: str, default: Any = None) -> Any:
        return self.other.pop(f"~{name}", default)

    def _note(self, name: str, advice: str) -> None:
        self.notes.append(f"{self.places[name]}: {advice}")

    def derive(self, project: Project | None) -> None:
        """The keys that depend on several of theirs, and their defaults."""
        self._strategy_files()
        bf16, fp16 = self._take("bf16"), self._take("fp16")
        if bf16 or fp16 or bf16 is False:
            self.recipe.setdefault("mixed_precision", "bf16" if bf16 else "fp16" if fp16 else "no")
        self._data()
        self._objective()
        if project is not None:
            self._defaults(project)
        self._adapter()
        self._least_rate()
        self._length_and_batch()
        self._evaluation_and_saving()
        betas = [self._take("beta1"), self._take("beta2")]
        if betas != [None, None]:
            self.recipe["optim.betas"] = [betas[0] or 0.9, betas[1] or 0.999]

    def _defaults(self, project: Project) -> None:
        added = {}
        is_sft = self.recipe.get("objective.name", "sft") == "sft"
        for key, value in project.defaults.items():
            if key in self.given or key in self.recipe or (key == "run.num_epochs" and "run.max_steps" in self.recipe):
                continue
            if key in ("objective.train_on", "optim.learning_rate") and not is_sft:
                continue
            if key.startswith("adapter.") and not (self.other.get("~peft") or self.other.get("~adapter")):
                continue
            (self.other if key[0] == "~" else self.recipe)[key] = value
            if key[0] != "~":
                added[key] = value
        if added:
            given = ", ".join(f"{key} {show(value)}" for key, value in added.items())
            self.notes.append(f"not in the file, so the defaults of {project.name} hold: {given}")

    def _strategy_files(self) -> None:
        """A DeepSpeed JSON, inline or by path, and FSDP in one line."""
        named = self._take("deepspeed")
        if isinstance(named, dict):
            self.read(Document(f"{self.places['~deepspeed']}", named), PROJECTS["deepspeed"])
        elif named is not None:
            path = next((one for one in (Path(str(named)), self.folder / str(named)) if one.is_file()), None)
            if path is None:
                self._note("~deepspeed", "no such file; give it to `convert` beside this one")
            else:
                self.read(read_document(path), PROJECTS["deepspeed"])
        for key, value in (self._take("fsdp") or {}).items():
            self.other.setdefault(f"strategy.{key}", value)

    def _data(self) -> None:
        path, config, split = self._take("dataset"), self._take("dataset_config"), self._take("train_split")
        test, rows = self._take("test_split"), self._take("max_rows")
        sources = self._sources(path, config, split)
        if rows is not None:
            sources = [{**source, "max_rows": rows} for source in sources]
        if sources:
            only = sources[0]["path"] if sources[0].keys() == {"path"} else sources[0]
            self.recipe["data.train"] = sources if len(sources) > 1 else only
        is_used = "~dataset_component" in self.places or any(source["path"] == path for source in sources)
        if test is not None and is_used:
            self.recipe["data.eval"] = {**sources[0], "split": test}
        for key, value in {"dataset": path, "dataset_config": config, "train_split": split, "test_split": test}.items():
            if value is not None and not is_used:
                self._note(f"~{key}", "left out: other keys name the rows; write it at its source in data.train")
        for name in self._names("registered_eval"):
            self.recipe.setdefault("data.eval", {})[name] = f"path/to/{name}.jsonl"
        for i, source in enumerate(self._list_of_sources("test_sources")):
            self.recipe.setdefault("data.eval", {})[f"set{i}" if i else "eval"] = source
        columns = {"text": self._take("text_field"), "messages": self._take("messages_column")}
        if columns := {key: column for key, column in columns.items() if column not in (None, key)}:
            self.recipe["data.columns"] = columns

    def _sources(self, path: str | None, config: Any, split: Any) -> list[dict[str, Any]]:
        mixture = self._take("mixture")
        if mixture is not None:
            self.other["~sources"] = mixture.get("datasets", [])
            self.places["~sources"] = self.places["~mixture"]
            if mixture.get("test_split_size") is not None:
                self.recipe["data.holdout"] = mixture["test_split_size"]
            for key in sorted(mixture.keys() - {"datasets", "test_split_size"}):
                self._note("~mixture", f"{key} {show(mixture[key])}: no counterpart")
        if sources := self._list_of_sources("sources"):
            return sources
        splits, mixer = self._take("splits"), self._take("mixer")
        if mixer is not None:
            return self._of_mixer(mixer, splits or ["train"])
        if names := self._names("registered"):
            return [{"path": f"path/to/{name}.jsonl"} for name in names]
        component, files = self._take("dataset_component"), self._take("data_files")
        known = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}
        if str(component).rpartition(".")[2] in known:
            self._alpaca("~dataset_component")
            self.recipe["data.columns"] = {"user": "instruction", "context": "input", "assistant": "output"}
            if "objective.train_on" not in self.given:
                self.recipe["objective.train_on"] = "all"
                self._note(
                    "~dataset_component", "train_on_input is true where the file is silent: objective.train_on all"
                )
        if files is not None:
            path, split = files, None
        if path is None and component is not None:
            path = known.get(str(component).rpartition(".")[2])
            if path is None:
                path = "path/to/rows.jsonl"
                self._note("~dataset_component", "write the path of its rows in data.train")
        if path is None:
            return []
        extra = {"name": config, "split": split if split != "train" else None}
        if split is not None and "[" in str(split):
            self._note("~train_split", "write data.train.max_rows for a part of a split")
            extra["split"] = str(split).partition("[")[0]
        return [{"path": path, **{key: value for key, value in extra.items() if value not in (None, "train")}}]

    def _alpaca(self, place: str) -> None:
        """Rows in Alpaca's prompt, whatever the model's template."""
        if self.recipe.get("data.chat_template", "alpaca") != "alpaca":
            self._note(
                place, f"has Alpaca's prompt, so data.chat_template {self.recipe['data.chat_template']} is left out"
            )
        self.recipe["data.chat_template"] = "alpaca"

    def _of_mixer(self, mixer: dict[str, Any], splits: list[str]) -> list[dict[str, Any]]:
        """The handbook's {data set: fraction}, whose splits are by name for training or test."""
        train = [split for split in splits if "train" in split] or ["train"]
        test = [split for split in splits if "test" in split]
        if test:
            self.recipe["data.eval"] = {
                f"{path.replace('/', '-')}-{split}": {"path": path, "split": split} for path in mixer for split in test
            }
        if any(_number_of(share) != 1 for share in mixer.values()):
            self._note("~mixer", "a fraction became weight: an epoch uses that part of the rows, the next one another")
        found = []
        for path, share in mixer.items():
            weight = {"weight": share} if _number_of(share) != 1 else {}
            found += [{"path": path, **({"split": split} if split != "train" else {}), **weight} for split in train]
        return found

    def _names(self, key: str) -> list[str]:
        """Names of LLaMA-Factory's dataset_info.json, each to be replaced by a path."""
        names = self._take(key, [])
        if names:
            self._note(
                f"~{key}", "names in dataset_info.json; write the paths of their rows, or their names on the Hub"
            )
        return names

    def _list_of_sources(self, key: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        types: list[str] = []
        for given in self._take(key) or []:
            source = given if isinstance(given, dict) else {"path": given}
            own: dict[str, Any] = {}
            columns: dict[str, Any] = {}
            for theirs, value in source.items():
                ours = SOURCE_KEYS.get(theirs)
                if value is None or (theirs == "split" and value == "train") or (theirs == "weight" and value == 1):
                    continue
                if ours is not None and not (theirs == "path" and source.get("data_files")):  # then a format: json, csv
                    own[ours] = value
                elif theirs in COLUMN_KEYS:
                    columns[COLUMN_KEYS[theirs]] = value
                elif theirs == "message_property_mappings" and isinstance(value, dict):
                    columns |= {one: value[one] for one in ("role", "content") if one in value}
                elif theirs == "type" and value in RECOGNIZED_TYPES:
                    types.append(value)
                else:
                    self._note(f"~{key}", f"{theirs} {show(value)}: {SOURCE_ADVICE}")
            own.setdefault("path", "path/to/rows.jsonl")
            found.append({**own, **({"columns": columns} if columns else {})})
        if found and types == ["completion"] * len(found):
            self.recipe.setdefault("data.too_long", "split")
        if found and types == ["alpaca"] * len(found):
            self._alpaca(f"~{key}")
        elif "alpaca" in types:
            self._note(f"~{key}", "type alpaca: a run has one prompt; for Alpaca's, write data.chat_template: alpaca")
        return found

    def _objective(self) -> None:
        loss, preference, rl = self._take("loss_type"), self._take("pref_loss"), self._take("rl")
        component = str(self._take("loss", "")).rpartition(".")[2].lower()
        if preference is not None:
            if self.recipe.get("objective.name") == "dpo":
                loss = preference
            else:
                self._note("~pref_loss", "goes with stage dpo; left out")
        if "dpo" in component:
            loss = "sigmoid"
        elif component and not re.match(r"ce|.*cross_?entropy", component):
            self.others.append(f"{self.places['~loss']}: no such objective (docs/recipes.md#objective)")
        for name in (rl, loss):
            if name in ("sigmoid", "ipo", "dpo"):
                self.recipe["objective.name"] = "dpo"
                self.recipe |= {"objective.loss": "ipo"} if name == "ipo" else {}
            elif name in ("orpo", "kto"):
                self.recipe["objective.name"] = {"orpo": "orpo", "kto": "kto_zero"}[name]
            elif name not in (None, "nll", "chunked_nll"):
                key = next(one for one in ("~rl", "~pref_loss", "~loss_type") if one in self.places)
                self.others.append(f"{self.places[key]}: no such objective (docs/recipes.md#objective)")
        if "objective.name" not in self.recipe:
            if self.recipe.keys() & {"objective.desirable_weight", "objective.undesirable_weight"}:
                self.recipe["objective.name"] = "kto_zero"
            elif "objective.beta" in self.recipe:
                self.recipe["objective.name"] = "dpo"
                self._note("objective.beta", "taken for DPO; for ORPO write objective.name: orpo, for KTO kto_zero")
        name = self.recipe.get("objective.name", "sft")
        if name == "kto_zero":
            self.notes.append("objective.name kto_zero: KTO with its reference point at 0 (docs/recipes.md)")
        if name != "dpo" and "objective.label_smoothing" in self.recipe:
            self.recipe.pop("objective.label_smoothing")
            self._note("objective.label_smoothing", "goes with dpo only")
        if name != "sft" and "objective.train_on" in self.recipe:
            self.recipe.pop("objective.train_on")
            self._note("objective.train_on", f"{name} decides which tokens have loss")

    def _adapter(self) -> None:
        name, component = self._take("adapter"), str(self._take("component", "")).rpartition(".")[2]
        uses, four, dora = self._take("peft"), self._take("4bit"), self._take("dora")
        alpha_over_rank = self._take("alpha_over_rank")
        parameters = self._take("lora_parameters")
        attention, mlp, _ = self._take("lora_attention"), self._take("lora_mlp"), self._take("lora_head")
        if self._take("8bit"):
            self._note("~8bit", "no weights in 8 bits; write adapter.name: qlora for 4 bits")
        for prefix in ("qlora", "lora", "dora"):
            if component.startswith(f"{prefix}_"):
                name = name or prefix
        name = name or ("lora" if uses else None)
        if name is None:
            for key in [key for key in self.recipe if key.startswith("adapter.")]:
                del self.recipe[key]
                if key in self.places:
                    self._note(key, f"without an adapter, left out; {ADAPTER}")
            if four:
                self._note("~4bit", f"without an adapter, left out; {ADAPTER}")
            if parameters:
                self._note("~lora_parameters", f"without an adapter, left out; {ADAPTER}")
            return
        self.recipe["adapter.name"] = "qlora" if four else "dora" if dora and name == "lora" else name
        if four and dora:
            self._note("~dora", "does not go with weights in 4 bits; left out")
        if attention is not None:
            names = ["o_proj" if one == "output_proj" else one for one in attention]
            self.recipe["adapter.targets"] = names + (["gate_proj", "up_proj", "down_proj"] if mlp else [])
        elif mlp:
            self._note("~lora_mlp", "write adapter.targets")
        if parameters:
            self.recipe["adapter.targets"] = [*self.recipe.get("adapter.targets", []), *parameters]
        if alpha_over_rank is not None and "adapter.rank" in self.recipe and "adapter.alpha" not in self.recipe:
            self.recipe["adapter.alpha"] = alpha_over_rank * self.recipe["adapter.rank"]
            self.notes.append(
                f"not in the file: adapter.alpha {self.recipe['adapter.alpha']}, {alpha_over_rank} x rank"
            )
        if "adapter.targets" not in self.recipe:
            self.notes.append(
                "no layers for the adapter in the file: adapter.targets is all-linear; peft may take fewer"
            )

    def _least_rate(self) -> None:
        share, peak = self._take("min_share"), self.recipe.get("optim.learning_rate")
        if share and peak is None:
            self._note("~min_share", "a share of a peak that the file has not; write schedule.min_learning_rate")
        elif share:
            self.recipe.setdefault("schedule.min_learning_rate", float(f"{share * peak:.6g}"))

    def _length_and_batch(self) -> None:
        if "run.max_steps" in self.recipe and "run.num_epochs" in self.recipe:
            del self.recipe["run.num_epochs"]
            self._note("run.num_epochs", "max_steps has precedence; left out")
        if (steps := self._take("steps_per_epoch")) is not None:
            self.recipe["run.max_steps"] = steps * (self.recipe.pop("run.num_epochs", None) or 1)
        warmup, ratio = self._take("warmup"), self._take("warmup_ratio")
        if warmup:  # transformers 5 reads a share here too
            self.recipe["schedule.warmup_steps"] = warmup if warmup < 1 else int(warmup)
        elif ratio:
            self.recipe["schedule.warmup_steps"] = ratio
        micro, accumulation = self.recipe.get("batch.micro_batch_size"), self._take("accumulation", 1)
        listed, mesh = self._take("processes"), self.other
        self.processes = self.processes or listed
        if micro is None or "batch.global_batch_size" in self.recipe:
            return
        per_copy = mesh.get("strategy.tp_size", 1) * mesh.get("strategy.sp_size", 1)
        copies = max(1, (self.processes or 1) // per_copy)
        self.recipe["batch.global_batch_size"] = size = micro * accumulation * copies
        if self.processes is None:
            self.notes.append(
                f"batch.global_batch_size {size} = {micro} x accumulation {accumulation} x 1 process: the file has no"
                " number of GPUs; multiply by that of your runs, or give --processes"
            )

    def _evaluation_and_saving(self) -> None:
        for what, key, advice in (
            ("eval", "run.eval_every_steps", EVALUATION),
            ("save", "run.save_every_steps", SAVING),
        ):
            strategy, steps = self._take(f"{what}_strategy"), self._take(f"{what}_steps")
            strategy = "no" if strategy is False else strategy
            if strategy in (None, "steps") and steps and steps >= 1:
                self.recipe[key] = int(steps)
            elif strategy in (None, "steps") and steps:
                self._note(f"~{what}_steps", f"a share of the run; {advice}")
            elif strategy not in (None, "no"):
                self._note(f"~{what}_strategy", advice)
            elif strategy == "no" and steps:
                self._note(f"~{what}_steps", f"{what}_strategy is no; left out")
        if (keep := self._take("keep")) is not None:
            self.recipe["run.keep_last"] = max(2, keep)
            if keep < 2:
                self._note("~keep", "run.keep_last is at least 2, as a crash may damage the newest")

    @property
    def distribution(self) -> dict[str, Any]:
        """Properties of a strategy."""
        return {key.removeprefix("strategy."): value for key, value in self.other.items() if key[0] != "~"}


SOURCE_KEYS = {key: key for key in ("path", "name", "split", "revision", "weight")}
SOURCE_KEYS |= {"id": "path", "data_files": "path", "config": "name"}
COLUMN_KEYS = {"field_messages": "messages", "message_field_role": "role", "message_field_content": "content"}
RECOGNIZED_TYPES = ("alpaca", "chat_template", "completion", "sharegpt")
SOURCE_ADVICE = "no counterpart; the shape of rows is recognized, and data.columns maps the rest"


def _number_of(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 1.0


def _short(value: Any) -> str:
    return kind_in_words(value) if isinstance(value, list | dict) and value else show(value)


def _leaves(values: dict[str, Any], project: Project, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Keys with their values. A section is a value where the project's table has it as one; a key without a value, and
    "auto" of a DeepSpeed JSON, leave a setting to its default.
    """
    for name, value in values.items():
        here = (*path, name)
        dotted = ".".join(map(str, here))
        if isinstance(value, dict) and dotted not in project.keys:
            yield from _leaves(value, project, here)
        elif value is not None and not (value == "auto" and project is PROJECTS["deepspeed"]):
            yield here, value
