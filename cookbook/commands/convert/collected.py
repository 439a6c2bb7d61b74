"""Keys of converted files as ours, where one has one counterpart; what is derived from several is kept for later."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cookbook.commands.convert import references
from cookbook.config.accelerate_yaml import indent_sections
from cookbook.config.deepspeed_json import as_deepspeed_reads
from cookbook.config.foreign import Key, NoCounterpart, Project, asks_for_nothing, tables
from cookbook.config.recipe import answer_to
from cookbook.config.strategy_keys import COMMENT, is_same
from cookbook.system.files import MAX_CHOICES, Document, KeyPath, RecipeError, kind_in_words, read_document, show

ENGINE = ("scheduler", "optimizer")
"""Sections of a DeepSpeed JSON that transformers' Trainer takes in the place of its own settings (integrations/
deepspeed.py, deepspeed_optim_sched)."""
OF_ENGINE = ("schedule.name", "optim.name")
SEVERAL = ("run.trackers", "adapter.targets")
"""Our lists that several of their keys fill together."""
COMPONENT = "._component_"
MODEL = "model._component_"
PACKAGES = ("torchtune", "torch", "bitsandbytes", "torchao")
"""Whose components torchtune's own files have; all others are the user's modules."""
MAX_SHOWN = 3
"""Items of a list that a line shows."""
SILENT = " where the file is silent"
NOT_THE_SAME = "not the same training: "
NEAREST = "docs/convert.md#what-there-is-not has what comes nearest"


class CollectedKeys:
    """Our keys, collected from one or more files."""

    def __init__(self, processes: int | None) -> None:
        self.processes = processes
        self.recipe: dict[str, Any] = {}
        """Values by dotted key."""
        self.other: dict[str, Any] = {}
        """Values by `~X` and `strategy.X`, from which further keys are derived."""
        self.written: dict[str, Any] = {}
        """Their values behind ours that the recipe has."""
        self.places: dict[str, str] = {}
        """File, line, key and value behind each of these."""
        self.given: set[str] = set()
        """Our keys that the files have, also with a value that could not be converted."""
        self.keys_of_files: set[str] = set()
        """Dotted, of all files."""
        self.keys_of_training: list[str] = []
        """Dotted, of the training file alone."""
        self.carried: dict[str, str] = {}
        """Keys with a counterpart, each with ours."""
        self.is_of_training = False
        """True if one of the files has the settings of a training."""
        self.own_defaults: dict[str, Any] = {}
        """Values that hold where the training file is silent, by our keys."""
        self.changes: list[str] = []
        """Settings that are not in the recipe and change the training, or may."""
        self.notes: list[str] = []
        """Advice on what the user decides, or should know."""
        self.idle: list[str] = []
        """Keys that can be left out without a loss."""
        self.sizes: dict[str, Any] = {}
        """Settings of speed that a strategy has a value of its own for, by their places in its file."""
        self.open: list[tuple[str, Key]] = []
        """Keys of DeepSpeed that whoever trains fills in ("auto"), with their places."""
        self.others: list[str] = []
        """Reasons why no recipe can be the same training."""
        self.files: list[str] = []
        """Names of the files, in the order in which they were read."""
        self.reasons: dict[str, tuple[str, str]] = {}
        """Place and reason of lines that others with the same reason may stand beside."""
        self.values: dict[str, Any] = {}
        """Values of the files by dotted key, as written."""
        self.project: Project | None = None
        """Whose training file it is."""
        self.program = ""
        """The program that a command runs, by which a project may choose the method."""
        self.method: str | None = None
        """The class of the method that the program names."""
        self.objective: str | None = None
        """Ours of that method, if it is here."""
        self.folder = Path()
        self.template: str | None = None
        """The text of a chat template in the file."""

    def read(self, document: Document, project: Project) -> None:
        """Take over the keys of a file; those of a file that was read earlier have precedence.

        Raises:
            RecipeError: they make another strategy.
        """
        self.folder = Path(document.name).parent
        self.project = self.project or (None if project.is_distribution else project)
        self.files += [document.name, *dict.fromkeys(document.inherited.values())]
        for path, first in document.repeated.items():
            self.notes.append(f"{document.place(*path)}: given twice (first in line {first}); the last holds there")
        if is_deepspeed := project is tables().projects["deepspeed"]:
            self.idle += empty_keys(document.values, project)  # of which `as_deepspeed_reads` leaves some out
            document = as_deepspeed_reads(document)
        if project is tables().projects["accelerate"]:
            document, lost = indent_sections(document)
            self.notes += [f"{mistake}; they are read as if they were" for mistake in lost]
        self.method = self.method or project.find_method(self.program)
        if not project.is_distribution:
            self._read_sections(document, project)
            for name in [name for name in document.values if _is_switched_off(name, document.values[name], project)]:
                off = name.removeprefix("no_")
                document.lines[(off,)] = document.lines.get((name,), 1)
                document.values[off] = not document.values.pop(name)
        keys = keys_of(document.values, project)
        self.keys_of_training += [] if project.is_distribution else keys
        for path, written in leaves_of(document.values, project):
            dotted = ".".join(map(str, path))
            place = f"{document.place(*path)} is {in_short(written)}"
            if (home := project.home(dotted)) not in (None, dotted):  # one line for all keys of such a section
                place = document.place(*path[: str(home).count(".") + 1])
            self.keys_of_files.add(dotted)
            self.values.setdefault(dotted, written)
            if is_deepspeed and written == "auto":
                self._leave_open(dotted, document.place(*path), project)
                continue
            if path in document.assumed:
                place += SILENT
            value = references.resolve(written, document.values)
            if _is_own_module(dotted, value) and (project.is_idle(dotted) or dotted == MODEL):
                self.add(self.changes, place, "a module of the file's own, with which it may train otherwise")
                if dotted != MODEL:
                    continue
            is_null = value is None and not project.is_in_open_section(dotted)
            if is_null or (is_deepspeed and dotted.startswith(COMMENT)):
                self.idle += [dotted] if dotted not in self.idle else []
            elif project.is_idle(dotted) or (project.lacks(dotted) and project.is_off(dotted, document.values)):
                self.idle.append(dotted)
            elif references.is_open(value):
                key = project.entry(dotted)
                is_of_batch = key is not None and str(key.ours).startswith("batch.")  # the global one follows from it
                lines = self.changes if key is None or is_of_batch else self._lines(key)
                self.add(lines, place, "refers to what is not in this file; write the value")
            elif project.is_of_another_method(dotted) and not project.asks_for_another(dotted, self.method, keys):
                owner = project.fields[dotted].of_class
                self.add(self.changes, place, f"of {owner}, which is not this file's; docs/recipes.md has all of ours")
            else:
                self._read_key(dotted, value, place, project)
        if is_deepspeed and "zero_optimization" not in document.values:
            self.other.setdefault("strategy.zero_stage", 0)  # as DeepSpeed reads it
        silent = [ours for ours, place in self.places.items() if place.endswith(SILENT) and ours in self.recipe]
        if silent:
            given = ", ".join(f"{ours} {show(self.recipe[ours])}" for ours in silent)
            self.notes.append(f"not in the file, so the defaults of {project.name} hold: {given}")

    def _read_sections(self, document: Document, project: Project) -> None:
        """Put the keys of a section in the place of the file that has them, as transformers reads `fsdp_config`."""
        for name, value in [*document.values.items()]:
            if not (isinstance(value, str) and value.endswith(".json") and project.has_keys_in(name)):
                continue
            if (path := self.find(value)) is None:
                self.notes.append(f"{document.place(name)} is {show(value)}: no such file; write its keys here")
            else:
                section = read_document(path, takes_last=True)
                document.values[name] = section.values
                for keys, line in section.lines.items():
                    document.lines[(name, *keys)], document.inherited[(name, *keys)] = line, section.name
                self.files.append(section.name)

    def _leave_open(self, dotted: str, place: str, project: Project) -> None:
        """Keep a key that whoever trains fills in, until all files have been read."""
        key = project.keys.get(dotted)
        if key is None or key.ours is None or key.ours.startswith("strategy."):
            self.idle.append(dotted)
        else:
            self.open.append((place, key))

    def _read_key(self, dotted: str, value: Any, place: str, project: Project) -> None:
        key = project.entry(dotted)
        if key is not None and key.ours is not None:
            self._translate(key, dotted, value, place, is_default=project.is_default(dotted, value))
        elif (
            project.passes_over(dotted, value)
            or (key is not None and project.is_default(dotted, value))
            or (key is None and value == {} and project.has_section(dotted))
        ):
            self.idle.append(dotted)
        elif key is None and (classes := project.classes_with(dotted)):
            names = f"{classes[0]}{' and others' * (len(classes) > 1)}"
            self.add(self.changes, place, f"of {names}; rows are trained here as their files have them")
        elif key is None and project.has_section(dotted):
            self.notes.append(f"{place}: a section of `key: value` lines was expected")
        elif key is None:
            answer = answer_to(dotted) or answer_to(dotted.rpartition(".")[2]) or "docs/recipes.md has all of ours"
            self.add(self.changes, place, f"no key of {project.name_with_version}; {answer}")
        elif key.cost == "sizes":
            self.sizes[dotted] = value
        else:
            is_empty = asks_for_nothing(value)  # in a section whose defaults nobody here knows
            lines = self.others if key.cost == "refuse" and not is_empty else self._lines(key)
            self.add(lines, place, key.why)

    def add(self, lines: list[str], place: str, why: str) -> None:
        """Add a line that others with the same reason may stand beside."""
        line = f"{place}: {why}"
        self.reasons[line] = place, why
        lines += [line] if line not in lines else []

    def refusals(self, *, each: bool) -> list[str]:
        """The reasons why no recipe can be the same training.

        Args:
            each: one for each place, with what to read; else one for all places in a file that have the same reason.
        """
        if not each:
            return [*self.group_places(self.others, NOT_THE_SAME), f"nothing is written; {NEAREST}"]
        whole = [f"{place}: {NOT_THE_SAME}{why}" for place, why in map(self.reasons.__getitem__, self.others)]
        return [line if "; " in line else f"{line}; {NEAREST}" for line in whole]

    def group_places(self, lines: list[str], verdict: str = "") -> list[str]:
        """The lines with one for all places in a file that have the same reason."""
        groups: dict[tuple[str, str], list[str]] = {}
        for line in lines:
            place, why = self.reasons.get(line, (line, ""))
            file = next((name for name in self.files if why and place.startswith(f"{name}:")), "")
            groups.setdefault((file, why or line), []).append(place.removeprefix(f"{file}:") if file else place)
        texts = []
        for (file, why), places in groups.items():
            if len(places) > MAX_CHOICES:  # by their names alone
                places = [place.partition(" is ")[0] for place in places]
            named = "; ".join([places[0], *(place.strip() for place in places[1:])])
            where = f"{file}:{named}: " if file else f"{named}: " if named != why else ""
            texts.append(f"{where}{verdict}{why}")
        return texts

    def _lines(self, key: Key) -> list[str]:
        return self.changes if key.cost in ("changes", "refuse") else self.notes

    def _translate(self, key: Key, dotted: str, value: Any, place: str, *, is_default: bool) -> None:
        self.given.add(key.ours or "")
        try:
            translated = key.translate(value)
        except NoCounterpart as problem:
            if is_default and asks_for_nothing(value):
                self.idle.append(dotted)
                return
            self.add(self.others if key.decides else self._lines(key), place, str(problem))
        except (TypeError, ValueError, AttributeError):
            self._lines(key).append(f"{place}: a value of another kind was expected; {key.answer}")
        else:
            if translated is None:
                self.idle.append(dotted)
            elif key.ours is not None:
                self.carried[dotted] = key.ours
            self._put(key.ours, translated, place)
            if translated is not None and self.places.get(str(key.ours)) == place:
                self.written[str(key.ours)] = value
            if left_out := key.uncovered_part(value):
                self.notes.append(f"{place}: {left_out}")

    def _put(self, ours: str | None, value: Any, place: str) -> None:
        if ours is None or value is None:
            return
        home = self.other if ours.startswith(("~", "strategy.")) else self.recipe
        if ours in SEVERAL and ours in home:
            value = [*home[ours], *(name for name in value if name not in home[ours])]
        elif ours in home and home[ours] != value:
            is_of_two = place.partition(":")[0] != self.places[ours].partition(":")[0]
            if is_of_two and ours.startswith("strategy."):
                raise RecipeError(f"{place}, but {self.places[ours]}: these are two strategies; convert one at a time")
            if is_of_two and ours in OF_ENGINE and any(f": {name}.type is " in place for name in ENGINE):
                self.changes.append(
                    f"{self.places[ours]}: left out; the Trainer takes the JSON's own, so {ours} is {show(value)}, from"
                    f" {place}"
                )
                home[ours], self.places[ours] = value, place
                return
            self.changes.append(f"{place}: {ours.lstrip('~')} is {show(home[ours])} already, from {self.places[ours]}")
            return
        home[ours], self.places[ours] = value, place

    def settle(self, ours: str, value: Any, name: str) -> None:
        """Set a key of ours that follows from one of theirs.

        Of two files that set it, the one that was read first has precedence, and both values are named.

        Args:
            name: the key in `places` that has it.
        """
        place, earlier = self.places.get(name, name), self.places.get(ours)
        if earlier is None or ours not in self.recipe or is_same(self.recipe[ours], value):
            self.recipe[ours] = value
            self.places.setdefault(ours, place)
        elif self._rank(place) < self._rank(earlier):
            self.changes.append(f"{earlier}: {ours} is {show(value)} already, from {place}")
            self.recipe[ours], self.places[ours] = value, place
        else:
            self.changes.append(f"{place}: {ours} is {show(self.recipe[ours])} already, from {earlier}")

    def _rank(self, place: str) -> int:
        return next((i for i, file in enumerate(self.files) if place.startswith(f"{file}:")), len(self.files))

    def with_trackers(self) -> dict[str, Any]:
        """The recipe, with the options of each tracker beside its name. A project alone asks for its tracker."""
        recipe = {key: value for key, value in self.recipe.items() if not key.startswith("run.trackers")}
        trackers: dict[str, dict[str, Any]] = {name: {} for name in self.recipe.get("run.trackers", [])}
        options = {key: key.split(".")[2:] for key in self.recipe if key.startswith("run.trackers.")}
        trackers |= {name: {} for name, option in options.values() if option == "project" and name not in trackers}
        for key, (name, option) in options.items():
            if name in trackers:
                trackers[name][option] = self.recipe[key]
            else:
                self.notes.append(f"{self.places[key]}: the file does not turn {name} on, so it is left out")
        if trackers:
            recipe["run.trackers"] = trackers if any(trackers.values()) else [*trackers]
        return recipe

    def find(self, name: str) -> Path | None:
        """A file that a file names: from the current folder, from its own or, as a command in the root of a repository
        sees it, from one around that."""
        folders = (Path(), self.folder, *self.folder.resolve().parents)
        return next((folder / name for folder in folders if (folder / name).is_file()), None)

    def is_folder(self, name: str) -> bool:
        """Return whether a name is a folder here or beside the file, and not one on the Hub."""
        return (self.folder / name).is_dir() or Path(name).is_dir()

    def take(self, name: str, default: Any = None) -> Any:
        return self.other.pop(f"~{name}", default)

    def note(self, name: str, advice: str) -> None:
        _add_to(self.notes, self.places[name], advice)

    def change(self, name: str, advice: str) -> None:
        _add_to(self.changes, self.places[name], advice)

    @property
    def distribution(self) -> dict[str, Any]:
        """Properties of a strategy."""
        return {key.removeprefix("strategy."): value for key, value in self.other.items() if key[0] != "~"}


def _add_to(lines: list[str], place: str, advice: str) -> None:
    """A line, or more of the last one where that is of the same place."""
    if lines and lines[-1].startswith(f"{place}: "):
        lines[-1] += f"; {advice}"
    else:
        lines.append(f"{place}: {advice}")


def _is_switched_off(name: str, value: Any, project: Project) -> bool:
    """True for the flag that turns off what holds without it, as `--no_remove_unused_columns` (transformers'
    HfArgumentParser)."""
    return name.startswith("no_") and isinstance(value, bool) and not project.has(name) and project.has(name[3:])


def _is_own_module(path: str, value: Any) -> bool:
    return path.endswith(COMPONENT) and isinstance(value, str) and value.partition(".")[0] not in PACKAGES


def in_short(value: Any) -> str:
    """A value as it is, or the kind of a large one."""
    is_plain = isinstance(value, list) and not any(isinstance(item, list | dict) for item in value)
    if not isinstance(value, list | dict) or not value or (is_plain and len(value) <= MAX_SHOWN):
        return show(value)
    return kind_in_words(value)


def keys_of(values: dict[str, Any], project: Project) -> list[str]:
    """The dotted keys of a file."""
    return [".".join(map(str, path)) for path, _ in leaves_of(values, project)]


def empty_keys(values: dict[str, Any], project: Project) -> list[str]:
    """The dotted keys of a file that have no value."""
    return [".".join(map(str, path)) for path, value in leaves_of(values, project) if value is None]


def leaves_of(values: dict[str, Any], project: Project, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Keys with their values. A section is a value where it has a counterpart as a whole, or nothing in it."""
    for name, value in values.items():
        here = (*path, name)
        dotted = ".".join(map(str, here))
        key = project.keys.get(dotted)
        is_value = key is not None and key.ours is not None and not project.has_keys_in(dotted)
        if isinstance(value, dict) and value and not is_value:
            yield from leaves_of(value, project, here)
        else:
            yield here, value
