"""What a recipe chooses by name: objectives, optimizers, schedules, kinds of rows, each with its own facts. No torch.

A section with a `name` (`Named`) has a kind for each name, with keys of its own. Nothing else in the package compares
such a name: it asks the section. Files named by the recipe's `plugins` register more (see `cookbook.plugins`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, ValidationInfo, model_validator

if TYPE_CHECKING:
    from cookbook.strategy import Strategy

Entry = TypeVar("Entry")

RECORDED = {"recorded": True}
"""Context to validate what a run wrote down with: a name that is not known here is taken as it is, with its keys, and
keys that a kind has not are left out. No plugin is imported for a record."""

_known: dict[str, dict[str, Any]] = {}
_plugin: dict[tuple[str, str], str] = {}
_importing: str | None = None


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Strategies that something does not go with."""

    what: str
    """Those strategies, in words."""
    clashes: "Callable[[Strategy], bool]"
    why: str
    seen: str
    """The versions on which it was seen, or "by design"."""
    way_out: str


def register(entry: Entry) -> Entry:
    """Makes a kind of section, or of rows, known by its name. Also a decorator.

    Raises:
        ValueError: the name is taken.
    """
    family, name = _family_and_name(entry)
    names = _known.setdefault(family, {})
    if name in names:
        raise ValueError(f"{family} {name!r} is taken; give it another name")
    names[name] = entry
    if _importing is not None:
        _plugin[family, name] = _importing
    return entry


def known(family: str) -> Mapping[str, Any]:
    """The entries of a family by name, in the order of their registration."""
    return _known[family]


def begin_plugin(path: str | None) -> None:
    """What is registered from here on comes from this file; None: from the package."""
    global _importing
    _importing = path


def entries_of(path: str) -> list[Any]:
    """What a plugin registered."""
    return [_known[family][name] for (family, name), origin in _plugin.items() if origin == path]


def take_plugin(path: str) -> None:
    """Forgets what a plugin registered."""
    for family, name in [key for key, origin in _plugin.items() if origin == path]:
        del _plugin[family, name], _known[family][name]


def plugin_files() -> list[str]:
    """The plugins whose entries are known now."""
    return list(dict.fromkeys(_plugin.values()))


def _family_and_name(entry: Any) -> tuple[str, str]:
    if isinstance(entry, type) and issubclass(entry, Named):
        names = get_args(entry.model_fields["name"].annotation)
        if len(names) != 1:
            raise ValueError(f'{entry.__name__} needs a name of its own: name: Literal["..."]')
        return entry.family, names[0]
    return entry.family, entry.name


class Named(Section):
    """A section whose `name` decides which keys it has; validated as such, it becomes the kind of that name.

    A kind is a subclass of a family's base with `name: Literal["its name"]`, its keys as fields and its facts as class
    variables and methods.
    """

    family: ClassVar[str]
    """The section's key in a recipe."""
    default: ClassVar[str | None] = None
    """The kind where a recipe gives no name."""
    name: str

    @classmethod
    def is_base(cls) -> bool:
        """Whether this is a family's base, and no kind."""
        return Named in cls.__bases__

    @classmethod
    def of(cls, **values: Any) -> Self:
        """The kind that these keys make, from Python."""
        return cls.model_validate(values)

    @classmethod
    def kinds(cls) -> "list[type[Named]]":
        """All kinds of a base."""
        return list(known(cls.family).values())

    @classmethod
    def kind_of(cls, values: Any) -> "type[Named]":
        """The kind that the values of a section are of; this class itself if there is none of their name."""
        name = values.get("name", cls.default) if isinstance(values, dict) else cls.default
        return known(cls.family).get(name, cls) if isinstance(name, str) else cls

    @model_validator(mode="wrap")
    @classmethod
    def _choose(cls, values: Any, handler: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict):
            return handler(values)
        is_record = info.context == RECORDED
        if not cls.is_base():
            others = {key for kind in cls.kinds() for key in kind.model_fields} - cls.model_fields.keys()
            foreign = sorted(values.keys() & others)
            is_misspelt = bool(values.keys() - others - cls.model_fields.keys())  # it may be the name that is
            if foreign and not is_record and not is_misspelt:
                raise ValueError(
                    f"{', '.join(foreign)} would be ignored by {values.get('name', cls.default)}; take it out"
                )
            return handler({key: value for key, value in values.items() if key not in foreign})
        kind = cls.kind_of(values)
        if kind is not cls:
            return kind.model_validate(values, context=info.context)
        if is_record:
            unknown: type[BaseModel] = type(cls.__name__, (cls,), {"model_config": ConfigDict(extra="allow")})
            return unknown.model_validate(values)
        raise _wrong_name(cls, values)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        if not cls.is_base():
            return handler(core_schema)
        return {"anyOf": [handler(kind.__pydantic_core_schema__) for kind in known(cls.family).values()]}


def _wrong_name(base: type[Named], values: dict[str, Any]) -> ValidationError:
    if "name" not in values:
        problem: dict[str, Any] = {"type": "missing", "loc": ("name",), "input": values}
    elif not isinstance(values["name"], str):
        problem = {"type": "string_type", "loc": ("name",), "input": values["name"]}
    else:
        *names, last = map(repr, known(base.family))
        expected = f"{', '.join(names)} or {last}"
        problem = {"type": "literal_error", "loc": ("name",), "input": values["name"], "ctx": {"expected": expected}}
    return ValidationError.from_exception_data(base.__name__, [problem])  # type: ignore[list-item]
