"""Conversion of files of another project: whose they are, the files that are written, and what is left to say."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from typer import Argument, Option

from cookbook.commands.check.recipe_checks import check
from cookbook.commands.convert.collected import NOT_THE_SAME, in_short, keys_of, leaves_of
from cookbook.commands.convert.commands_and_scripts import read_settings
from cookbook.commands.convert.converted_rows import ROWS
from cookbook.commands.convert.keys import Conversion
from cookbook.commands.convert.strategy_files import choose_strategy, compare_sizes
from cookbook.commands.shared.answer_forms import ConvertAnswer
from cookbook.commands.shared.arguments import AsJson, positive
from cookbook.commands.shared.for_programs import answer, as_object
from cookbook.commands.shared.named_file import problem_of_name, write_named_file
from cookbook.config.base_recipe import KEY
from cookbook.config.foreign import NoCounterpart, Project, tables
from cookbook.config.recipe import RECIPES, Recipe, leaves
from cookbook.config.strategy import load_strategy, strategy_path
from cookbook.system.console import say
from cookbook.system.files import (
    Document,
    RecipeError,
    dump_yaml,
    gather_mistakes,
    make_folder,
    name_some,
    read_document,
    refuse,
)

ORDER = list(dict.fromkeys(leaves(Recipe)))
"""The keys of a recipe, in the order in which they are written."""

LENGTHS = ("run.num_epochs", "run.max_steps", "~steps_per_epoch")
ENOUGH = 5
"""Known keys of a file that tell its project, though most of the others are unknown to that."""
ProjectName = Literal[
    "trainer",
    "trl",
    "run-clm",
    "open-r1",
    "alignment-handbook",
    "llama-factory",
    "llama-factory-v1",
    "axolotl",
    "torchtune",
    "automodel",
    "accelerate",
    "deepspeed",
]


def convert(
    files: Annotated[
        list[Path],
        Argument(metavar="FILE...", help="a training file, an accelerate YAML, a DeepSpeed JSON, a shell script"),
    ],
    *,
    out: Annotated[Path | None, Option(help="default: recipes/ with the name of the first file")] = None,
    project: Annotated[
        ProjectName | None,
        Option(
            "--from",
            metavar="PROJECT",
            help=f"whose FILE it is, if its keys leave that open: {', '.join(get_args(ProjectName))}",
        ),
    ] = None,
    processes: Annotated[int | None, Option(callback=positive, help="with which the file was used")] = None,
    as_json: AsJson = False,
) -> int:
    """Turn another project's files into a recipe and a strategy."""
    out = out or RECIPES / f"{files[0].stem}.yaml"
    if out.suffix not in (".yaml", ".yml"):
        raise RecipeError(f"--out is {str(out)!r}; name a .yaml file")
    conversion, sources = _read(files, project, processes)
    training = next((described for _, described in sources if not described.is_distribution), None)
    conversion.derive(training)
    if conversion.others:
        raise RecipeError(conversion.refusals(each=as_json))
    if conversion.processes is None and not conversion.distribution:
        conversion.other["strategy.kind"] = "single"
        conversion.notes.append("no distribution in the file, so strategy single; any other has the same curve")
    name, files_to_write = choose_strategy(conversion.distribution, out.stem.replace(".", "_"), conversion.notes)
    if conversion.template is not None and training is not None:
        template = out.with_suffix(".jinja")
        files_to_write[template] = conversion.template
        conversion.recipe["data.chat_template"] = str(template)
    recipe = nest({"strategy": name, **conversion.with_trackers()})
    source = " and ".join(f"{document.name} ({described.name})" for document, described in sources)
    if training is not None:
        files_to_write[out] = f"# Converted by `cookbook convert` from {source}.\n" + dump_yaml(recipe)
    _write(files_to_write)
    say(f"from {source}")
    if training is None:
        say("no recipe: the file has no model and no data; for a recipe:")
        say(dump_yaml(recipe).rstrip())
    else:
        say(f"strategy: {name}")
    idle = _report_rest(conversion, *compare_sizes(conversion.sizes, name, files_to_write))
    mistakes: list[str] = []
    with gather_mistakes(mistakes):
        if training is None:
            load_strategy(strategy_path(name))
        else:
            of_mesh = load_strategy(strategy_path(name)).written_mesh.num_processes
            check([out], assignments=[], processes=conversion.processes or of_mesh)
    if mistakes:
        say("to correct before it runs:", *mistakes, sep="\n  ")
    if as_json:
        answer(
            ConvertAnswer(
                source=source,
                recipe=None if training is None else str(out),
                strategy=name,
                files=list(map(str, files_to_write)),
                settings=recipe,
                changes=conversion.changes,
                notes=conversion.notes,
                idle=idle,
                to_correct=list(map(as_object, mistakes)),
            )
        )
    return 0


