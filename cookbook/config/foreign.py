"""Keys of other projects' configuration files, each with ours, by `foreign.yaml`. No torch."""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from cookbook.config.effects import effect_of
from cookbook.config.owner_schemas import (
    CONFIG,
    Field,
    fields_of,
    methods_of,
    others_of,
    read_classes,
    version_of,
)
from cookbook.system.files import show

Cost = Literal["refuse", "changes", "decide", "idle", "sizes"]
"""The loss with a key without a counterpart: any recipe would be another training, the same training, a decision,
nothing, or a setting of speed that the shipped strategy has too, with a value of its own."""


class NoCounterpart(ValueError):
    """A value that we do not have; the message is what to write instead."""


@dataclass(frozen=True)
class Key:
    ours: str | None = None
    """A key of a recipe; `strategy.X`, a property of a strategy; `~X`, from which several of ours are derived (see
    `cookbook.commands.convert.keys`); None: there is none."""
    values: Mapping[Any, Any] | None = None
    """From their value to ours, where that is not as `READ` has it; ours is None where theirs sets nothing."""
    sets: Any = None
    """Our value, whatever theirs is."""
    decides: bool = False
    """True if a value without a counterpart means another training."""
    why: str = ""
    """Advice for the key, or for a value that has no counterpart."""
    without: Cost = "decide"
    """The cost of a key without a counterpart."""

    @property
    def cost(self) -> Cost:
        """The cost of a value without a counterpart."""
        if self.ours is None:
            return self.without
        is_of_run = self.ours in NEVER_TRAINED or self.ours.startswith("strategy.")
        return "decide" if is_of_run or effect_of(self.ours) != "curve" else "changes"

    def translate(self, value: Any) -> Any:
        """Our value.

        Raises:
            NoCounterpart: there is none.
        """
        if self.ours is None:
            raise NoCounterpart(self.why)
        if self.sets is not None:
            return self.sets
        values = self.values or READ.get(self.ours)
        if values is None or callable(values):
            return value if values is None else values(value)
        value = value.lower() if isinstance(value, str) else value
        if isinstance(value, str) and value not in values:
            value = next((known for known in values if is_same_component(value, known)), value)
        if isinstance(value, list | dict) or value not in values:
            named = "adapter.name" if self.ours == "~adapter" else self.ours
            if (meaning := meaning_of(named, str(value))) is not None:
                raise NoCounterpart(meaning)
            known = ", ".join(dict.fromkeys(str(ours) for ours in values.values() if ours is not None))
            raise NoCounterpart(self.why or f"no counterpart; {self.ours.lstrip('~')} can be {known}")
        return values[value]

    def uncovered_part(self, value: Any) -> str | None:
        """The part of a value that has no counterpart, though `translate` has one for the rest."""
        if self.ours == "model.new_tokens":
            return SPECIAL
        name = str(value).lower() if self.ours == "optim.name" else ""
        return PAGED if "paged" in name else OF_TORCHAO if name in ("adamw_torch_8bit", "ao_adamw_8bit") else None

    @property
    def answer(self) -> str:
        """Advice for a recipe that has this key."""
        if self.ours is not None and self.ours.startswith("strategy."):
            return self.why or tables().texts["strategy"]
        if self.ours is None or self.ours[0] == "~":
            return self.why
        return f"write it as {self.ours}"


def _sections(paths: Iterable[str]) -> frozenset[str]:
    """Every section around one of these dotted paths."""
    return frozenset(path[: dot.start()] for path in paths for dot in re.finditer(r"\.", path))


