"""Registry of what a recipe selects by name: objectives, optimizers, schedules, kinds of rows. No torch.

Each entry carries its own recipe keys and properties, so the rest of the package asks the section and never compares
names. The files in a recipe's `plugins` register further entries (see `cookbook.config.plugins`).
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, ValidationInfo, model_validator

from cookbook.system.described import DescribedModel

Entry = TypeVar("Entry")

RECORDED = {"recorded": True}
"""Validation context for a recipe that a run recorded: an unregistered name is accepted with all its keys, so that no
plugin needs to be imported to read a record."""

_known: dict[str, dict[str, Any]] = {}
_plugin: dict[tuple[str, str], str] = {}
_importing: str | None = None


class Section(DescribedModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def register(entry: Entry) -> Entry:
    """Registers a kind of section or of rows under its name; usable as a decorator.

    Raises:
        ValueError: the name is already registered.
    """
    family, name = _family_and_name(entry)
    names = _known.setdefault(family, {})
    if name in names:
        raise ValueError(f"{family} {name!r} is taken; give it another name")
    names[name] = entry
    if _importing is not None:
        _plugin[family, name] = _importing
    return entry


def members(family: str) -> Mapping[str, Any]:
    """All entries of a family by name, in registration order."""
    return _known.get(family, {})


def begin_plugin(path: str | None) -> None:
    """Attributes the following registrations to this plugin file; None: to the package."""
    global _importing
    _importing = path


def entries_of(path: str) -> list[Any]:
    """The entries that a plugin file registered."""
    return [_known[family][name] for (family, name), origin in _plugin.items() if origin == path]


def take_plugin(path: str) -> None:
    """Unregisters the entries of a plugin file."""
    for family, name in [key for key, origin in _plugin.items() if origin == path]:
        del _plugin[family, name], _known[family][name]


def plugin_files() -> list[str]:
    """Plugin files with registered entries."""
    return list(dict.fromkeys(_plugin.values()))


def _family_and_name(entry: Any) -> tuple[str, str]:
    if isinstance(entry, type) and issubclass(entry, NamedSection):
        names = get_args(entry.model_fields["name"].annotation)
        if len(names) != 1:
            raise ValueError(f'{entry.__name__} needs a name of its own: name: Literal["..."]')
        return entry.family, names[0]
    return entry.family, entry.name


class NamedSection(Section):
    """A section whose `name` selects its keys: validating the family's base class returns an instance of that kind.

    A kind subclasses the family's base (a direct child of this class) with `name: Literal["its name"]`, its keys as
    fields, and its properties as class variables and methods.
    """

    family: ClassVar[str]
    """The section's key in a recipe."""
    default: ClassVar[str | None] = None
    """The kind of a section without a name."""
    name: str

    @classmethod
    def is_base(cls) -> bool:
        """Return whether this is the base of a family rather than one of its kinds."""
        return NamedSection in cls.__bases__

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Builds a section in Python, as from a recipe's keys."""
        return cls.model_validate(values)

    @classmethod
    def kinds(cls) -> "list[type[NamedSection]]":
        """All registered kinds of the family."""
        return list(members(cls.family).values())

    @classmethod
    def kind_of(cls, values: Any) -> "type[NamedSection]":
        """The kind that a section's values name; this class itself if the name is not registered."""
        name = values.get("name", cls.default) if isinstance(values, dict) else cls.default
        return members(cls.family).get(name, cls) if isinstance(name, str) else cls

    @model_validator(mode="wrap")
    @classmethod
    def _choose(cls, values: Any, handler: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict):
            return handler(values)
        if not cls.is_base():
            others = {key for kind in cls.kinds() for key in kind.model_fields} - cls.model_fields.keys()
            foreign = sorted(values.keys() & others)
            # An unknown key is reported first: with it, another kind may have been meant.
            is_misspelt = bool(values.keys() - others - cls.model_fields.keys())
            if foreign and not is_misspelt:
                raise ValueError(
                    f"{', '.join(foreign)} would be ignored by {values.get('name', cls.default)}; take it out"
                )
            return handler({key: value for key, value in values.items() if key not in foreign})
        kind = cls.kind_of(values)
        if kind is not cls:
            return kind.model_validate(values, context=info.context)
        if info.context == RECORDED:
            unknown: type[BaseModel] = type(cls.__name__, (cls,), {"model_config": ConfigDict(extra="allow")})
            return unknown.model_validate(values)
        raise _wrong_name(cls, values)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        if not cls.is_base():
            return super().__get_pydantic_json_schema__(core_schema, handler)
        kinds = members(cls.family).values()
        return {"anyOf": [kind.__get_pydantic_json_schema__(kind.__pydantic_core_schema__, handler) for kind in kinds]}


def _wrong_name(base: type[NamedSection], values: dict[str, Any]) -> ValidationError:
    if "name" not in values:
        problem: dict[str, Any] = {"type": "missing", "loc": ("name",), "input": values}
    elif not isinstance(values["name"], str):
        problem = {"type": "string_type", "loc": ("name",), "input": values["name"]}
    else:
        *names, last = map(repr, members(base.family))
        expected = f"{', '.join(names)} or {last}"
        problem = {"type": "literal_error", "loc": ("name",), "input": values["name"], "ctx": {"expected": expected}}
    return ValidationError.from_exception_data(base.__name__, [problem])  # type: ignore[list-item]
