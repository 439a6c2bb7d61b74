"""Keys of accelerate's and DeepSpeed's files that a strategy has no use for, by `foreign.yaml`: passed over where their
value asks for nothing or for what a run does anyway, compared with the recipe where they are its own, refused else.
"""

import copy
import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from cookbook.config.foreign import SWITCH, NoCounterpart, Project, asks_for_nothing, owner_of, tables
from cookbook.system.files import Document, show

AUTO = "auto"
COMMENT = ("_", "//")
"""Beginnings of names at the top of a JSON under which people write comments, which DeepSpeed passes over too."""


@dataclass(frozen=True)
class Claim:
    """A value in a strategy file for something that the recipe owns."""

    place: str
    """As in `file:line: key`."""
    key: str
    """A key of the recipe, or `~X` as in `foreign.Key`."""
    written: Any
    """The value in the file."""
    value: Any
    """In the recipe's terms."""
    is_default: bool = False
    """True if the file is silent, and DeepSpeed's default holds."""

    @property
    def section(self) -> str:
        """`scheduler` of `file:line: scheduler.type`."""
        return self.place.rpartition(": ")[2].partition(".")[0]


class Sorting:
    """The keys of a document that are not a strategy's, sorted by what becomes of them.

    Args:
        project: `accelerate` or `deepspeed`, of which the file is.
    """

    def __init__(self, document: Document, project: str) -> None:
        self.document = document
        self.is_json = project == "deepspeed"
        self._project = project
        self.passed: list[str] = []
        """Keys without effect, with their values."""
        self.claims: list[Claim] = []
        self.mistakes: list[str] = []

    @property
    def project(self) -> Project:
        """The keys of such files; asked for at the first key that is not a strategy's."""
        return tables().projects[self._project]

    def strip(self, model: type[BaseModel]) -> Document:
        """The document without what is no key of a strategy.

        Args:
            model: the keys of a strategy, with their sections.
        """
        values = copy.deepcopy(self.document.values)
        if isinstance(values, dict):
            self._strip_section(values, model, ())
        return replace(self.document, values=values)

    def _strip_section(self, values: dict[str, Any], model: type[BaseModel] | None, path: tuple[str, ...]) -> None:
        is_off = model is None and values.get(SWITCH) is False
        for name, value in list(values.items()):
            here, info = (*path, str(name)), None if model is None else model.model_fields.get(name)
            section = None if info is None else _section_in(info.annotation)
            if info is not None and section is None:
                continue
            if not path and self.is_json and here[0].startswith(COMMENT):
                self.passed.append(here[0])
                del values[name]
                continue
            dotted = ".".join(here)
            if isinstance(value, dict) and value.get("device") == "none":
                self.passed.append(f"{dotted}.device: none")
            elif (
                isinstance(value, dict)
                and value
                and (section or self.project.has_section(dotted) or value.get(SWITCH) is False)
            ):
                self._strip_section(value, section, here)
                is_refused = section is None and self._refuse_section(value, here, is_in_ours=model is not None)
                if value and not is_refused:  # a key of a strategy, or for the section around it
                    continue
            elif value if section else not self._judge(here, value, model, is_off=is_off):
                continue
            del values[name]

    def _refuse_section(self, values: dict[str, Any], path: tuple[str, ...], *, is_in_ours: bool) -> bool:
        """Refuse what is left of a section that is no strategy's; one within such a section may be left to that.

        Returns:
            Whether nobody else is to refuse it.
        """
        dotted = ".".join(path)
        key = None if dotted in self.project.open_sections else self.project.keys.get(dotted)
        if values and key is not None and key.ours is None:
            self.mistakes.append(_refusal(self.document.place(*path), values, key.answer))
            return True
        if is_in_ours and not self._has_wrong_type(path):
            self.mistakes += _unknown_keys(path, values, self.document)
        return is_in_ours

    def _has_wrong_type(self, path: tuple[str, ...]) -> bool:
        """True if the `type` of a section is refused, for which its other keys may be right."""
        start = f"{self.document.place(*path, 'type')} is "
        return any(mistake.startswith(start) for mistake in self.mistakes)

    def _judge(self, path: tuple[str, ...], value: Any, model: type[BaseModel] | None, *, is_off: bool) -> bool:
        """Sort one key. Returns whether the project has it."""
        dotted, place, project = ".".join(path), self.document.place(*path), self.project
        key, ours = project.keys.get(dotted), project.compares.get(dotted)
        is_section = project.has_section(dotted)
        is_known = bool(key or ours or dotted in project.passes or is_section)
        if is_known and _is_open(value):  # whoever trains fills it in
            return True
        if (is_off and path[-1] != SWITCH) or _asks_for_nothing(dotted, value, project, is_known=is_known):
            self.passed.append(f"{dotted}: {show(value)}")
        elif ours is not None:
            self.claims.append(Claim(place, ours, value, value))
        elif key is None and dotted in project.passes:
            wanted = " or ".join(map(show, project.passes[dotted]))
            self.mistakes.append(f"{place} is {show(value)}, which a run does not do; write {wanted}, or take it out")
        elif key is None and is_section:
            self.mistakes.append(f"{place} is {show(value)}, which is no section of `key: value` lines; take it out")
        elif key is None and (name := _nearest_key(path, project, model)):
            self.mistakes.append(f"{place}: unknown key; did you mean {name}?")
        elif key is None:
            return False
        elif key.ours is None or key.ours.startswith("strategy."):
            self.mistakes.append(_refusal(place, value, key.answer))
        else:
            try:
                is_default = path in self.document.assumed
                self.claims.append(Claim(place, key.ours, value, key.translate(value), is_default=is_default))
            except NoCounterpart as error:
                self.mistakes.append(f"{place} is {show(value)}: {error}; take it out")
        return True


