"""The keys of a recipe from those of converted files: by `cookbook.config.foreign` where one has one counterpart, and
here what is derived from several.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cookbook.commands.convert import references, source_sections
from cookbook.config.foreign import (
    ADAPTER,
    EVALUATION,
    MEANINGS,
    PROJECTS,
    SAVING,
    Key,
    NoCounterpart,
    Project,
    asks_for_nothing,
    share,
)
from cookbook.config.strategy import known_strategies
from cookbook.config.strategy_keys import passes
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
        self.changes: list[str] = []
        """What of the files is not in the recipe and trains otherwise, or may."""
        self.notes: list[str] = []
        """What the user decides, or should know."""
        self.idle: list[str] = []
        """Keys of which nothing is lost."""
        self.sizes: dict[str, Any] = {}
        """Settings of speed that a strategy has a value of its own for, by their places in its file."""
        self.others: list[str] = []
        """What makes another training, of which no recipe would be the same."""
        self.folder = Path()
        self.template: str | None = None
        """The text of a chat template in the file."""

    def read(self, document: Document, project: Project) -> None:
        """Take over the keys of a file; those of a file that was read earlier have precedence.

        Raises:
            RecipeError: they make another strategy.
        """
        self.folder = Path(document.name).parent
        for path, written in _leaves(document.values, project):
            place, dotted = f"{document.place(*path)} is {_short(written)}", ".".join(map(str, path))
            value = references.resolved(written, document.values)
            if references.is_open(value):
                self.changes.append(f"{place}: refers to what is not in this file; write the value")
            elif other := project.other_training(dotted, value):
                self.others.append(f"{place}: {other}")
            else:
                self._read_key(dotted, value, place, project)

    def _read_key(self, dotted: str, value: Any, place: str, project: Project) -> None:
        key = project.keys.get(dotted)
        if key is not None and key.ours is not None:
            self._translate(key, dotted, value, place)
        elif passes(dotted, value, project) or (asks_for_nothing(value) and (key or project.change(dotted))):
            self.idle.append(dotted)
        elif key is None:
            self.changes.append(f"{place}: no counterpart is known; docs/recipes.md has all keys")
        elif key.cost == "idle":
            self.idle.append(dotted)
        elif key.cost == "sizes":
            self.sizes[dotted] = value
        else:
            self._lines(key).append(f"{place}: {key.why}")

    def _lines(self, key: Key) -> list[str]:
        return self.changes if key.cost == "changes" else self.notes

    def _translate(self, key: Key, dotted: str, value: Any, place: str) -> None:
        self.given.add(key.ours or "")
        try:
            translated = key.translate(value)
        except NoCounterpart as problem:
            (self.others if key.decides else self._lines(key)).append(f"{place}: {problem}")
        except (TypeError, ValueError, AttributeError):
            self._lines(key).append(f"{place}: a value of another kind was expected; {key.answer}")
        else:
            if translated is None:
                self.idle.append(dotted)
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
            self.changes.append(f"{place}: {ours.lstrip('~')} is {show(home[ours])} already, from {self.places[ours]}")
            return
        home[ours], self.places[ours] = value, place

    def _take(self, name: str, default: Any = None) -> Any:
        return self.other.pop(f"~{name}", default)

    def _note(self, name: str, advice: str) -> None:
        self.notes.append(f"{self.places[name]}: {advice}")

    def _change(self, name: str, advice: str) -> None:
        self.changes.append(f"{self.places[name]}: {advice}")

    def derive(self, project: Project | None) -> None:
        """The keys that depend on several of theirs, and their defaults."""
        self._strategy_files()
        bf16, fp16 = self._take("bf16"), self._take("fp16")
        if bf16 or fp16 or bf16 is False:
            self.recipe.setdefault("mixed_precision", "bf16" if bf16 else "fp16" if fp16 else "no")
        self._template()
        self._test_split(project)
        self._data()
        self._objective()
        if project is not None:
            self._defaults(project)
        self._loss_scale()
        self._adapter()
        self._least_rate()
        self._length_and_batch()
        self._evaluation_and_saving()
        betas = [self._take("beta1"), self._take("beta2")]
        if betas != [None, None]:
            self.recipe["optim.betas"] = [betas[0] or 0.9, betas[1] or 0.999]

    @property
    def _objective_name(self) -> str:
        return str(self.recipe.get("objective.name", "sft"))

    @property
    def _is_of_preferences(self) -> bool:
        return self._objective_name not in ("sft", "cpt")

    def _defaults(self, project: Project) -> None:
        is_default = "~adapter" in project.defaults and "~adapter" not in self.given
        has_adapter = self._adapter_name is not None or is_default
        values = {**project.defaults, **(project.of_preferences if self._is_of_preferences else {})}
        values |= project.of_adapters if has_adapter else {}
        values = {key: value for key, value in values.items() if key not in self.given and key not in self.recipe}
        for key, value in values.items():
            if key[0] == "~":
                self.other[key] = value
        added = {key: value for key, value in values.items() if self._holds(key, has_adapter=has_adapter)}
        self.recipe |= added
        if added:
            given = ", ".join(f"{key} {show(value)}" for key, value in added.items())
            self.notes.append(f"not in the file, so the defaults of {project.name} hold: {given}")
        if "objective.train_on" in added:
            self.notes.append(
                f"for rows of prompt and completion, of which {project.name} trains on the completion, write"
                " objective.train_on: assistant"
            )
        if self._take("no_limit") and "data.max_length" not in self.recipe:
            self.recipe["data.too_long"] = "error"
            self.notes.append("no length in the file: a row of more than data.max_length, 2048, is an error; raise it")

    def _holds(self, key: str, *, has_adapter: bool) -> bool:
        """Whether a default says something of this training."""
        if key == "run.num_epochs":
            return "run.max_steps" not in self.recipe
        if key in ("run.save_every_steps", "run.saves_per_epoch"):
            is_given = self.given & {"~save_strategy", "~save_steps", "run.save_every_steps", "run.saves_per_epoch"}
            is_short = self.recipe.get("run.max_steps", math.inf) <= (500 if key == "run.save_every_steps" else 0)
            return not is_given and not is_short and not self.recipe.get("data.streaming")
        if key == "objective.train_on":
            return self._objective_name == "sft"
        if key == "adapter.dropout" and self._is_of_preferences and self.other.get("~disable_dropout"):
            return False
        if key == "optim.weight_decay" and self.recipe.get("optim.name") == "sgd":  # torch's has none
            return False
        return key[0] != "~" and (has_adapter or not key.startswith("adapter."))

    def _loss_scale(self) -> None:
        """DeepSpeed's, of which files have the keys beside bf16 too."""
        keys = [key for key in self.recipe if key.startswith("loss_scale.")]
        if self.recipe.get("mixed_precision") != "fp16":
            for key in keys:
                del self.recipe[key]
                self.idle.append(_name_in(self.places[key]))
        elif "strategy.zero_stage" in self.other:
            for key, value in PROJECTS["deepspeed"].defaults.items():
                self.recipe.setdefault(key, value)

    def _template(self) -> None:
        text = self._take("template")
        if text is None:
            return
        if "data.chat_template" in self.recipe:
            self._change("~template", f"left out; data.chat_template is {self.recipe['data.chat_template']}")
        elif "{%" in text or "{{" in text:
            self.template = text
        else:
            self.recipe["data.chat_template"] = text

    def _strategy_files(self) -> None:
        """A DeepSpeed JSON, inline or by path, and FSDP in one line."""
        named = self._take("deepspeed")
        if isinstance(named, dict):
            self.read(Document(f"{self.places['~deepspeed']}", named), PROJECTS["deepspeed"])
        elif named is not None:
            path = next((one for one in (Path(str(named)), self.folder / str(named)) if one.is_file()), None)
            if path is None:
                known = _named_strategy(Path(str(named)).stem)
                self._note("~deepspeed", f"no such file; give it to `convert` beside this one{known}")
            else:
                self.read(read_document(path), PROJECTS["deepspeed"])
        for key, value in (self._take("fsdp") or {}).items():
            self.other.setdefault(f"strategy.{key}", value)

    def _test_split(self, project: Project | None) -> None:
        """TRL's `dataset_test_split` is `test`, and is read where a file asks for evaluations."""
        is_named = self.other.keys() & {"~mixture", "~sources", "~test_split"} or "~dataset" not in self.other
        if project is PROJECTS["trl"] and not is_named and self.other.get("~eval_strategy") in ("steps", "epoch"):
            self.other["~test_split"] = "test"
            self.notes.append("not in the file: the split test is evaluated, TRL's own")

    def _data(self) -> None:
        path, config, split = self._take("dataset"), self._take("dataset_config"), self._take("train_split")
        test, rows, held_out = self._take("test_split"), self._take("max_rows"), self._take("val")
        part = source_sections.share_held_out(split, (held_out or {}).get("split"))
        if part is not None:
            self.recipe["data.holdout"], held_out = part, None
            split = split.partition("[")[0]
        found = self._sources(path, config, split)
        if rows is not None:
            found = [{**source, "max_rows": rows} for source in found]
        if found:
            only = found[0]["path"] if found[0].keys() == {"path"} else found[0]
            self.recipe["data.train"] = found if len(found) > 1 else only
        is_used = "~dataset_component" in self.places or any(source["path"] == path for source in found)
        if test is not None and is_used:
            self.recipe["data.eval"] = {**found[0], "split": test}
        for key, value in {"dataset": path, "dataset_config": config, "train_split": split, "test_split": test}.items():
            if value is not None and not is_used:
                self._change(f"~{key}", "left out: other keys name the rows; write it at its source in data.train")
        for name in self._names("registered_eval"):
            self.recipe.setdefault("data.eval", {})[name] = f"path/to/{name}.jsonl"
        others = self._list_of_sources("test_sources") + self._listed("listed_eval")
        for i, source in enumerate([*others, *([self._of_torchtune(held_out, "~val")] if held_out else [])]):
            self.recipe.setdefault("data.eval", {})[f"set{i}" if i else "eval"] = source
        columns = {"text": self._take("text_field"), "messages": self._take("messages_column")}
        columns |= {
            source_sections.COLUMN_MAP.get(key, key): column for key, column in self._take("column_map", {}).items()
        }
        if columns := {key: column for key, column in columns.items() if column not in (None, key)}:
            self.recipe["data.columns"] = columns

    def _sources(self, path: str | None, config: Any, split: Any) -> list[dict[str, Any]]:
        mixture = self._take("mixture")
        if mixture is not None:
            self._mixture(mixture)
        if "~pretraining" in self.other:
            self.other["~sources"], self.places["~sources"] = self._take("pretraining"), self.places["~pretraining"]
            self.recipe |= {"objective.name": "cpt", "data.streaming": True}
        if found := [*self._list_of_sources("sources"), *self._listed("listed")]:
            return found
        splits, mixer = self._take("splits"), self._take("mixer")
        if mixer is not None:
            return self._of_mixer(mixer, splits or ["train"])
        if names := self._names("registered"):
            return [{"path": f"path/to/{name}.jsonl"} for name in names]
        if several := self._take("dataset_list"):
            return [self._of_torchtune(one, "~dataset_list") for one in several]
        component, files = self._take("dataset_component"), self._take("data_files")
        name = str(component).rpartition(".")[2]
        if name in source_sections.ALPACA:
            self._alpaca("~dataset_component")
            self.recipe["data.columns"] = {"user": "instruction", "context": "input", "assistant": "output"}
        if source_sections.trains_on_input(name) and "objective.train_on" not in self.given:
            self.recipe["objective.train_on"] = "all"
            self._note("~dataset_component", "train_on_input is true where the file is silent: objective.train_on all")
        if files is not None:
            path, split = files, None
        if path is None and component is not None:
            path = source_sections.KNOWN.get(name)
            if path is None:
                path = "path/to/rows.jsonl"
                self._note("~dataset_component", "write the path of its rows in data.train")
        if path is None:
            return []
        if split is not None and "[" in str(split):
            self._change("~train_split", "write data.train.max_rows for a part of a split")
            split = str(split).partition("[")[0]
        extra = {"name": config, "split": split if split != "train" else None}
        return [{"path": path, **{key: value for key, value in extra.items() if value is not None}}]

    def _mixture(self, mixture: dict[str, Any]) -> None:
        self.other["~sources"] = mixture.get("datasets", [])
        self.places["~sources"] = self.places["~mixture"]
        for key in sorted(mixture.keys() - {"datasets"}):
            if key == "test_split_size" and mixture[key] is not None:
                try:
                    self.recipe["data.holdout"] = share(mixture[key])
                except NoCounterpart as problem:
                    self._change("~mixture", f"{key} {show(mixture[key])}: {problem}")
            elif not asks_for_nothing(mixture[key]):
                self._change("~mixture", f"{key} {show(mixture[key])}: no counterpart")

    def _of_torchtune(self, given: Any, place: str) -> dict[str, Any]:
        """A source from a section of torchtune's."""
        if not isinstance(given, dict):
            self._change(place, f"{_short(given)} is no section; write the source")
            return {"path": "path/to/rows.jsonl"}
        source, left_out = source_sections.of_torchtune(given)
        for line in left_out:
            self._change(place, line)
        return source

    def _listed(self, key: str) -> list[dict[str, Any]]:
        """The sources in a file that LLaMA-Factory v1 names, or the one that it is."""
        name = self._take(key)
        if name is None:
            return []
        if not name.endswith((".yaml", ".yml")):
            return [{"path": name}]
        path = next((one for one in (Path(name), self.folder / name) if one.is_file()), None)
        if path is None:
            self._note(f"~{key}", "no such file; write the paths of its rows, or their names on the Hub")
            return [{"path": "path/to/rows.jsonl"}]
        found, left_out = source_sections.of_listed(read_document(path).values)
        for line in left_out:
            self._change(f"~{key}", line)
        return found

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
        if any(_number_of(part) != 1 for part in mixer.values()):
            self._change("~mixer", "a fraction became weight: each epoch uses another part of the rows")
        found = []
        for path, part in mixer.items():
            weight = {"weight": part} if _number_of(part) != 1 else {}
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
                elif (theirs, value) in USUAL or (theirs == "type" and value == "pretrain"):
                    continue
                elif theirs in COLUMN_KEYS:
                    is_prompt = theirs == "field_messages" and str(source.get("type")).startswith("chat_template.")
                    columns["prompt" if is_prompt else COLUMN_KEYS[theirs]] = value
                elif theirs == "message_property_mappings" and isinstance(value, dict):
                    columns |= {one: value[one] for one in ("role", "content") if one in value}
                elif theirs == "type" and str(value).removesuffix(".default") in RECOGNIZED_TYPES:
                    types.append(value)
                else:
                    line = self._change if theirs in ("type", "shards") else self._note
                    line(f"~{key}", f"{theirs} {_short(value)}: {SOURCE_ADVICE}")
            own.setdefault("path", "path/to/rows.jsonl")
            columns = {ours: column for ours, column in columns.items() if ours != column}
            found.append({**own, **({"columns": columns} if columns else {})})
        if found and types == ["completion"] * len(found):
            self.recipe.setdefault("data.too_long", "split")
        if found and types == ["alpaca"] * len(found):
            self._alpaca(f"~{key}")
        elif "alpaca" in types:
            self._change(f"~{key}", "type alpaca: a run has one prompt; for Alpaca's, write data.chat_template: alpaca")
        return found

    def _objective(self) -> None:
        loss, preference, rl = self._take("loss_type"), self._take("pref_loss"), self._take("rl")
        loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
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
            if name == "simpo":
                self._simpo("pref_loss" in self.places.get("~pref_loss", self.places.get("~rl", "")))
            elif name == "sigmoid" and "objective.nll_weight" in self.recipe:
                self.recipe["objective.name"] = "cpo"
            elif name in ("sigmoid", "ipo", "dpo"):
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
        for own, names in {"objective.gamma": ("simpo",), "objective.nll_weight": ("cpo", "simpo")}.items():
            if name not in names and self.recipe.pop(own, None) is not None:
                self._note(own, f"goes with {' and '.join(names)} only")
        if name == "kto_zero":
            self.changes.append("objective.name kto_zero: KTO with its reference point at 0 (docs/recipes.md)")
        if name != "dpo" and "objective.label_smoothing" in self.recipe:
            self.recipe.pop("objective.label_smoothing")
            self._note("objective.label_smoothing", "goes with dpo only")
        if name != "sft" and "objective.train_on" in self.recipe:
            self.recipe.pop("objective.train_on")
            self._note("objective.train_on", f"{name} decides which tokens have loss")

    def _simpo(self, is_llama_factory: bool) -> None:
        """SimPO with the defaults of TRL (1.16, experimental/cpo/cpo_config.py), which axolotl takes, and of
        LLaMA-Factory, which has no likelihood beside it."""
        self.recipe["objective.name"] = "simpo"
        defaults = {
            "objective.beta": 0.1,
            "objective.gamma": 0.5,
            "objective.nll_weight": 0.0 if is_llama_factory else 1.0,
        }
        added = {key: value for key, value in defaults.items() if key not in self.recipe}
        self.recipe |= added
        if added:
            given = ", ".join(f"{key} {show(value)}" for key, value in added.items())
            self.notes.append(f"not in the file, so the other project's defaults hold: {given}")

    @property
    def _adapter_name(self) -> str | None:
        component = str(self.other.get("~component", "")).rpartition(".")[2]
        of_builder = next((one for one in ("qlora", "lora", "dora") if component.startswith(f"{one}_")), None)
        name: str | None = self.other.get("~adapter")
        return name or of_builder or ("lora" if self.other.get("~peft") else None)

    def _adapter(self) -> None:
        name, four, dora = self._adapter_name, self._take("4bit"), self._take("dora")
        for key in ("adapter", "component", "peft"):
            self._take(key)
        no_dropout = self._take("disable_dropout") and self._is_of_preferences
        alpha_over_rank = self._take("alpha_over_rank")
        parameters = self._take("lora_parameters")
        attention, mlp, _ = self._take("lora_attention"), self._take("lora_mlp"), self._take("lora_head")
        if self._take("8bit"):
            self._change("~8bit", "no weights in 8 bits; write adapter.name: qlora for 4 bits")
        if name is None:
            for key in [key for key in self.recipe if key.startswith("adapter.")]:
                del self.recipe[key]
                if key in self.places:
                    self._note(key, f"without an adapter, left out; {ADAPTER}")
            if four:
                self._change("~4bit", f"without an adapter, left out; {ADAPTER}")
            if parameters:
                self._note("~lora_parameters", f"without an adapter, left out; {ADAPTER}")
            return
        self.recipe["adapter.name"] = "qlora" if four else "dora" if dora and name == "lora" else name
        if four and dora:
            self._change("~dora", "does not go with weights in 4 bits; left out")
        if attention is not None:
            names = ["o_proj" if one == "output_proj" else one for one in attention]
            self.recipe["adapter.targets"] = names + (["gate_proj", "up_proj", "down_proj"] if mlp else [])
        elif mlp:
            self._change("~lora_mlp", "write adapter.targets")
        if parameters:
            self.recipe["adapter.targets"] = [*self.recipe.get("adapter.targets", []), *parameters]
        if alpha_over_rank is not None and "adapter.rank" in self.recipe and "adapter.alpha" not in self.recipe:
            self.recipe["adapter.alpha"] = alpha_over_rank * self.recipe["adapter.rank"]
            self.notes.append(
                f"not in the file: adapter.alpha {self.recipe['adapter.alpha']}, {alpha_over_rank} x rank"
            )
        if no_dropout and self.recipe.pop("adapter.dropout", 0):
            self._note("adapter.dropout", "left out: preferences are trained without dropout there (disable_dropout)")
        if "adapter.targets" not in self.recipe:
            self.changes.append(
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
        elif self.other.get("~warmup_of_axolotl"):
            self.recipe["schedule.warmup_steps"] = warmup = _warmup_of_axolotl(self.recipe.get("run.max_steps"))
            self.notes.append(f"not in the file: schedule.warmup_steps {warmup}, axolotl's, at most 100 steps")
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
            per_epoch = f"run.{what}s_per_epoch"
            strategy, steps = self._take(f"{what}_strategy"), self._take(f"{what}_steps")
            strategy = "no" if strategy is False else strategy
            if strategy in (None, "steps") and steps and steps >= 1:
                self.recipe[key] = int(steps)
            elif strategy in (None, "steps") and steps:
                self._note(f"~{what}_steps", f"a share of the run; {advice}")
            elif strategy == "epoch":
                self.recipe.setdefault(per_epoch, 1)
                if steps:
                    self._note(f"~{what}_steps", f"{what}_strategy is epoch; left out")
            elif strategy not in (None, "no"):
                self._note(f"~{what}_strategy", advice)
            elif strategy == "no" and steps:
                self._note(f"~{what}_steps", f"{what}_strategy is no; left out")
            if key in self.recipe and self.recipe.pop(per_epoch, None) is not None:
                self._note(per_epoch, f"{key} {self.recipe[key]} holds; left out")
        self._best()
        if (keep := self._take("keep")) is not None:
            self.recipe["run.keep_last"] = max(2, keep)
            if keep < 2:
                self._note("~keep", "run.keep_last is at least 2, as a crash may damage the newest")

    def _best(self) -> None:
        """What needs held-out rows, or checkpoints that are evaluated."""
        has_rows = self.recipe.get("data.eval") or self.recipe.get("data.holdout")
        for key in ("run.evals_per_epoch", "run.early_stopping_patience"):
            if not has_rows and key in self.places and self.recipe.pop(key, None):
                self._note(key, f"left out, as there are no held-out rows; {EVALUATION}")
        if self._take("load_best"):
            names = ("save_every_steps", "eval_every_steps"), ("evals_per_epoch", "saves_per_epoch")
            counts = [[self.recipe.get(f"run.{name}", 0) for name in pair] for pair in names]
            if any(first and second and first % second == 0 for first, second in counts):
                self.recipe |= {"run.export": "best", "run.keep_best": 1}
            else:
                self._note(
                    "~load_best", "only where each checkpoint is evaluated: write run.export: best and keep_best: 1"
                )

    @property
    def distribution(self) -> dict[str, Any]:
        """Properties of a strategy."""
        return {key.removeprefix("strategy."): value for key, value in self.other.items() if key[0] != "~"}


SOURCE_KEYS = {key: key for key in ("path", "name", "split", "revision", "weight")}
SOURCE_KEYS |= {"id": "path", "data_files": "path", "config": "name"}
COLUMN_KEYS = {"field_chosen": "chosen", "field_rejected": "rejected", "text_column": "text", "field": "text"}
COLUMN_KEYS |= {"field_messages": "messages", "message_field_role": "role", "message_field_content": "content"}
USUAL = (("roles_to_train", ["assistant"]), ("train_on_eos", "turn"), ("ds_type", "json"), ("train_on_split", "train"))
"""What axolotl's keys of a data set are where a file is silent, or what the rows show."""
RECOGNIZED_TYPES = ("alpaca", "chat_template", "completion", "sharegpt")
SOURCE_ADVICE = "no counterpart; the shape of rows is recognized, and data.columns maps the rest"


def _named_strategy(stem: str) -> str:
    """The end of a message about a file of DeepSpeed's that is not there, if its name says what it has."""
    if stem in known_strategies():
        return f"; or, by its name, write strategy: {stem}"
    meaning = MEANINGS["strategy"].get(stem.lower())
    return f"; or, by its name, {meaning.replace('write', 'write strategy:')}" if meaning else ""


def _warmup_of_axolotl(max_steps: int | None) -> float:
    """Where a file has none: `_configure_warmup_and_logging` in its core/builders/base.py."""
    if max_steps is None:
        return 0.03
    steps = min(int(0.03 * max_steps), 100)
    return 2 if steps == 1 else steps


def _name_in(place: str) -> str:
    """The key in `file:line: key is value`."""
    return place.partition(" is ")[0].rpartition(": ")[2]


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
        is_value = dotted in project.keys and not any(key.startswith(f"{dotted}.") for key in project.keys)
        if isinstance(value, dict) and not is_value:
            yield from _leaves(value, project, here)
        elif value is not None and not (value == "auto" and project is PROJECTS["deepspeed"]):
            yield here, value
