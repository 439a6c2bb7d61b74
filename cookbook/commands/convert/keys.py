"""The keys of a recipe from those of converted files: by `cookbook.config.foreign` where one has one counterpart, and
here what is derived from several.
"""

import math
import re
from pathlib import Path
from typing import Any, get_args

from cookbook.commands.convert import converted_rounds
from cookbook.commands.convert.collected import CollectedKeys
from cookbook.commands.convert.converted_rows import derive_rows, read_test_split
from cookbook.config.foreign import OPTIMIZERS, Project, meaning_of, tables
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import known_strategies
from cookbook.system.files import MAX_CHOICES, Document, read_document, show
from cookbook.system.registry import NamedSection, Section


class Conversion(CollectedKeys):
    """A recipe's keys, those that depend on several of theirs too."""

    def derive(self, project: Project | None) -> None:
        """The keys that depend on several of theirs, and their defaults."""
        self.is_of_training = project is not None
        if project is not None:
            self._find_objective(project)
        has_rounds = project is not None and converted_rounds.asks_for_rounds(self)
        self._strategy_files()
        if (seed := self.take("data_seed")) is not None and self.recipe.setdefault("seed", seed) != seed:
            self.change(
                "~data_seed", f"seed is {self.recipe['seed']}, which is that of the order of rows too: left out"
            )
        self._logger()
        self._precision()
        self._optimizer()
        self._template()
        if not has_rounds:
            read_test_split(self, project)
        derive_rows(self, project)
        if has_rounds:
            converted_rounds.derive_objective(self)
        else:
            converted_rounds.leave_out_rounds(self)
            self._objective(project)
        if project is not None:
            self._plugins(project)
            self._defaults(project)
            self.changes += project.always
            self._offload()
        self._held_out_percent()
        self._loss_scale()
        self._half_weights()
        self._adapter()
        self._restarts()
        self._least_rate()
        accumulation = self.other.get("~accumulation", 1)
        if project is not None and not project.warms_up_constant:
            self._spare_warm_up()
        self._length_and_batch()
        is_flat = self._convert_flattening()
        self._packed_by_script()
        if project is not None and not is_flat:
            self._convert_packing(project)
        self._evaluation_and_saving()
        if has_rounds:
            converted_rounds.derive_rounds(self, accumulation)
        betas = [self.take("beta1"), self.take("beta2")]
        if betas != [None, None]:
            name = "~beta1" if betas[0] is not None else "~beta2"
            self.settle("optim.betas", [betas[0] or 0.9, betas[1] or 0.999], name)
        self._left_open(project)

    def _find_objective(self, project: Project) -> None:
        """The objective of the method that the program names or, where that names none, the file or its folder does,
        if it has all keys of the file."""
        methods, file, text = project.methods, Path(self.files[0]), ""
        if project.program is not None and self.program:
            self._compare_program(project)
        if self.method is None:
            fitting = project.methods_with(self.keys_of_files)
            named = {part: project.find_method(part) for part in (file.stem, file.parent.name)}
            text, self.method = next((pair for pair in named.items() if pair[1] in fitting), ("", None))
            if self.method is not None and methods[self.method] is not None:
                self.notes.append(f"taken for {self.method.removesuffix('Config')} by its path, {file}")
        if self.method is None and (methods or project.program is not None):
            self._name_meaning()
        if self.method is not None:
            self.objective = project.objective_of(self.method, text or self.program)
            if self.objective is None:
                key = project.classes.get(self.method)
                why = key.why if key is not None else NO_SUCH
                name = self.method.removesuffix("Config")
                self.add(self.others, f"{file}: {self.program or 'its path'} is {name}", why)

    def _name_meaning(self) -> None:
        """Name what a word of a program means as an objective, as in `prm.py`, unless that is SFT."""
        for word in dict.fromkeys(re.findall(r"[a-z0-9]+", self.program.lower())):
            if (meaning := meaning_of("objective.name", word)) is not None and "write sft" not in meaning:
                self.changes.append(f"{self.program} has {word} in its name: {meaning}")

    def _compare_program(self, project: Project) -> None:
        """Name a program that has the keys of a project's own: it may train otherwise."""
        program = str(project.program)
        trl = tables().projects["trl"]
        method = trl.find_method(self.program)
        if method is not None:
            name = trl.methods[method]
            advice = f"write objective.name: {name}" if name is not None else "which is not here"
            if name != self.recipe.get("objective.name", project.defaults.get("objective.name", "sft")):
                self.changes.append(f"{self.program} is {method.removesuffix('Config')} by its name: {advice}")
        elif not re.search(program, self.program):
            self.changes.append(f"{self.program} has keys of another program, for which it is taken: {program}.py")

    def _plugins(self, project: Project) -> None:
        """Sort axolotl's plugins, each as what stands for the class of its arguments."""
        for path in self.take("plugins", []):
            name = path.rpartition(".")[2]
            stem = name.removesuffix("Plugin")
            key = project.classes.get(f"{stem}Args") or project.classes.get(f"{stem}Config")
            if key is not None and key.cost == "idle":
                self.idle.append(name)
                continue
            place = f"{self.places['~plugins'].partition(' is ')[0]} has {name}"
            if key is None:
                self.notes.append(f"{place}: {project.keys['plugins'].why}")
            else:
                self.add(self.others if key.cost == "refuse" else self._lines(key), place, key.why)

    def _logger(self) -> None:
        """The arguments of torchtune's logger, which are wandb's where it is that."""
        for option in ("project", "entity", "group", "mode"):
            if (value := self.take(f"logger.{option}")) is None:
                continue
            place = self.places[f"~logger.{option}"]
            if "wandb" in self.recipe.get("run.trackers", []):
                self.recipe[f"run.trackers.wandb.{option}"] = value
                self.places[f"run.trackers.wandb.{option}"] = place
            else:
                self.notes.append(f"{place}: of a tracker that the recipe has not; left out")

    def _optimizer(self) -> None:
        """An optimizer that a class names. Adam without a decay is AdamW without one."""
        if (name := self.take("optimizer")) is None:
            return
        is_adam = name.lower() == "torch.optim.adam" and not self.recipe.get("optim.weight_decay")
        try:
            self.recipe["optim.name"] = "adamw" if is_adam else OPTIMIZERS[name.lower()]
        except KeyError:
            meaning = meaning_of("optim.name", name.lower().rpartition(".")[2]) or "an optimizer that is not here"
            self.add(self.others, self.places["~optimizer"], meaning)
        if is_adam:
            self.recipe["optim.weight_decay"] = 0.0

    def _precision(self) -> None:
        """mixed_precision from switches for fp8, bf16 and fp16; one that is off says nothing beside one that is on, and
        fp8 computes in bf16 what it has not."""
        switches = {name: self.take(name) for name in ("fp8", "bf16", "fp16")}
        on = sorted((name for name in switches if switches[name]), key=lambda name: self._rank(self.places[f"~{name}"]))
        on = ["fp8"] if "fp8" in on else on
        for name in on:
            self.settle("mixed_precision", name, f"~{name}")
        if not on and False in switches.values():
            self.settle("mixed_precision", "no", "~bf16" if switches["bf16"] is False else "~fp16")

    def _half_weights(self) -> None:
        """Name a training whose weights are in half precision, and not float32 beside it: axolotl's `bf16: full` and
        LLaMA-Factory's `pure_bf16`, and axolotl's without an adapter (`torch_dtype` in its loaders/model.py)."""
        precision, is_usual = self.recipe.get("mixed_precision"), self.take("half_weights")
        if str(self.values.get("bf16")).lower() == "full" or self.values.get("pure_bf16") is True:
            self.change("~bf16", HALF_WEIGHTS)
        elif is_usual and self._adapter_name is None and precision in ("bf16", "fp16") and not self.distribution:
            self.changes.append(
                f"without an adapter, and unless DeepSpeed or FSDP keeps them in float32, {HALF_WEIGHTS} {precision}"
            )

    def _offload(self) -> None:
        if self.take("activation_offloading"):
            self.recipe["model.gradient_checkpointing"] = "offload"
            self.note(
                "~activation_offloading",
                "gradient_checkpointing offload keeps the inputs of layers in host memory, and recomputes the rest",
            )

    def _left_open(self, project: Project | None) -> None:
        """Name the keys of a JSON's scheduler and optimizer that whoever trains fills in, where no file has them. A
        warm-up has no default.
        """
        for place, key in self.open:
            ours, dotted = str(key.ours), place.rpartition(": ")[2]
            has_value = ours in self.recipe or ours in self.given
            if ours == "schedule.warmup_steps" and ours not in self.recipe:
                shape = self.recipe.pop("schedule.warmup", None)
                self.changes.append(
                    f"{place} is 'auto', and no file has a number; {key.answer}, and schedule.warmup: {shape}"
                )
            elif dotted.startswith(("scheduler.", "optimizer.")) and project is None and not has_value:
                self.notes.append(f"{place} is 'auto', and no file has a value; {key.answer}")
            else:
                self.idle.append(dotted)

    @property
    def _objective_name(self) -> str:
        return str(self.recipe.get("objective.name", "sft"))

    @property
    def _is_of_preferences(self) -> bool:
        return self._objective_name not in ("sft", "cpt")

    def _defaults(self, project: Project) -> None:
        own = project.own_defaults(self._objective_name, self.keys_of_files)
        is_default = "~adapter" in own and "~adapter" not in self.given
        has_adapter = self._adapter_name is not None or is_default
        own |= project.of_adapters if has_adapter else {}
        self.own_defaults = own
        values = {key: value for key, value in own.items() if key not in self.given and key not in self.recipe}
        self.other |= {key: value for key, value in values.items() if key[0] == "~"}
        added = {
            key: value
            for key, value in values.items()
            if (key in project.defaults or is_other(key, value, self.recipe))
            and self._holds(key, has_adapter=has_adapter)
        }
        self.recipe |= added
        self._release(project)
        for path, line in project.silent_differences(self._objective_name, self.keys_of_files):
            if "dropout" not in path or self.recipe.get("adapter.dropout"):
                self.changes.append(line)
        if added:
            given = ", ".join(f"{key} {show(value)}" for key, value in added.items())
            self.notes.append(f"not in the file, so the defaults of {project.name} hold: {given}")
        if "objective.train_on" in added:
            self.notes.append(
                f"{project.name} trains only on the completion of rows with prompt and completion; for those write"
                " objective.train_on: assistant"
            )
        if self.take("cut_in_proportion") and not self.recipe.keys() & {"data.too_long", "data.streaming"}:
            self._proportion()
        if self.take("joins_texts") and self._objective_name == "cpt" and self.recipe.get("data.packing") is not False:
            self.changes.append(
                f"{project.name} joins all texts and cuts them into blocks of data.max_length tokens, which its batch"
                " counts; here the batch has texts, longer ones in several parts, and none attends to another"
            )
        if self.take("drops_last") and "run.max_steps" not in self.recipe:
            self.changes.append(f"the last batch of an epoch may be smaller, where {project.name} leaves its rows out")
        if self.take("no_limit") and "data.max_length" not in self.recipe:
            self.recipe["data.too_long"] = "error"
            self.notes.append("no length in the file: a row of more than data.max_length, 2048, is an error; raise it")

    def _release(self, project: Project) -> None:
        """Name the defaults of GRPO that hold where a file has keys that TRL has not: an earlier release had others, as
        beta 0.04 in the place of 0.0."""
        known = {path.partition(".")[0] for path in project.fields}
        strange = [path for path in self.keys_of_training if path.partition(".")[0] not in known]
        silent = project.defaults_of_method(self._objective_name, self.keys_of_files)
        if strange and silent and self._objective_name == "grpo":
            given = ", ".join(f"{path} {show(value)}" for path, value in silent.items())
            self.changes.append(
                f"{', '.join(strange[:MAX_CHOICES])}{', ...' * (len(strange) > MAX_CHOICES)}: no key of"
                f" {project.name_with_version}, so the file may be of another release, with other defaults; where it is"
                f" silent, those of this one hold: {given}"
            )

    def _held_out_percent(self) -> None:
        """run_clm.py's part of a data set that has no validation split."""
        percent = self.take("percent_held_out")
        if percent and "data.eval" not in self.recipe and not self.recipe.get("data.streaming"):
            self.recipe["data.holdout"] = percent / 100
            if "~dataset" in self.places:
                self.notes.append(
                    "data.holdout is for a data set without a split validation; with one, write data.eval in its place"
                )

    def _proportion(self) -> None:
        """LLaMA-Factory's `infer_seqlen` (data/processor/processor_utils.py)."""
        if self._objective_name != "cpt":
            self.changes.append(
                "a row above data.max_length loses its end, where LLaMA-Factory cuts prompt and answer in proportion;"
                " data.too_long: drop leaves such rows out"
            )

    def _holds(self, key: str, *, has_adapter: bool) -> bool:
        """Return whether a default applies to this training."""
        if key[0] == "~" or (key.startswith("adapter.") and not has_adapter):
            return False
        if self._objective_name == "grpo" and key in converted_rounds.NOT_IN_ROUNDS:
            return False
        if key == "run.num_epochs":
            return "run.max_steps" not in self.recipe
        if key == "data.shuffle_rows":
            return bool(self.recipe.get("data.streaming"))
        if key == "run.saves_per_epoch" and "~steps_per_epoch" in self.other:  # of other epochs than the data's
            return False
        if key in ("run.save_every_steps", "run.saves_per_epoch"):
            is_given = self.given & {"~save_strategy", "~save_steps", "run.save_every_steps", "run.saves_per_epoch"}
            is_short = self.recipe.get("run.max_steps", math.inf) <= (500 if key == "run.save_every_steps" else 0)
            return not is_given and not is_short and not self.recipe.get("data.streaming")
        if (
            key == "adapter.dropout"
            and self._is_of_preferences
            and self._objective_name != "grpo"
            and self.other.get("~disable_dropout")
        ):
            return False
        return not (key == "optim.weight_decay" and self.recipe.get("optim.name") == "sgd")  # torch's has none

    def _loss_scale(self) -> None:
        """Drop DeepSpeed's loss scale without fp16: files have its keys beside bf16 too."""
        keys = [key for key in self.recipe if key.startswith("loss_scale.")]
        if self.recipe.get("mixed_precision") != "fp16":
            for key in keys:
                del self.recipe[key]
                self.idle.append(_name_in(self.places[key]))
        elif "strategy.zero_stage" in self.other:
            for key, value in tables().projects["deepspeed"].defaults.items():
                self.recipe.setdefault(key, value)

    def _template(self) -> None:
        text = self.take("template")
        if text is None:
            return
        if "data.chat_template" in self.recipe:
            self.change("~template", f"left out; data.chat_template is {self.recipe['data.chat_template']}")
        elif "{%" in text or "{{" in text:
            self.template = text
        else:
            self.recipe["data.chat_template"] = text

    def _strategy_files(self) -> None:
        """A DeepSpeed JSON, inline or by path, and FSDP in one line."""
        named = self.take("deepspeed")
        if isinstance(named, dict):
            self.read(Document(f"{self.places['~deepspeed']}", named), tables().projects["deepspeed"])
        elif named is not None:
            if (path := self.find(str(named))) is None:
                known = _named_strategy(Path(str(named)).stem)
                self.note("~deepspeed", f"no such file; give it to `convert` beside this one{known}")
            else:
                self.read(read_document(path, takes_last=True), tables().projects["deepspeed"])
        for key, value in (self.take("fsdp") or {}).items():
            self.other.setdefault(f"strategy.{key}", value)
        if (named := self.take("accelerate_config")) is not None:
            self._accelerate_file(str(named))

    def _accelerate_file(self, named: str) -> None:
        """A file of accelerate's that a file of TRL's names, or one of those in TRL's own folder (its cli/
        accelerate_config.py), which have 8 processes and neither offload nor shard a part only."""
        if (path := self.find(named)) is not None:
            self.read(read_document(path, takes_last=True), tables().projects["accelerate"])
        elif named in OF_TRL:
            for key, value in OF_TRL[named].items():
                self.other.setdefault(f"strategy.{key}", value)
            if named != ONE_GPU:
                self.other.setdefault("~processes", 8)
                self.note("~accelerate_config", "TRL's file has 8 processes, unless num_processes or a flag says so")
        else:
            self.note("~accelerate_config", "no such file; give it to `convert` beside this one")

    def _other_objectives(self, project: Project) -> list[str]:
        """Our objectives beside SFT whose methods have all keys of the files."""
        fitting = (project.methods[name] for name in project.methods_with(self.keys_of_files))
        return [objective for objective in fitting if objective not in (None, "sft")]

    def _objective(self, project: Project | None) -> None:
        loss, preference, rl = self.take("loss_type"), self.take("pref_loss"), self.take("rl")
        loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
        component = str(self.take("loss", "")).rpartition(".")[2].lower()
        if preference is not None:
            if self.recipe.get("objective.name") == "dpo":
                loss = preference
            else:
                self.note("~pref_loss", "goes with stage dpo; left out")
        if "dpo" in component:
            loss = "sigmoid"
        elif component and not re.match(r"ce|.*cross_?entropy", component):
            is_online = any(method in component for method in ONLINE)
            self.add(self.others, self.places["~loss"], SAMPLED if is_online else NO_SUCH)
        if (ratio := self.take("gamma_over_beta")) is not None:
            self._simpo_of_its_authors(ratio)
        for name in (rl, loss):
            if self.objective == "cpo" and name == "sigmoid":
                self.recipe["objective.name"] = "cpo"
            elif self.objective == "cpo" and name in ("hinge", "ipo"):
                self.add(self.others, self.places["~loss_type"], NO_SUCH)
            elif name == "simpo":
                self._simpo("pref_loss" in self.places.get("~pref_loss", self.places.get("~rl", "")))
            elif name == "sigmoid" and "objective.nll_weight" in self.recipe:
                self.recipe["objective.name"] = "cpo"
            elif name in ("sigmoid", "ipo", "dpo"):
                self.recipe["objective.name"] = "dpo"
                self.recipe |= {"objective.loss": "ipo"} if name == "ipo" else {}
            elif name in ("orpo", "kto", "apo_zero_unpaired"):
                self.recipe["objective.name"] = "orpo" if name == "orpo" else "kto_zero"
            elif name not in (None, "nll", "chunked_nll"):
                place = next(self.places[key] for key in ("~rl", "~pref_loss", "~loss_type") if key in self.places)
                meanings = (meaning_of(key, str(name)) for key in ("objective.name", "objective.loss_type"))
                why = SAMPLED if name in ONLINE else next(filter(None, meanings), NO_SUCH)
                self.add(self.others, place, why)
        if "objective.name" not in self.recipe and self.objective == "simpo":
            self._simpo(is_llama_factory=False)
        elif "objective.name" not in self.recipe and self.objective not in (None, "sft"):
            self.recipe["objective.name"] = self.objective
        elif "objective.name" not in self.recipe and self.objective is None:
            if self.recipe.keys() & {"objective.desirable_weight", "objective.undesirable_weight"}:
                self.recipe["objective.name"] = "kto_zero"
            elif "objective.center_rewards_coefficient" in self.recipe:
                self.recipe["objective.name"] = "reward"
            elif "objective.beta" in self.recipe:
                self.recipe["objective.name"] = "dpo"
                self.note("objective.beta", "taken for DPO; for ORPO write objective.name: orpo, for KTO kto_zero")
            elif project is not None and (others := self._other_objectives(project)):
                self.changes.append(
                    f"{self.program or 'the file'} names no method, and the keys fit several: taken for supervised"
                    f" fine-tuning; for another write objective.name: {', '.join(others)}"
                )
        name = self.recipe.get("objective.name", "sft")
        for key, names in {"objective.gamma": ("simpo",), "objective.nll_weight": ("cpo", "simpo")}.items():
            if name not in names and self.recipe.pop(key, None) is not None:
                self.note(key, f"goes with {' and '.join(names)} only")
        if name == "kto_zero" and loss != "apo_zero_unpaired":  # TRL's name for the same loss
            self.changes.append("objective.name kto_zero: KTO with its reference point at 0 (docs/recipes.md)")
        if name != "dpo" and "objective.label_smoothing" in self.recipe:
            self.recipe.pop("objective.label_smoothing")
            self.note("objective.label_smoothing", "is that of dpo in such a file")
        if name != "sft" and "objective.train_on" in self.recipe:
            self.recipe.pop("objective.train_on")
            self.note("objective.train_on", f"{name} decides which tokens have loss")

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

    def _simpo_of_its_authors(self, ratio: float) -> None:
        """SimPO with the keys and defaults of princeton-nlp/SimPO (scripts/simpo_config.py): the margin over beta,
        and no likelihood beside it."""
        beta = self.recipe.setdefault("objective.beta", 2.0)
        self.recipe |= {
            "objective.name": "simpo",
            "objective.gamma": float(f"{ratio * beta:.6g}"),
            "objective.nll_weight": 0.0,
        }
        self.note(
            "~gamma_over_beta", f"SimPO by its authors' key: objective.gamma is {ratio} x beta {beta}, nll_weight 0"
        )

    @property
    def _adapter_name(self) -> str | None:
        component = str(self.other.get("~component", "")).rpartition(".")[2]
        of_builder = next((prefix for prefix in ("qlora", "lora", "dora") if component.startswith(f"{prefix}_")), None)
        name: str | None = self.other.get("~adapter")
        return name or of_builder or ("lora" if self.other.get("~peft") else None)

    def _adapter(self) -> None:
        name, four, dora = self._adapter_name, self.take("4bit"), self.take("dora")
        for key in ("adapter", "component", "peft"):
            self.take(key)
        is_asked = self._is_of_preferences and (self._objective_name != "grpo" or "~disable_dropout" in self.given)
        no_dropout = self.take("disable_dropout") and is_asked  # TRL's GRPO keeps it where a file is silent
        alpha_over_rank = self.take("alpha_over_rank")
        parameters, all_linear = self.take("lora_parameters"), self.take("all_linear")
        attention, mlp, _ = self.take("lora_attention"), self.take("lora_mlp"), self.take("lora_head")
        if self.take("8bit"):
            self.change("~8bit", "no weights in 8 bits; write adapter.name: qlora for 4 bits")
        if name is None:
            for key in [key for key in self.recipe if key.startswith("adapter.")]:
                del self.recipe[key]
                if key in self.places:
                    self.note(key, f"without an adapter, left out; {tables().texts['adapter']}")
            if four:
                self.change("~4bit", f"without an adapter, left out; {tables().texts['adapter']}")
            if parameters:
                self.note("~lora_parameters", f"without an adapter, left out; {tables().texts['adapter']}")
            return
        self.recipe["adapter.name"] = "qlora" if four else "dora" if dora and name == "lora" else name
        if four and dora:
            self.change("~dora", "does not go with weights in 4 bits; left out")
        if attention is not None:
            names = ["o_proj" if layer == "output_proj" else layer for layer in attention]
            self.recipe["adapter.targets"] = names + (["gate_proj", "up_proj", "down_proj"] if mlp else [])
        elif mlp:
            self.change("~lora_mlp", "write adapter.targets")
        if all_linear:
            self.recipe["adapter.targets"] = ["all-linear"]
        if parameters:
            self.recipe["adapter.targets"] = [*self.recipe.get("adapter.targets", []), *parameters]
        if alpha_over_rank is not None and "adapter.rank" in self.recipe and "adapter.alpha" not in self.recipe:
            self.recipe["adapter.alpha"] = alpha_over_rank * self.recipe["adapter.rank"]
            self.notes.append(
                f"not in the file: adapter.alpha {self.recipe['adapter.alpha']}, {alpha_over_rank} x rank"
            )
        if no_dropout and (dropout := self.recipe.pop("adapter.dropout", None)) is not None:
            if dropout:
                self.note("adapter.dropout", "left out: preferences are trained without dropout (disable_dropout)")
            elif "adapter.dropout" in self.places:
                self.idle.append(_name_in(self.places["adapter.dropout"]))
        if "adapter.targets" not in {*self.recipe, *self.own_defaults}:
            self.changes.append(
                "no layers for the adapter in the file: adapter.targets is all-linear; peft may take fewer"
            )

    def _restarts(self) -> None:
        """transformers' cosine with restarts, which with one cycle, as where a file is silent, is the cosine."""
        cycles = self.values.get("lr_scheduler_kwargs.num_cycles", 1)
        if str(self.written.get("schedule.name")).lower() == "cosine_with_restarts" and cycles != 1:
            meaning = meaning_of("schedule.name", "cosine_with_restarts") or NO_SUCH
            self.add(self.others, self.places["schedule.name"], meaning)

    def _least_rate(self) -> None:
        share, peak = self.take("min_share"), self.recipe.get("optim.learning_rate")
        is_cosine = self.recipe.get("schedule.name", "cosine") == "cosine"
        if share and peak is None:
            self.note("~min_share", "a share of a peak that the file has not; write schedule.min_learning_rate")
        elif share and not is_cosine and _name_in(self.places["~min_share"]) == OF_COSINE:
            self.idle.append(OF_COSINE)
        elif share:
            self.settle("schedule.min_learning_rate", float(f"{share * peak:.6g}"), "~min_share")
        if self.recipe.get("schedule.name") == "constant" and "schedule.min_learning_rate" in self.recipe:
            del self.recipe["schedule.min_learning_rate"]
            self.idle.append(_name_in(self.places["schedule.min_learning_rate"]))
        if self.take("decay_type") is None and self.recipe.get("schedule.name") == "wsd":
            self.changes.append("not in the file: its decay is half a cosine, and that of schedule.name wsd is linear")

    def _length_and_batch(self) -> None:
        of_scheduler = " is " in (place := self.places.get("run.max_steps", "")) and ": scheduler.params." in place
        if of_scheduler and (self.is_of_training or "run.num_epochs" in self.recipe):
            steps = self.recipe.pop("run.max_steps")
            epochs = self.recipe.setdefault("run.num_epochs", self.own_defaults.get("run.num_epochs", 1))
            self.change("run.max_steps", f"the rate ends at step {steps} there; the run has run.num_epochs {epochs}")
        if "run.max_steps" in self.recipe and "run.num_epochs" in self.recipe:
            del self.recipe["run.num_epochs"]
            self.note("run.num_epochs", "max_steps has precedence; left out")
        if (steps := self.take("steps_per_epoch")) is not None:
            self._steps_of_epochs(steps)
        if (size := self.take("packed_size")) is not None:
            if self.recipe.get("data.max_length", size) < size:
                self.change(
                    "data.max_length",
                    f"samples are cut there before they are packed; here data.max_length {size} is that of both",
                )
            self.recipe |= {"data.packing": True, "data.max_length": size}
            self.places.setdefault("data.packing", self.places["~packed_size"])
        warmup, ratio = self.take("warmup"), self.take("warmup_ratio")
        if warmup:  # transformers 5 reads a share here too
            self.settle("schedule.warmup_steps", warmup if warmup < 1 else int(warmup), "~warmup")
        elif ratio:
            self.settle("schedule.warmup_steps", ratio, "~warmup_ratio")
        elif warmup == 0 and "schedule.warmup_steps" in self.recipe:
            self.settle("schedule.warmup_steps", 0, "~warmup")
        elif self.other.get("~warmup_of_axolotl"):
            self.recipe["schedule.warmup_steps"] = warmup = _warmup_of_axolotl(self.recipe.get("run.max_steps"))
            self.notes.append(f"not in the file: schedule.warmup_steps {warmup}, axolotl's, at most 100 steps")
        self._schedule_of_automodel()
        micro, accumulation = self.recipe.get("batch.micro_batch_size"), self.take("accumulation")
        listed, mesh = self.take("processes"), self.other
        self.processes = self.processes or listed
        given = self.recipe.get("batch.global_batch_size")
        if micro is None:
            self._spare_accumulation(accumulation)
            return
        per_copy = mesh.get("strategy.tp_size", 1) * mesh.get("strategy.sp_size", 1)
        copies = max(1, (self.processes or 1) // per_copy)
        size = micro * (accumulation or 1) * copies
        of_micro = self.places.get("batch.micro_batch_size", "")
        of_batch = self.places.get("batch.global_batch_size", "")
        if given and given % size == 0 and accumulation is None and self._rank(of_micro) == self._rank(of_batch):
            size = given  # DeepSpeed derives the accumulation: runtime/config.py, _set_batch_related_parameters
        if given is None:
            self.recipe["batch.global_batch_size"] = size
        elif self.processes is not None and given != size:
            product = f"{micro} x accumulation {accumulation or 1} x {copies} processes"
            self.changes.append(f"{of_batch}: but {size} = {product}, from {of_micro}")
            if self._rank(of_micro) < self._rank(of_batch):
                self.recipe["batch.global_batch_size"] = size
        elif given is not None:
            self._spare_accumulation(accumulation, copies)
        if given is None and self.processes is None:
            self.notes.append(
                f"batch.global_batch_size {size} = {micro} x accumulation {accumulation or 1} x 1 process: the file has"
                " no number of GPUs; multiply by that of your runs, or give --processes"
            )

    def _spare_warm_up(self) -> None:
        """Leave out a warm-up beside transformers' `constant`, which has none (`get_scheduler`)."""
        if self.written.get("schedule.name") != CONSTANT:
            return
        for name in ("warmup", "warmup_ratio"):
            if self.take(name):
                self.note(f"~{name}", f"of no effect there, where the rate is {CONSTANT}: left out")
        self.take("warmup_of_axolotl")

    def _steps_of_epochs(self, steps: int) -> None:
        """torchtune's limit of an epoch: a checkpoint is saved after it, and the next epoch begins anew
        (`_steps_per_epoch` in its recipes)."""
        epochs = self.recipe.pop("run.num_epochs", None) or 1
        self.recipe["run.max_steps"] = steps * epochs
        set_here, in_place = f"run.max_steps {steps * epochs}", f"run.num_epochs: {epochs}"
        if "~save_steps" not in self.given:
            self.recipe["run.save_every_steps"] = steps
            set_here, in_place = f"{set_here} and save_every_steps {steps}", f"{in_place} and saves_per_epoch: 1"
        self.change(
            "~steps_per_epoch",
            f"the most steps of an epoch there: {set_here} are those of {epochs} such epoch{'s' * (epochs > 1)}. If an"
            f" epoch of your rows has fewer steps, write {in_place} in their place"
            + ("; if it has more, a new one begins there, and here it goes on" if epochs > 1 else ""),
        )

    def _schedule_of_automodel(self) -> None:
        """Warm-up and least rate of a section `lr_scheduler` that is silent about them: `LRSchedulerConfig.build` in
        Automodel's components/optim/optimizer.py."""
        has_section = any(key.startswith("lr_scheduler.") for key in self.keys_of_files)
        if not self.take("warmup_of_automodel") or not has_section:
            return
        added: dict[str, float] = {}
        if "schedule.warmup_steps" not in self.given:
            added["schedule.warmup_steps"] = 0.1
        if "schedule.min_learning_rate" not in self.given and self.recipe.get("schedule.name", "cosine") != "constant":
            added["schedule.min_learning_rate"] = float(f"{0.01 * self.recipe.get('optim.learning_rate', 0.001):.6g}")
        self.recipe |= added
        if added:
            given = ", ".join(f"{key} {show(value)}" for key, value in added.items())
            self.notes.append(f"not in the file: {given}, Automodel's; its warm-up is at most 1000 steps")

    def _spare_accumulation(self, accumulation: int | None, copies: int = 1) -> None:
        """Name an accumulation from which no batch can be computed, or that is another than that of the batches.

        Args:
            copies: data-parallel processes.
        """
        size, micro = self.recipe.get("batch.global_batch_size"), self.recipe.get("batch.micro_batch_size")
        if accumulation is None:
            return
        if size is None or micro is None:
            advice = (
                "the batch of a step is batch.global_batch_size = micro_batch_size x this x data-parallel processes"
            )
            self.note("~accumulation", advice)
        elif size != micro * accumulation * copies:
            self.change(
                "~accumulation",
                f"left out: batch.global_batch_size is {size} already, from {self.places['batch.global_batch_size']}",
            )

    def _convert_flattening(self) -> bool:
        """Packing of the samples of a batch, which counts these as any batch does. Return whether there is no other."""
        if not self.take("flattens") or self.recipe.get("data.packing"):
            return False
        self.recipe["data.packing"], self.places["data.packing"] = True, self.places["~flattens"]
        return True

    def _packed_by_script(self) -> None:
        """Packing by the handbook's scripts that read `dataset_mixer`, whatever the file says: scripts/run_sft.py and
        run_cpt.py of v0.2.0 and v0.3.0, with a release of TRL that joins samples and cuts."""
        if "~mixer" not in self.places or self._objective_name not in ("sft", "cpt"):
            return
        if self.recipe.get("data.packing") is False:
            self.change("data.packing", "left out: the script that reads dataset_mixer packs in any case")
        if not self.recipe.get("data.packing"):
            self.recipe["data.packing"], self.places["data.packing"] = True, self.places["~mixer"]
        self.change(
            "~mixer",
            "the script that reads it packs, whatever the file says (packing=True in run_sft.py), so data.packing is"
            " true; there all samples are joined and cut into rows of one length, in which each attends to those before"
            " it, and here packed samples are whole, and none attends to another",
        )

    def _convert_packing(self, project: Project) -> None:
        """Name the unit of a batch of packed rows, where the project packs before it draws batches, and cuts."""
        is_of_texts = "text_completion" in self.places.get("~dataset_component", "")  # torchtune packs others whole
        if self.take("cuts_packed") and is_of_texts and self.recipe.get("data.packing"):
            self.change(
                "~dataset_component",
                "a text is cut where its packed row is full, and the next row goes on with it (split_across_pack); here"
                " packed texts are whole",
            )
        size, micro = self.recipe.get("batch.global_batch_size"), self.recipe.get("batch.micro_batch_size")
        if (
            not project.packs_first
            or self._objective_name not in ("sft", "cpt")
            or (self._objective_name == "cpt" and self.own_defaults.get("~joins_texts"))  # which has its own line
            or self.recipe.get("data.packing") is not True
            or None in (size, micro)
        ):
            return
        length = self.recipe.get("data.max_length", self.own_defaults.get("data.max_length", 2048))
        self.change(
            "data.packing",
            f"a batch of {project.name} counts packed rows of up to {length} tokens, {size * length} a step, and here"
            f" samples. In the place of batch.micro_batch_size write batch.micro_batch_tokens: {micro * length}, and"
            f" batch.global_batch_size: {size * length} / the mean length of a sample that `cookbook preview` prints",
        )

    def _evaluation_and_saving(self) -> None:
        for what, key, advice in (
            ("eval", "run.eval_every_steps", tables().texts["evaluation"]),
            ("save", "run.save_every_steps", tables().texts["saving"]),
        ):
            per_epoch = f"run.{what}s_per_epoch"
            strategy, steps = self.take(f"{what}_strategy"), self.take(f"{what}_steps")
            strategy = "no" if strategy is False else strategy
            if strategy in (None, "steps") and steps and steps >= 1:
                self.recipe[key] = int(steps)
            elif strategy in (None, "steps") and steps:
                self.note(f"~{what}_steps", f"a share of the run; {advice}")
            elif strategy == "epoch":
                self.recipe.setdefault(per_epoch, 1)
                if steps and tables().projects["trainer"].is_default(f"{what}_steps", steps):
                    self.idle.append(f"{what}_steps")
                elif steps:
                    self.note(f"~{what}_steps", f"{what}_strategy is epoch; left out")
            elif strategy == "steps" and what == "save":
                self.recipe[key] = tables().projects["trainer"].own_defaults("sft", ())[key]
                self.note("~save_strategy", f"every {self.recipe[key]} steps, as transformers does where nothing says")
            elif strategy not in (None, "no"):
                self.note(f"~{what}_strategy", advice)
            elif strategy == "no" and steps:
                self.note(f"~{what}_steps", f"{what}_strategy is no; left out")
            if what == "save" and (saves := self.take("save_epochs")) and key not in self.recipe:
                self.recipe[per_epoch] = saves
            if key in self.recipe and self.recipe.pop(per_epoch, None) is not None:
                self.note(per_epoch, f"{key} {self.recipe[key]} holds; left out")
        self._best()
        if (keep := self.take("keep")) is not None:
            self.recipe["run.keep_last"] = max(2, keep)
            if keep < 2:
                self.note("~keep", "run.keep_last is at least 2, as a crash may damage the newest")

    def _best(self) -> None:
        """Keys that need held-out rows, or checkpoints that are evaluated."""
        has_rows = self.recipe.get("data.eval") or self.recipe.get("data.holdout")
        for key in ("run.evals_per_epoch", "run.early_stopping_patience"):
            if not has_rows and key in self.places and self.recipe.pop(key, None):
                self.note(key, f"left out, as there are no held-out rows; {tables().texts['evaluation']}")
        if self.take("load_best"):
            names = ("save_every_steps", "eval_every_steps"), ("evals_per_epoch", "saves_per_epoch")
            counts = [[self.recipe.get(f"run.{name}", 0) for name in pair] for pair in names]
            if any(first and second and first % second == 0 for first, second in counts):
                self.recipe |= {"run.export": "best", "run.keep_best": 1}
            else:
                self.note(
                    "~load_best", "only where each checkpoint is evaluated: write run.export: best and keep_best: 1"
                )


HALF_WEIGHTS = "trained weights are in half precision there, and here in float32 beside mixed_precision"
ONE_GPU = "single_gpu"
OF_TRL: dict[str, dict[str, Any]] = {
    ONE_GPU: {"kind": "single"},
    "multi_gpu": {"kind": "ddp"},
    "fsdp1": {"kind": "fsdp", "fsdp_version": 1, "reshard": True},
    "fsdp2": {"kind": "fsdp2", "reshard": True},
    **{f"zero{stage}": {"kind": "zero", "zero_stage": stage} for stage in (1, 2, 3)},
}
"""Properties of a strategy by the names of the files in trl/accelerate_configs."""
OF_COSINE = "cosine_min_lr_ratio"
"""axolotl's share of the peak, which other shapes than the cosine do not have."""
CONSTANT = "constant"
"""transformers' name of a rate without a warm-up; with one it is constant_with_warmup."""
NO_SUCH = "no such objective (docs/recipes.md#objective)"
ONLINE = ("grpo", "gdpo", "ebft", "ppo", "rloo", "reinforce", "online_dpo")
SAMPLED = (
    "it samples and scores answers while it trains; of such methods rounds have GRPO, in a recipe of one's own"
    " (docs/recipes.md#rounds)"
)


def is_other(key: str, value: Any, recipe: dict[str, Any]) -> bool:
    """True if a value of a dotted key is another than ours without it."""
    section, _, name = key.partition(".")
    info = Recipe.model_fields.get(section)
    if info is None or key in NOT_BY_DEFAULT:
        return False
    if not name:
        return key == "mixed_precision" or info.get_default() != value
    kinds = (info.annotation, *get_args(info.annotation))
    model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section))
    if issubclass(model, NamedSection):
        usual = getattr(info.get_default(), "name", None) or model.default
        if name == "name":
            return value != usual
        model = model.kind_of({"name": recipe.get(f"{section}.name", usual)})
    if (info := model.model_fields.get(name)) is None:
        return False
    ours = info.get_default(call_default_factory=True)
    return (list(ours) if isinstance(ours, tuple) else ours) != value and bool(ours or value)


NOT_BY_DEFAULT = ("data.packing", "model.revision", "run.output_dir")
"""Keys whose default here has the same curve as any other's."""


def _named_strategy(stem: str) -> str:
    """The end of a message about a file of DeepSpeed's that is not there, if its name says what it has."""
    if stem in known_strategies():
        return f"; or, by its name, write strategy: {stem}"
    meaning = meaning_of("strategy", stem.lower())
    return f"; or, by its name, {meaning.replace('write', 'write strategy:')}" if meaning else ""


def _warmup_of_axolotl(max_steps: int | None) -> float:
    """Warm-up of axolotl for a file that has none: `_configure_warmup_and_logging` in its core/builders/base.py."""
    if max_steps is None:
        return 0.03
    steps = min(int(0.03 * max_steps), 100)
    return 2 if steps == 1 else steps


def _name_in(place: str) -> str:
    """The key in `file:line: key is value`."""
    return place.partition(" is ")[0].rpartition(": ")[2]