def _unknown_keys(path: tuple[str, ...], values: dict[str, Any], document: Document) -> Iterator[str]:
    """One mistake for each key of a section, at any depth."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _unknown_keys((*path, str(name)), value, document)
        else:
            yield f"{document.place(*path, name)}: unknown key; {owner_of(path[0]) or 'take it out'}"


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, getattr(annotation, "__args__", ()))), None)


def _refusal(place: str, value: Any, answer: str) -> str:
    has_way = "write " in answer or "take " in answer
    return f"{place} is {show(value)}: {answer}{', and take this out' if has_way else '; take it out'}"


def _is_open(value: Any) -> bool:
    return all(map(_is_open, value.values())) if isinstance(value, dict) and value else value == AUTO


def _nearest_key(path: tuple[str, ...], project: Project, model: type[BaseModel] | None) -> str | None:
    """The key of the project that was meant; None if it is a strategy's, which whoever validates that names."""
    start = "".join(f"{part}." for part in path[:-1])
    own = {*model.model_fields} if model else set()
    names = (*project.keys, *project.passes, *project.compares)
    here = {name.removeprefix(start).partition(".")[0] for name in names if name.startswith(start)} | own
    nearest = difflib.get_close_matches(path[-1], here, n=1, cutoff=0.75)
    return nearest[0] if nearest and nearest[0] not in own else None


def _asks_for_nothing(dotted: str, value: Any, project: Project, *, is_known: bool) -> bool:
    if dotted not in project.passes and dotted.endswith(f".{SWITCH}") and not is_known:
        return value is False
    is_empty = value in (None, {}, []) or (isinstance(value, dict) and asks_for_nothing(value))
    return (is_known and is_empty) or project.passes_over(dotted, value)


def contradictions(claims: tuple[Claim, ...], ours: dict[str, Any]) -> Iterator[str]:
    """One mistake for each claim that is not what the recipe has. The defaults of another scheduler or optimizer than
    the recipe's are left out.

    Args:
        ours: what a run has, by the keys of claims.
    """
    wrong = [claim for claim in claims if claim.key in ours and not is_same(ours[claim.key], claim.value)]
    other_kinds = {claim.section for claim in wrong if claim.key.endswith(".name")}
    for claim in wrong:
        name, written = claim.key.lstrip("~"), show(claim.written)
        recipe = f"but the recipe's {name} is {show(ours[claim.key])}"
        way = f"write {name}: {show(claim.value)} in the recipe" if name == claim.key else "change the recipe"
        if not claim.is_default:
            yield f"{claim.place} is {written}, {recipe}; take the key out, or {way}"
        elif claim.section not in other_kinds:
            yield f"{claim.place} is missing, so DeepSpeed's default {written} holds, {recipe}; write the key, or {way}"


def is_same(value: Any, other: Any) -> bool:
    """True if two values are equal, or numbers that differ by rounding."""
    other = tuple(other) if isinstance(other, list) else other
    if type(value) is float and isinstance(other, int | float):
        return math.isclose(value, other, rel_tol=1e-9)
    return bool(value == other)