def _read(
    files: list[Path], project: ProjectName | None, processes: int | None
) -> tuple[Conversion, list[tuple[Document, Project]]]:
    """A conversion that has read the files, and the settings in them with the project that each is of.

    Raises:
        RecipeError: a file that cannot be read or recognized, or two of a training.
    """
    settings = [read_settings(path, is_known) for path in files]
    documents = [document for read in settings for document in read.documents]
    program = next((read.program for read in settings if read.program), "")
    sources = [(document, recognize(document, project, program)) for document in documents]
    # A flag of the launcher comes before a key of its file.
    launched_with = [read.launched_with for read in settings if read.launched_with is not None]
    sources[1:1] = [(document, tables().projects["accelerate"]) for document in launched_with]
    if sum(not described.is_distribution for _, described in sources) > 1:
        raise RecipeError(f"{files[0]} and another file each have the settings of a training; give one of them")
    conversion = Conversion(processes or next((read.processes for read in settings if read.processes), None))
    conversion.program = program
    conversion.notes += [note for read in settings for note in read.notes]
    # The training file first: of two files that set a key, the one that is read first has precedence.
    for document, described in sorted(sources, key=lambda pair: pair[1].is_distribution):
        conversion.read(document, described)
    return conversion, sources


def _write(files: dict[Path, str]) -> None:
    """All of them or, if one is there already, none."""
    refuse([mistake for path in files for mistake in problem_of_name(path)])
    for path, text in files.items():
        make_folder(path.parent)
        write_named_file(path, text)
        say(f"{path}: written")


def _report_rest(conversion: Conversion, same: list[str], others: list[str]) -> list[str]:
    """Prints the settings of the files that the recipe does not have, the most harmful first. Returns those that need
    nothing.

    Args:
        same: sizes of the files that the strategy has too.
        others: those that it has otherwise.
    """
    if others:
        conversion.notes.append(
            f"speed and memory only: {', '.join(others)}; to keep yours, --strategy takes such a file"
        )
    if conversion.changes:
        say(
            "not in the recipe, and trains otherwise, or may:", *conversion.group_places(conversion.changes), sep="\n  "
        )
    if conversion.notes:
        say("to know, or to decide:", *conversion.group_places(conversion.notes), sep="\n  ")
    if idle := list(dict.fromkeys([*conversion.idle, *same])):
        say(f"needs nothing: {', '.join(idle)}")
    return idle