@dataclass(frozen=True)
class Project:
    name: str
    keys: Mapping[str, Key]
    """Keys by dotted path in its file."""
    base: str | None = None
    """The project whose keys it extends."""
    schema: tuple[str, ...] = ()
    """The owners of its classes, by the names of files in `cookbook/config/owners`; none for a project without."""
    objectives: Mapping[str, list[str]] = field(default_factory=dict)
    """Classes whose defaults come before those of others, by our objective."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values where a file is silent that its code computes, by our keys."""
    of_adapters: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that differ with an adapter."""
    program: str | None = None
    """The program that its keys are of, and that decides the method; empty where any program has them."""
    is_read: bool = True
    """False if its files are known by their keys, and not converted."""
    is_distribution: bool = False
    """True if its files describe how a run is distributed, not what it trains."""
    always: tuple[str, ...] = ()
    """Differences in any case."""
    warms_up_constant: bool = True
    """False if a warm-up is not heeded where the rate is constant."""
    packs_first: bool = False
    """True if a batch of packed rows counts these rows, and not the samples in them."""
    passes: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys, or `any`, that ask for nothing, or for what a run does in any case."""
    open_sections: tuple[str, ...] = ()
    """Sections that may have keys of a library, beside those that the schema has."""
    classes: Mapping[str, Key] = field(default_factory=dict)
    """Entries that stand for all keys of a class, by its name."""
    other_methods: frozenset[str] = frozenset()
    """Classes of methods that are not here: a key that only these have asks for theirs with any value."""
    compares: Mapping[str, str] = field(default_factory=dict)
    """Keys of a distribution without a counterpart that are the recipe's all the same, by `start.claims`."""

    @functools.cached_property
    def fields(self) -> dict[str, Field]:
        """The keys that its owner's schema has, by dotted path."""
        fields = fields_of(self.schema)
        of_others = {path: own for path, own in fields.items() if own.of_class in self.other_methods}
        return fields | {path: replace(own, default=()) for path, own in of_others.items()}

    @functools.cached_property
    def name_with_version(self) -> str:
        """Name with the version or the day of its schema."""
        if not self.schema:
            return self.name
        version = version_of(self.schema[-1])
        return f"{self.name} of {version}" if "-" in version else f"{self.name} {version}"

    @functools.cached_property
    def methods(self) -> dict[str, str | None]:
        """The classes of its owner that have a method's settings, each with our objective; None where there is none."""
        ours: dict[str, str] = {}
        for objective, classes in self.objectives.items():
            ours.setdefault(classes[0], objective)
        return {name: ours.get(name) for name in methods_of(self.schema)}

    def find_method(self, text: str) -> str | None:
        """The class of the one method that a name of a program or a file has, as `scripts/run_dpo.py`; None if it has
        none, or several."""
        words = re.findall(r"[a-z0-9]+", text.lower())
        names = {objective: classes[0] for objective, classes in self.objectives.items()}
        names |= {name.removesuffix(CONFIG).lower(): name for name in self.methods}
        for size in (3, 2, 1):  # `online_dpo` is no `dpo`
            runs = ("".join(words[i : i + size]) for i in range(len(words) + 1 - size))
            if named := {names[run] for run in runs if run in names}:
                return named.pop() if len(named) == 1 else None
        return None

    def _of_some_methods(self, keys: Collection[str]) -> frozenset[str]:
        """The keys of a file that some methods have, and others have not."""
        known = [*methods_of(self.schema).values()] or [frozenset[str]()]
        of_some = frozenset.union(*known) - frozenset.intersection(*known)
        return of_some & {path.partition(".")[0] for path in keys}

    def objective_of(self, method: str, text: str) -> str | None:
        """Our objective of a class, or the one of several that a name has: `simpo` of CPOConfig."""
        words = re.findall(r"[a-z0-9]+", text.lower())
        named = (name for name, classes in self.objectives.items() if name in words and classes[0] == method)
        return next(named, self.methods[method])

    def methods_with(self, keys: Collection[str]) -> list[str]:
        """The classes of methods that have all of the keys which some methods have."""
        asked = self._of_some_methods(keys)
        return [name for name, own in methods_of(self.schema).items() if asked <= own]

    def asks_for_another(self, path: str, method: str | None, keys: Collection[str]) -> bool:
        """True if a key that no method has which is converted makes a file one of a method that is not: of that which
        its program names, else of one with as many keys of the file as any that is converted.

        Args:
            method: the class that the program names, if any.
        """
        methods, asked = methods_of(self.schema), self._of_some_methods(keys)
        others = [name for name, own in methods.items() if path.partition(".")[0] in own]
        if method is not None:
            return method in others
        fits = {name: len(asked & own) for name, own in methods.items()}
        return max(fits[name] for name in others) >= max(fits[name] for name in fits if name not in self.other_methods)

    def is_of_another_method(self, path: str) -> bool:
        """True for a key that no method has which is converted."""
        own = self.fields.get(path)
        return (
            own is not None
            and own.of_class in self.other_methods
            and self.keys.get(path) is self.classes.get(own.of_class)
        )

    @functools.cached_property
    def _sections_of_fields(self) -> frozenset[str]:
        return _sections(self.fields)

    @functools.cached_property
    def _sections_of_keys(self) -> frozenset[str]:
        return _sections(self.keys)

    def has(self, path: str) -> bool:
        """True if its files have this key, or one of a section that is anything's."""
        return path in self.fields or self.entry(path) is not None or bool(self.classes_with(path))

    def classes_with(self, path: str) -> list[str]:
        """The classes and functions of its owner that have this key, where it is none of those that are read."""
        return others_of(self.schema).get(path, [])

    def entry(self, path: str) -> Key | None:
        """Return the entry of a key: its own, or that of the section without a counterpart around it."""
        return self.keys.get(self.home(path) or "")

    def home(self, path: str) -> str | None:
        """The key itself or the section around it, whichever has an entry for it."""
        around, is_known = path, path in self.fields
        if path in self.keys:
            return path
        while "." in around:
            around = around.rpartition(".")[0]
            is_known |= around in self.open_sections or around not in self._sections_of_fields
            section = self.keys.get(around)
            if is_known and section is not None and section.ours is None:
                return around
        return None

    def is_in_open_section(self, path: str) -> bool:
        """True for a key that nobody knows but who gets the section around it, such as a chat template."""
        return path not in self.fields and self.home(path) not in (None, path)

    def lacks(self, path: str) -> bool:
        """True for a known key that has no counterpart."""
        key = self.entry(path)
        return key is not None and key.ours is None

    def is_idle(self, path: str) -> bool:
        """True for a key that can be left out, whatever its value."""
        key = self.entry(path)
        return key is not None and key.ours is None and key.cost == "idle"

    def has_keys_in(self, path: str) -> bool:
        """True if a key is known by its place in this section."""
        return path in self._sections_of_keys

    def has_section(self, path: str) -> bool:
        """True if a distribution's files have keys below this one."""
        return any(name.startswith(f"{path}.") for name in (*self.keys, *self.passes, *self.compares))

    def passes_over(self, path: str, value: Any) -> bool:
        """True if a key asks for nothing with this value, or for what a run does in any case: by `passes` or, for a key
        without a counterpart, by its owner's default."""
        if (values := self.passes.get(path)) is None:
            return path in self.fields and self.lacks(path) and self.is_default(path, value)
        return values == "any" or any(type(value) is type(passed) and value == passed for passed in values)

    def is_off(self, path: str, values: Mapping[str, Any]) -> bool:
        """True if a section around a key is switched off, by its own `enabled`, or by that of what its parts share.

        Args:
            values: those of the file.
        """
        section: Any = values
        names = path.split(".")
        for depth, name in enumerate(names[:-1]):
            section = section.get(name) if isinstance(section, Mapping) else None
            if not isinstance(section, Mapping):
                return False
            around = ".".join(names[: depth + 1])
            for switches, place in ((section, around), (section.get(SHARED), f"{around}.{SHARED}")):
                own = self.fields.get(f"{place}.{SWITCH}")
                usual = own.default[0] if own is not None and own.default else None
                if isinstance(switches, Mapping) and switches.get(SWITCH, usual) is False:
                    return True
        return False

    def is_default(self, path: str, value: Any) -> bool:
        """True if the value is what holds without the key: by the schema or, where that has none, an empty one. Where
        `passes` has the key, its values are the only ones that ask for nothing. A key in a section of anything's has
        no default that is known here: with any value it asks for something. So does a number for a key without a
        counterpart whose default nobody here knows: 0 may have a meaning."""
        own = self.fields.get(path)
        if path in self.passes or self.is_in_open_section(path):
            return False
        default = own.default[0] if own is not None and own.default else None
        if default is None and type(value) in (int, float) and self.lacks(path):
            return False
        return asks_for_nothing(value) if asks_for_nothing(default) else _plain(value) == _plain(default)

    def schema_defaults(self, objective: str) -> dict[str, Any]:
        """Defaults by their keys, for one of our objectives."""
        defaults = {path: own.default[0] for path, own in self.fields.items() if own.default}
        for name in reversed(self.objectives.get(objective, ())):
            own_class = read_classes(self.schema)[name]
            defaults |= {path: default[0] for path, (_, *default) in own_class.items() if default}
        return defaults

    def defaults_of_method(self, objective: str, given: Collection[str]) -> dict[str, Any]:
        """The defaults of a method's own class that are settings of its loss here, where a file is silent."""
        own = methods_of(self.schema).get(next(iter(self.objectives.get(objective, ())), ""), frozenset())
        return {
            path: default
            for path, default in self.schema_defaults(objective).items()
            if path in own - {*given}
            and default is not None
            and (key := self.keys.get(path)) is not None
            and key.ours is not None
            and key.cost == "changes"
            and not key.ours.startswith(("~vllm", "data."))
            and key.ours not in OF_NO_LOSS
        }

    def own_defaults(self, objective: str, given: Collection[str]) -> dict[str, Any]:
        """Values that hold where a file is silent, by our keys, for one of our objectives.

        Args:
            given: the keys of the file; the defaults of a section hold where one of them is in it.
        """
        sections = {path.rpartition(".")[0] for path in given}
        defaults: dict[str, Any] = {}
        of_sections = set()
        for path, default in self.schema_defaults(objective).items():
            section, key = path.rpartition(".")[0], self.keys.get(path)
            if section not in sections and section:
                continue
            if key is not None and key.ours is not None and default is not None:
                with contextlib.suppress(NoCounterpart, TypeError, ValueError, AttributeError):
                    if (value := key.translate(default)) is not None:
                        defaults.setdefault(key.ours, value)
                        of_sections |= {key.ours} if section else set()
        if defaults.get("~bf16") is False and not defaults.get("~fp16"):
            defaults["mixed_precision"] = "no"
        elif defaults.get("~bf16"):
            defaults["mixed_precision"] = "bf16"
        if defaults.get("~save_strategy") == "steps":
            defaults["run.save_every_steps"] = int(defaults["~save_steps"])
        kept = {key: value for key, value in defaults.items() if key in OF_A_DEFAULT or key[0] != "~"}
        return {key: value for key, value in kept.items() if not key.startswith("strategy.")} | {
            key: value for key, value in self.defaults.items() if key not in of_sections
        }

    def silent_differences(self, objective: str, given: Collection[str]) -> Iterator[tuple[str, str]]:
        """Keys without a counterpart whose default is another one with an objective, or not what we do, with advice."""
        for path, default in self.schema_defaults(objective).items():
            key = self.entry(path)
            if default is None or path in given or key is None or key.cost not in ("refuse", "changes"):
                continue
            section = path.rpartition(".")[0]
            if key.ours is not None or (section and not any(name.startswith(f"{section}.") for name in given)):
                continue
            is_ours = self.passes_over(path, default) if path in self.passes else self.is_default(path, default)
            if not is_ours:
                yield path, f"not in the file, where {self.name} has {path} {show(default)}: {key.why}"