def nest(values: dict[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`, in the order of a recipe."""
    sections: dict[str, Any] = {}
    for key, value in sorted(values.items(), key=lambda pair: ORDER.index(pair[0])):
        section, _, name = key.partition(".")
        if name:
            sections.setdefault(section, {})[name] = value
        else:
            sections[key] = value
    return sections


def is_known(path: Path) -> bool:
    """Return whether a file can be converted."""
    try:
        recognize(read_document(path, takes_last=True))
        return True
    except RecipeError:
        return False


def recognize(document: Document, name: str | None = None, program: str = "") -> Project:
    """The project whose keys a file has.

    Args:
        name: whose it is if its keys leave that open; a distribution beside it is recognized all the same.
        program: what runs with these keys, if they are those of a command.

    Raises:
        RecipeError: too few keys are known, it is a recipe of ours, or two projects fit equally.
    """
    is_over_another = KEY in document.values and document.values.keys() <= {KEY, *Recipe.model_fields}
    if is_over_another or {"batch", "optim", "run"} <= document.values.keys():
        raise RecipeError(f"{document.name}: is a recipe already; check it with `cookbook check`")
    known = tables().projects
    keys = {candidate: keys_of(document.values, project) for candidate, project in known.items()}
    fits = {
        candidate: sum(project.has(key) or project.has(key.removeprefix("no_")) for key in keys[candidate])
        for candidate, project in known.items()
    }
    # A key of a method that is not converted speaks for the project in which it is one of those that are.
    foreign = {name: sum(map(known[name].is_of_another_method, keys[name])) for name in known}
    most = max((fits[name], -foreign[name]) for name in known)
    best = [name for name in known if (fits[name], -foreign[name]) == most]
    best = [candidate for candidate in best if known[candidate].base not in best]  # the base knows them all
    is_named = name is not None and known[name].is_distribution == known[best[0]].is_distribution
    fitting = [known[candidate] for candidate in best]
    is_of_trainer = known["trainer"] not in fitting and all(root_of(fits) is known["trainer"] for fits in fitting)
    is_other = known[best[0]].program is not None and not re.search(str(known[best[0]].program), program)
    is_own = name == "trainer" and len(best) > 1
    is_own |= name is None and program.endswith(".py") and (len(best) > 1 or is_other)
    is_own &= is_of_trainer
    chosen = name if name is not None and is_named and not is_own else best[0]
    if name is None and "trl" in best and known["trl"].find_method(program) is not None:
        chosen, is_named, is_own = "trl", True, False
    if not known[chosen].is_read and not is_own:
        raise RecipeError(f"{document.name}: is a file of {known[chosen].name}, which `convert` does not read")
    # A page may have taken the indentation of an accelerate file, whose own key stays.
    is_indented_anew = known[chosen].is_distribution and "distributed_type" in document.values
    if fits[chosen] * 3 < len(keys[chosen]) * 2 and not is_indented_anew:
        if fits[chosen] >= ENOUGH:
            refuse(list(decided_otherwise(document, known[chosen])))
        names = ", ".join(described.name for described in known.values() if described.is_read)
        unknown = [key for key in keys[chosen] if not known[chosen].has(key)]
        raise RecipeError(
            f"{document.name}: of its {len(keys[chosen])} keys {known[chosen].name} has {fits[chosen]}, and not"
            f" {name_some(unknown)}; files of {names} can be converted; name yours with --from"
        )
    if not known[chosen].is_distribution and not trains(keys[chosen], known[chosen]):
        raise RecipeError(
            f"{document.name}: no settings of a training: {known[chosen].name} has neither rows to train on, nor an"
            " optimizer or a length of the run in it"
        )
    if is_own:
        return of_own_program(program or document.name, fitting)
    if len(best) > 1 and not is_named:
        own = ", or --from trainer for a program of your own" * is_of_trainer
        raise RecipeError(
            f"{document.name}: may be a file of {' or '.join(best)}; write --from {best[0]}, for example{own}"
        )
    return known[chosen]


def root_of(project: Project) -> Project:
    """The project at the end of those that extend one another."""
    return project if project.base is None else root_of(tables().projects[project.base])


def of_own_program(name: str, fitting: list[Project]) -> Project:
    """A program with TrainingArguments and arguments of its own, of which those are known that mean the same in all
    projects whose keys it has."""
    trainer = tables().projects["trainer"]
    first, *others = (project.keys for project in fitting)
    first_named, *names = (project.name for project in fitting)
    shared = {path: key for path, key in first.items() if all(keys.get(path) == key for keys in others)}
    whose = f"{'equally ' * bool(names)}those of {' and of '.join([first_named, *names])}"
    why = (
        f"{name}: its keys are {whose}, so it is taken for a program of your own with {trainer.name}: write its rows"
        " and its loss, or name a project with --from"
    )
    return replace(trainer, keys={**shared, **trainer.keys}, always=(*trainer.always, why))


def decided_otherwise(document: Document, project: Project) -> Iterator[str]:
    """One reason for each value by which a file says itself that its training is another."""
    for path, value in leaves_of(document.values, project):
        key = project.keys.get(".".join(map(str, path)))
        if key is not None and key.decides and value is not None:
            try:
                key.translate(value)
            except NoCounterpart as problem:
                yield f"{document.place(*path)} is {in_short(value)}: {NOT_THE_SAME}{problem}"


def trains(keys: list[str], project: Project) -> bool:
    """True if a file of these keys trains: an inference has a model, an evaluation a batch too, and no more."""
    counterparts = {key.ours for path in keys if (key := project.entry(path)) is not None and key.ours is not None}
    return any(ours.startswith("optim.") or ours in (*ROWS, *LENGTHS) for ours in counterparts)