SWITCH = "enabled"
SHARED = "shared_parameters"
"""The section of DeepSpeed's methods of compression that has their switch."""
OF_A_DEFAULT = ("~adapter", "~cuts_packed", "~disable_dropout")
"""Derived keys that a default is taken for; others follow from these, or are nothing without a value in the file."""


OF_NO_LOSS = ("~prompt_column", "~disable_dropout")
"""Derived keys of a method's class that say nothing of its loss."""


def is_same_component(path: str, known: Any) -> bool:
    """True for two dotted paths of one name in one package, which may have it in several modules."""
    if not isinstance(known, str) or "." not in path or "." not in known:
        return False
    ends = [(name.partition(".")[0], name.rpartition(".")[2]) for name in (path, known)]
    return ends[0] == ends[1]


def _plain(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else (type(value) is bool, value)


def asks_for_nothing(value: Any) -> bool:
    """True if the value of a key without a counterpart leaves everything as it is, unless its owner has a default."""
    if isinstance(value, dict):  # a section with a switch, or whose sections have one
        parts = [value["enabled"]] if "enabled" in value else value.values()
        return all(asks_for_nothing(part) and (isinstance(part, dict) or "enabled" in value) for part in parts)
    return value in (None, False, 0, "", "no", "none") or value == []


def _number(value: Any) -> float:
    try:
        number = value if isinstance(value, int | float) else float(value)
    except (TypeError, ValueError):
        raise NoCounterpart("not a number") from None
    if not math.isfinite(number):
        raise NoCounterpart("not a finite number")
    return number


def _count(value: Any) -> int:
    number = _number(value)
    if number != int(number) or number <= 0:
        raise NoCounterpart("must be a whole number above 0 here")
    return int(number)


def _limit(value: Any) -> int | None:
    """A count, or None for 0 and -1, which mean that there is no limit."""
    return None if _number(value) in (0, -1) else _count(value)


def _saves(epochs: Any) -> int | str:
    """`run.saves_per_epoch` of a checkpoint every so many epochs."""
    number = _number(epochs)
    if number > 1 and float(number).is_integer():
        return f"1/{int(number)}"
    per_epoch = 1 / (number or math.inf)
    if per_epoch < 1 or not per_epoch.is_integer():
        raise NoCounterpart(
            "a checkpoint has no counterpart after so many epochs; write run.saves_per_epoch, as 2 or 1/2"
        )
    return int(per_epoch)


def _nothing_or_count(value: Any) -> int:
    """0 and -1 are no limit."""
    return _limit(value) or 0


def _numbers(value: Any) -> list[float]:
    return [float(_number(item)) for item in _list(value)]


def _epochs(value: Any) -> int:
    try:
        return _count(value)
    except NoCounterpart:
        raise NoCounterpart("epochs are whole here; write run.max_steps for a part of one") from None


def _names(value: Any) -> list[str]:
    """A list of names, also from `a,b`."""
    if isinstance(value, dict):
        raise NoCounterpart("a list was expected, and no `key: value` lines")
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else [str(name) for name in value]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise NoCounterpart("a text was expected")
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _section(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NoCounterpart("a section of `key: value` lines was expected")
    return value


def share(value: Any) -> float:
    number = _number(value)
    if number >= 1:
        raise NoCounterpart(f"so many rows; data.holdout is a share: {number:g} divided by the number of all rows")
    return number


def _targets(value: Any) -> list[str]:
    names = _names(value)
    return ["all-linear"] if names in (["all"], ["all-linear"]) else names


def _trackers(value: Any) -> list[str]:
    names = [name for name in ([value] if isinstance(value, str) else value) if name != "none"]
    if unknown := [name for name in names if name not in ("tensorboard", "wandb", "mlflow", "trackio")]:
        raise NoCounterpart(
            f"{', '.join(map(str, unknown))}: write run.trackers with tensorboard, wandb, mlflow, trackio"
        )
    return names


def _fsdp(value: Any) -> dict[str, Any] | None:
    """Properties of a strategy from `full_shard auto_wrap offload`, in one text or in a list."""
    words = value.lower().split() if isinstance(value, str) else [str(word).lower() for word in value or ()]
    if unknown := [word for word in words if word not in ("full_shard", "shard_grad_op", "auto_wrap", "offload")]:
        raise NoCounterpart(f"{', '.join(unknown)}: no counterpart; for hybrid_shard write strategy: hsdp")
    if not words:
        return None
    return {"kind": "fsdp", "reshard": "shard_grad_op" not in words, "offload": "offload" in words}


OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "torch.optim.adamw"), "adamw"),
    **dict.fromkeys(("adamw_torch_xla", "adamw_torch_npu_fused", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw", "bitsandbytes.optim.pagedadamw"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "bitsandbytes.optim.adamw8bit"), "adamw_8bit"),
    "bitsandbytes.optim.pagedadamw8bit": "adamw_8bit",
    **dict.fromkeys(("adamw_torch_8bit", "ao_adamw_8bit"), "adamw_8bit"),
    **dict.fromkeys(("sgd", "torch.optim.sgd"), "sgd"),
    "muon": "muon",
}
PAGED = "paged is left out: moments stay on the GPU; strategy: zero2_offload, for one, keeps them in host memory"
OF_TORCHAO = "its moments in 8 bits are torchao's; those of adamw_8bit are bitsandbytes'"
SPECIAL = (
    "special tokens, which in the texts of chats are read where data.special_tokens: tokens says so; those that the"
    " tokenizer has already are refused"
)
SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine",
    "warmup_stable_decay": "wsd",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup": "cosine",
    "inverse-square-root": "inverse_sqrt",
}
PRECISIONS = {True: True, False: False, "auto": True, "full": True, "true": True, "false": False}

BOOL = {True: True, False: False}
OFFLOAD = {"none": None, "cpu": "cpu", "nvme": "nvme"}
READ: dict[str, Mapping[Any, Any] | Callable[[Any], Any]] = {
    **dict.fromkeys(("optim.learning_rate", "optim.weight_decay", "optim.eps", "optim.max_grad_norm"), _number),
    "schedule.min_learning_rate": _number,
    **dict.fromkeys(("optim.momentum", "objective.beta", "objective.label_smoothing"), _number),
    "data.holdout": share,
    "loss_scale.initial": lambda power: 2.0 ** _count(power),
    "loss_scale.minimum": lambda value: float(_number(value)),
    **dict.fromkeys(("loss_scale.window", "loss_scale.hysteresis"), _count),
    **dict.fromkeys(("objective.gamma", "objective.nll_weight", "objective.center_rewards_coefficient"), _number),
    **dict.fromkeys(("objective.desirable_weight", "objective.undesirable_weight", "~beta1", "~beta2"), _number),
    **dict.fromkeys(("~warmup", "~warmup_ratio", "~min_share", "~gamma_over_beta"), _number),
    **dict.fromkeys(("~eval_steps", "~save_steps"), _number),
    "~percent_held_out": _number,
    **dict.fromkeys(("adapter.alpha", "adapter.dropout", "model.neftune_alpha"), lambda value: float(_number(value))),
    **dict.fromkeys(
        ("batch.global_batch_size", "batch.micro_batch_size", "~accumulation", "run.eval_every_steps"), _count
    ),
    **dict.fromkeys(("rounds.temperature", "rounds.top_p", "rounds.min_p"), _number),
    **dict.fromkeys(("objective.epsilon", "objective.epsilon_high"), _number),
    **dict.fromkeys(("rounds.num_generations", "rounds.max_completion_length", "~max_prompt_length"), _count),
    **dict.fromkeys(("~num_iterations", "~steps_per_generation", "~answers_per_generation"), _count),
    **dict.fromkeys(("~vllm_port", "~vllm_tensor_parallel_size", "~vllm_length"), _count),
    "rounds.top_k": _nothing_or_count,
    "rounds.reward_weights": _numbers,
    "objective.scale_rewards": {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"},
    "objective.importance_sampling_level": {"token": "token", "sequence": "sequence"},
    "~vllm_mode": {"server": "server", "colocate": "colocate"},
    **dict.fromkeys(("objective.use_bias_correction_kl", "objective.mask_truncated_completions"), BOOL),
    **dict.fromkeys(("~vllm_use", "~vllm_correction"), BOOL),
    **dict.fromkeys(("~reward_model", "~vllm_url", "~vllm_host", "~vllm_correction_mode"), _text),
    "~vllm_clip_max": _number,
    "~reward_funcs": _names,
    "~processes": lambda count: None if count == "auto" else _count(count),
    **dict.fromkeys(("data.max_length", "data.shuffle_rows", "adapter.rank"), _count),
    **dict.fromkeys(("strategy.tp_size", "strategy.sp_size", "strategy.dp_replicate_size"), _count),
    "strategy.zero_hpz_partition_size": _count,
    **dict.fromkeys(
        ("run.max_steps", "schedule.warmup_steps", "~keep", "~max_rows", "~steps_per_epoch", "~packed_size"), _limit
    ),
    "run.num_epochs": _epochs,
    **dict.fromkeys(("run.evals_per_epoch", "run.saves_per_epoch", "run.early_stopping_patience"), _limit),
    **dict.fromkeys(("model.compile",), BOOL),
    "model.gradient_checkpointing": {**BOOL, "offload": "offload"},
    **dict.fromkeys(
        ("data.packing", "data.streaming", "run.deterministic", "run.save_first_step", "run.save_in_background"), BOOL
    ),
    **dict.fromkeys(("adapter.rslora", "strategy.offload", "strategy.reshard"), BOOL),
    **dict.fromkeys(
        (
            "~peft",
            "~dora",
            "~4bit",
            "~8bit",
            "~lora_mlp",
            "~all_linear",
            "~disable_dropout",
            "~flattens",
            "~load_best",
            "~activation_offloading",
        ),
        BOOL,
    ),
    **dict.fromkeys(("~fp8", "~bf16", "~fp16"), PRECISIONS),
    "optim.name": OPTIMIZERS,
    "schedule.name": SCHEDULES,
    **dict.fromkeys(("strategy.offload_optimizer", "strategy.offload_param"), OFFLOAD),
    "~save_epochs": _saves,
    "schedule.decay_steps": _count,
    "strategy.fsdp_version": {1: 1, 2: 2},
    "strategy.zero_stage": {0: 0, 1: 1, 2: 2, 3: 3},
    "run.trackers": _trackers,
    "~fsdp": _fsdp,
    "adapter.targets": _targets,
    "~lora_parameters": _names,
    **dict.fromkeys(
        ("~optimizer", "~dataset", "~text_field", "~messages_column", "~prompt_column", "~template"),
        _text,
    ),
    **dict.fromkeys(("~listed", "~listed_eval", "~accelerate_config"), _text),
    **dict.fromkeys(("~sources", "~test_sources", "~dataset_list", "~pretraining"), _list),
    **dict.fromkeys(("~mixture", "~mixer", "~val", "~column_map"), _section),
    **dict.fromkeys(
        (
            "~splits",
            "~registered",
            "~registered_eval",
            "~lora_attention",
            "~lora_parameters",
            "~plugins",
            "adapter.modules_to_save",
            "model.new_tokens",
        ),
        _names,
    ),
}
"""Readers of values for keys of ours, whosever file has them; others are taken as they are."""

NEVER_TRAINED = (
    *("~eval_strategy", "~eval_steps", "~save_strategy", "~save_steps", "~save_epochs", "~keep", "~deepspeed", "~fsdp"),
    *(
        "~processes",
        "~accelerate_config",
        "~wrap",
        "~test_split",
        "~test_sources",
        "~registered_eval",
        "~listed_eval",
        "~val",
    ),
)
"""Derived keys without influence on the curve."""
WITHOUT: dict[str, Cost] = {
    "refuse": "refuse",
    "differs": "changes",
    "advice": "decide",
    "idle": "idle",
    "sizes": "sizes",
}
"""Tables of keys without a counterpart."""


@dataclass(frozen=True)
class Tables:
    projects: Mapping[str, Project]
    meanings: Mapping[str, Mapping[str, str]]
    """Advice for other projects' values of our keys, by key and value, in small letters."""
    texts: Mapping[str, str]
    """Advice that several keys share, by its name."""
    elsewhere: dict[str, str]
    """Keys that belong into a file beside the recipe, or into none, with what to write instead."""


@functools.cache
def tables() -> Tables:
    """The tables of foreign.yaml. A key that is not ours is the first to ask: a run without one does not parse them."""
    text = Path(__file__).with_name("foreign.yaml").read_text(encoding="utf-8")
    given = yaml.load(text, Loader=yaml.CSafeLoader)
    texts, derived, meanings, elsewhere = (given.pop(name) for name in ("texts", "derived", "meanings", "elsewhere"))
    meant = {
        key: {value: meaning for meaning, values in table.items() for value in values}
        for key, table in meanings.items()
    }
    for name, known in {"optim.name": OPTIMIZERS, "schedule.name": SCHEDULES}.items():
        meant[name] = {value: f"write {ours}" for value, ours in known.items() if value != ours} | meant[name]

    def entries_of(table: dict[str, Any], fields: dict[str, Field]) -> dict[str, Key]:
        """Entries by key, and by the name of a class."""
        keys: dict[str, Key] = {}
        for parent in (given[name] for name in table.get("like", ())):
            lacks = fields_of(tuple(parent.get("schema", ()))).keys() - fields.keys() if fields else ()
            keys |= {path: key for path, key in entries_of(parent, {}).items() if path not in lacks}
        for path, written in table.get("keys", {}).items():
            entry = written if isinstance(written, dict) else {"ours": written}
            why: str = entry.get("why", derived.get(entry.get("ours", ""), ""))
            keys[path] = Key(**entry | {"why": texts.get(why, why)})
        for name, cost in WITHOUT.items():
            for why, names in table.get(name, {}).items():
                keys |= dict.fromkeys(names, Key(why=texts.get(why, why), without=cost))
        return keys

    def keys_of(table: dict[str, Any]) -> tuple[dict[str, Key], dict[str, Key]]:
        fields = fields_of(tuple(table.get("schema", ())))
        entries = entries_of(table, fields)
        of_classes = {path: entries[own.of_class] for path, own in fields.items() if own.of_class in entries}
        classes = {name: key for name, key in entries.items() if name[0].isupper()}
        return of_classes | {path: key for path, key in entries.items() if path not in classes}, classes

    projects = {}
    for name, table in given.items():
        if "name" in table:
            rest: dict[str, Any] = {key: table[key] for key in table if key not in ("keys", "like", *WITHOUT)}
            keys, classes = keys_of(table)
            refused = (name for name, key in classes.items() if key.cost == "refuse")
            projects[name] = Project(
                keys=keys,
                classes=classes,
                other_methods=frozenset(refused if "objectives" in table else ()),
                **rest | {"schema": tuple(table.get("schema", ()))},
            )
    return Tables(projects, meant, texts, {key: texts.get(why, why) for key, why in elsewhere.items()})


def meaning_of(key: str, value: str) -> str | None:
    """Advice for a key of ours that has another project's value, in small letters; None: nobody has that value."""
    return tables().meanings.get(key, {}).get(value)


SHORT = {
    "epochs": "run.num_epochs",
    "steps": "run.max_steps",
    "lr": "optim.learning_rate",
    "batch_size": "batch.micro_batch_size",
    "model": "model.name_or_path",
    "output": "run.output_dir",
    "strategy": "strategy",
}
"""Flags of other programs' scripts whose names are in no configuration file."""


def as_assignment(word: str) -> str | None:
    """Advice for a word of the command line that no command knows: `--epochs`, or `b=2` without --set. None if there is
    none.
    """
    if "=" in word and not word.startswith("-"):
        return f"{word}: write --set before each: --set {word}"
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    projects = [tables().projects[name] for name in ("trl", "trainer", "llama-factory")]
    keys = {path: key.ours for project in projects for path, key in project.keys.items()}
    ours = SHORT.get(name) or keys.get(name)
    if ours is None or ours[0] == "~" or ours.startswith("strategy."):
        return None
    return f"{word}: write --set {ours}=VALUE"


SEVERAL_MEANINGS = 3
"""The most meanings of a word that are all named; a word of more, as `enabled`, says nothing by itself."""


@functools.cache
def _meanings() -> tuple[dict[str, str], dict[str, str]]:
    """Advice on other projects' keys by their paths, and by the last parts of these. A later one of the two says less:
    without its section a part may be another thing here.
    """
    keys = [
        (path, key)
        for project in tables().projects.values()
        for path in (*project.keys, *project.fields)
        if (key := project.entry(path)) is not None
    ]
    by_path: dict[str, dict[str, None]] = {}
    by_part: dict[str, dict[str, None]] = {}
    has_counterpart: set[str] = set()
    for path, key in keys:
        part = path.rpartition(".")[2]
        by_path.setdefault(path, {})[key.answer] = None
        (by_part if key.ours is None else by_path).setdefault(part, {})[key.answer] = None
        # What is collected from several keys, as a logger's arguments, has no counterpart of its own.
        has_counterpart |= {path} if key.ours is None or key.ours.startswith("~") else {path, part}
        if key.ours is not None and "." in path:  # a section has the meanings of the keys in it
            by_part.setdefault(path.split(".")[-2], {})[key.answer] = None
    for word in by_path.keys() - has_counterpart:
        by_part.setdefault(word, {}).update(by_path.pop(word))
    whole, parts = (
        {word: "; or, ".join(several) for word, several in words.items() if len(several) <= SEVERAL_MEANINGS}
        for words in (by_path, by_part)
    )
    elsewhere = tables().elsewhere
    return whole | {path.lower(): text for path, text in elsewhere.items()} | elsewhere, parts


@functools.cache
def answers() -> dict[str, str]:
    """Advice for a recipe with a key of another project or file, by its name there."""
    whole, parts = _meanings()
    return parts | whole


def is_vague(word: str) -> bool:
    """True if a word is a key only below a section of others, and without a counterpart."""
    return word not in _meanings()[0]


def owner_of(word: str, *, of_all: bool = True) -> str | None:
    """Advice for a key of accelerate's or DeepSpeed's that stands where a strategy has none, by its path or the last
    part of that; None for one that has a place in a strategy, or several meanings.

    Args:
        of_all: also of keys without a counterpart; a word that may be a misspelt key is hardly one of these.
    """
    told: set[str] = set()
    for project in (project for project in tables().projects.values() if project.is_distribution):
        paths = dict.fromkeys((*project.keys, *project.fields))
        named = [path for path in paths if path == word] or [path for path in paths if path.endswith(f".{word}")]
        keys = [key for path in named if (key := project.entry(path)) is not None and key.cost != "sizes"]
        told |= {answer for key in keys if (key.ours or of_all) and (answer := _owner(key)) is not None}
        if not told:  # a section belongs to whom its first key belongs to
            inside = (key.ours for path, key in project.keys.items() if path.startswith(f"{word}.") and key.ours)
            first = next(inside, "strategy.")
            told |= set() if first.startswith(("strategy.", "~")) else {_of_recipe(first.partition(".")[0])}
    return told.pop() if len(told) == 1 else tables().elsewhere.get(word)


def is_of_a_training(keys: Collection[str]) -> bool:
    """True if a project whose files `convert` reads has one of the keys at the top of a file, and accelerate and
    DeepSpeed have none of that name.
    """
    known: dict[bool, set[str]] = {True: set(), False: set()}
    for project in (project for project in tables().projects.values() if project.is_read):
        known[project.is_distribution] |= {path.partition(".")[0] for path in (*project.keys, *project.fields)}
    return not known[False].isdisjoint({*keys} - known[True])


def _owner(key: Key) -> str | None:
    if key.ours is not None and key.ours.startswith("strategy."):
        paths = (path for path, own in tables().projects["deepspeed"].keys.items() if own.ours == key.ours)
        return next((f"write {path} in the JSON" for path in paths), None)
    return key.why if key.ours is None or key.ours[0] == "~" else _of_recipe(key.ours)


def _of_recipe(ours: str) -> str:
    return f"the recipe owns it ({ours})"
