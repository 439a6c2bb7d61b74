"""Strict YAML and JSON files with the place of every key, paths, and mistakes."""

import contextlib
import copy
import difflib
import functools
import hashlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import yaml
from pydantic import AfterValidator

MAX_FILE_BYTES = 50_000
"""Far above any settings file, and parsed quickly."""
MAX_KEY = 4096
"""Characters of a key, which may be a path."""
MAX_BRACKETS = 50
"""Maximum nesting of brackets; the time of PyYAML grows with its square."""

KeyPath = tuple[str | int, ...]


class RecipeError(ValueError):
    """Mistakes that a user can fix in a file or on the command line, each once: exit code 2, no traceback."""

    def __init__(self, mistakes: str | list[str]) -> None:
        assert mistakes
        self.mistakes = [mistakes] if isinstance(mistakes, str) else list(dict.fromkeys(mistakes))
        super().__init__("\n".join(self.mistakes))

    def __reduce__(self) -> tuple[type["RecipeError"], tuple[list[str]]]:
        return type(self), (self.mistakes,)  # an exception is unpickled with its text otherwise


def cannot_write(place: object, error: OSError, instead: str = "use a folder that you can write to") -> str:
    """The mistake of a place that the system refuses to write, and what to write `instead`."""
    return f"{place}: cannot be written ({error.strerror or error}); {instead}"


def make_folder(path: Path) -> None:
    """Make a folder and its parents, if it is not there.

    Raises:
        RecipeError: the system refuses it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(cannot_write(path, error)) from None


def refuse(mistakes: list[str]) -> None:
    """Raises RecipeError if there are any."""
    if mistakes:
        raise RecipeError(mistakes)


@contextlib.contextmanager
def gather_mistakes(mistakes: list[str]) -> Iterator[None]:
    """Adds the mistakes that end a block to a list, so that they can be reported with others."""
    try:
        yield
    except RecipeError as error:
        mistakes += error.mistakes


@dataclass
class Document:
    """A parsed file: plain values, and the line of each key."""

    name: str
    values: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overrides: set[KeyPath] = field(default_factory=set)
    file: Path | None = None
    """Future path, if it is not read from the file `name`: its relative paths start there."""
    assumed: frozenset[KeyPath] = frozenset()
    """Keys that the file does not have, whose values are the defaults of whoever else reads it."""
    mistakes: list[str] = field(default_factory=list)
    """Found on the way to what the file describes, and reported with those that are found later."""
    notes: list[str] = field(default_factory=list)
    """For the user of a file without mistakes."""
    is_whole: bool = True
    """True if later mistakes mean something: not in a file that cannot be read."""
    empty: frozenset[KeyPath] = frozenset()
    """Keys without a value, which are no written null."""
    inherited: dict[KeyPath, str] = field(default_factory=dict)
    """File that a key comes from, by key, if that is not this one."""
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file that was read."""
    repeated: dict[KeyPath, int] = field(default_factory=dict)
    """Line of the first, by key that the file has several times."""

    def at(self, *path: str | int) -> str | None:
        """`file:line` of a key that a file has."""
        line = self.lines.get(path)
        return None if line is None else f"{self.inherited.get(path, self.name)}:{line}"

    def none_at(self, *path: str | int) -> str:
        """Words for a key without a value: left empty, or null."""
        return "empty" if path in self.empty and path not in self.overrides else "null"

    def place(self, *path: str | int) -> str:
        """`file:line: section.key`, with the nearest known line when the key itself is missing."""
        dotted = ".".join(shorten_text(str(part)) for part in path)
        for override in self.overrides:
            if path[: len(override)] == override:
                return f"--set {dotted}"
            if override[: len(path)] == path and path not in self.lines:
                return f"--set {'.'.join(map(str, override))}: {dotted}"
        for length in range(len(path), -1, -1):
            if (at := self.at(*path[:length])) is not None:
                return f"{at}: {dotted}".removesuffix(": ")
        return f"{self.name}: {dotted}".removesuffix(": ")


def path_problem(text: str) -> str | None:
    """Describe what makes a text unusable as a path, if anything does; does not look at the disk."""
    if not text.strip():
        return "is empty; write a path"
    if match := re.match(r"~|(?:.*/)?(\$\{?[A-Za-z_]\w*\}?)", text):
        return f"is {show(text)}, and {match[1] or '~'} is not expanded here; write the folder in full"
    if not text.isprintable():
        return f"is {show(text)}, with a character that no path should have"
    if len(text.encode()) > 1000 or any(len(part.encode()) > 255 for part in Path(text).parts):
        return f"is {show(text)}, which is too long for a path"
    return None


def _refuse_odd_path(text: str) -> str:
    problem = path_problem(text)
    if problem:
        raise ValueError(problem)
    return text


PathText = Annotated[str, AfterValidator(_refuse_odd_path)]
"""A path, or a name on the Hub."""


NEAR = 0.75
"""Least nearness of a name that is meant (difflib's ratio): one letter of three may differ, `epochs` is no `hooks`."""


def closest(word: str, choices: Iterable[str], least: float = NEAR) -> str | None:
    """The choice most like a word, the shortest of several, or None if none is."""
    matches = difflib.get_close_matches(word, list(choices), n=3, cutoff=least)
    return max(
        matches, key=lambda choice: (difflib.SequenceMatcher(None, choice, word).ratio(), -len(choice)), default=None
    )


MAX_CHOICES = 8
"""Names in a message."""


def nearest(word: str, choices: list[str]) -> str:
    """`did you mean x?` if a choice is close, else a list of choices."""
    nearest_choice = closest(word, choices)
    return f"did you mean {nearest_choice}?" if nearest_choice else f"known here: {name_some(choices)}"


def name_some(choices: Sequence[str]) -> str:
    """The first names of a list, and how many more it has."""
    left_out = len(choices) - MAX_CHOICES
    more = f" and {left_out} more" if left_out > 1 else ""
    return ", ".join(choices[: MAX_CHOICES if more else None]) + more


class _StrictLoader(yaml.SafeLoader):
    """YAML without tags, anchors and aliases, so that each value is what it looks like."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def compose_node(self, parent, index):
        event = self.peek_event()
        if event.anchor is not None:
            raise yaml.MarkedYAMLError(
                problem="anchors (&name) and aliases (*name) are not supported; write the value out",
                problem_mark=event.start_mark,
            )
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(
                problem=f"tags are not supported ({event.tag}); write a plain value", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)

    def fetch_flow_collection_start(self, token):
        if self.flow_level == MAX_BRACKETS:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(token)


class _Dumper(yaml.SafeDumper):
    """Also quotes what only `_StrictLoader` would parse as a number."""


# Numbers as in YAML 1.2: PyYAML's YAML 1.1 reads 2e-5 as text, 010 as 8 and 1:30 as 90.
_FLOAT = r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
for _kind_of_scalar, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"(?:yes|no|true|false|on|off)", list("yYnNtTfFoO")),
    ("int", r"[-+]?(0|[1-9][\d_]*)", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _flags = re.IGNORECASE if _kind_of_scalar == "bool" else 0
    for _class in (_StrictLoader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind_of_scalar}", re.compile(f"^(?:{_pattern})$", _flags), _first
        )
# Programs in Go, Kubernetes' too, read these as true and false, and as a number in base 8 (yaml.v2, resolve.go).
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^([yYnN]|0o[0-7]+)$"), list("yYnN0"))


def value_of_word(text: str) -> Any:
    """The number, truth or null that a word of a command is; a list or an object in brackets; else the text as it is,
    a `#` and a `: ` in it too.
    """
    loader = _StrictLoader(text if text.startswith(("[", "{")) else "")
    try:
        if (node := loader.get_single_node()) is None:
            node = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text)
        return loader.construct_document(node)
    except (yaml.YAMLError, RecursionError, ValueError):  # int() reads 4,300 digits
        return text


def dump_yaml(values: dict[str, Any]) -> str:
    """YAML text that `read_document` reads back to equal values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def in_flow(values: dict[str, Any] | list[Any]) -> str:
    """YAML text in one line: `{user: question, assistant: answer}`."""
    written = yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=math.inf
    )
    return written.strip()


def read_document(path: Path, assignments: Iterable[str] = (), *, takes_last: bool = False) -> Document:
    """The mapping in a `.yaml` or `.json` file, after `apply_overrides`.

    Args:
        takes_last: of a key that is given twice the last holds, as for Python's own readers.

    Raises:
        RecipeError: missing, too large, not UTF-8, not YAML (or JSON), empty, not a mapping, or a key given twice.
    """
    name = str(path)
    if re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", name):  # a line of its own in a script of `submit`
        raise RecipeError(f"{show(name)}: has a character that no path should have; rename the file")
    try:
        if not path.is_file():
            if path.is_symlink():
                path.stat()  # its error has the reason
            raise RecipeError(
                f"{name}: {'a folder, not a' if path.is_dir() else 'no such'} file (looked in {Path.cwd()})"
            )
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RecipeError(
                f"{name}: {path.stat().st_size:,} bytes are too many for a settings file ({MAX_FILE_BYTES:,})"
            )
        content = path.read_bytes()
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise RecipeError(f"{name}: not UTF-8 text ({error})") from None
    except OSError as error:
        raise RecipeError(f"{show(name)}: cannot be read ({error.strerror})") from None
    parse = _parse_json if path.suffix == ".json" else _parse_yaml
    document = parse(name, text, takes_last=takes_last)
    if document.values is None:
        raise RecipeError(f"{name}: the file is empty")
    if not isinstance(document.values, dict):
        raise RecipeError(f"{name}: expected `key: value` lines, found {type_name(document.values)}")
    document.digests[name] = hashlib.sha256(content).hexdigest()
    return apply_overrides(document, assignments)


def _parse_yaml(name: str, text: str, *, takes_last: bool = False) -> Document:
    """Parse a text, or copy what it was parsed to: commands read the files of a strategy once for each recipe."""
    parsed = _parse_new_yaml(name, text, takes_last)
    values, lines = copy.deepcopy(parsed.values), dict(parsed.lines)
    return Document(name, values, lines, empty=parsed.empty, repeated=dict(parsed.repeated))


@functools.lru_cache(maxsize=128)
def _parse_new_yaml(name: str, text: str, takes_last: bool) -> Document:
    document, mistakes = Document(name, None), []
    empty: set[KeyPath] = set()

    def forget(path: KeyPath) -> None:
        for known in [known for known in document.lines if known[: len(path)] == path]:
            del document.lines[known]
        empty.difference_update({known for known in empty if known[: len(path)] == path})
        for known in [known for known in document.repeated if known[: len(path)] == path != known]:
            del document.repeated[known]

    def build(node: yaml.Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        document.lines.setdefault(path, line)
        if isinstance(node, yaml.MappingNode):
            return build_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [build(child, (*path, i)) for i, child in enumerate(node.value)]
        try:
            value = loader.construct_object(node)
        except ValueError:  # Python limits the digits of an integer
            value = sys.maxsize + 1
        if value is None and node.value.lower() != "null":
            empty.add(path)
        if isinstance(value, int) and abs(value) > sys.maxsize:
            written = node.value if len(node.value) <= 40 else f"a number of {len(node.value)} characters"
            key = ".".join(map(str, path)) or "it"  # of --set, the text is the value alone
            mistakes.append(f"{name}:{line}: {key} is {written}; write less than 2^63")
        return _int_if_whole(node.value, value) if isinstance(value, float) else value

    def build_mapping(node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                mistakes.append(f"{name}:{line}: a key must be a plain word, found a list or mapping before the colon")
                continue
            key = key_node.value
            if not key.isprintable() or len(key) > MAX_KEY:
                mistakes.append(f"{name}:{line}: {show(key)} is not a valid key")
                continue
            if key in values:
                first, dotted = document.lines[(*path, key)], ".".join(map(str, (*path, key)))
                if not takes_last:
                    mistakes.append(f"{name}:{line}: {dotted}: given twice (first in line {first}); keep one of them")
                    continue
                forget((*path, key))
                document.repeated.setdefault((*path, key), first)
            document.lines[(*path, key)] = line
            values[key] = build(value_node, (*path, key))
        return values

    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
        if node is not None:
            document.values = build(node, ())
    except yaml.MarkedYAMLError as error:
        place = f"{name}:{error.problem_mark.line + 1}" if error.problem_mark else name
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        hint = " (indent with spaces)" if "'\\t'" in problem else ""
        raise RecipeError(f"{place}: not valid YAML: {problem}{hint}") from None
    except yaml.reader.ReaderError as error:
        place = f"{name}:{text.count(chr(10), 0, error.position) + 1}"
        raise RecipeError(f"{place}: not valid YAML: character {chr(error.character)!r} is not allowed") from None
    except RecursionError:
        raise RecipeError(f"{name}: not valid YAML: nested too deeply") from None
    refuse(mistakes)
    document.lines[()] = 1
    document.empty = frozenset(empty)
    return document


def _int_if_whole(text: str, value: float) -> float:
    """An integer if it was written like 2e8, as DeepSpeed's documentation writes sizes."""
    return int(value) if "e" in text.lower() and abs(value) < 2**53 and value.is_integer() else value


def _parse_json(name: str, text: str, *, takes_last: bool = False) -> Document:
    if not text.strip():
        return Document(name, None)
    try:
        values = json.loads(text, parse_float=lambda number: _int_if_whole(number, float(number)))
    except json.JSONDecodeError as error:
        is_comment = re.match(r"\s*(//|/\*|#)", error.doc[error.pos :])
        hint = " (JSON has no comments)" if is_comment else ""
        if error.doc[: error.pos].rstrip().endswith(",") and error.doc[error.pos : error.pos + 1] in ("}", "]"):
            hint = " (no comma before a closing bracket)"
        raise RecipeError(f"{name}:{error.lineno}: not valid JSON: {error.msg}{hint}") from None
    except RecursionError:
        raise RecipeError(f"{name}: not valid JSON: nested too deeply") from None
    except ValueError:
        raise RecipeError(f"{name}: not valid JSON: a number with too many digits") from None
    # JSON without tabs is valid YAML, whose parser records lines and detects duplicate keys.
    written = _parse_yaml(name, text.replace("\t", " "), takes_last=takes_last)
    return Document(name, values, written.lines, empty=written.empty, repeated=written.repeated)


def apply_overrides(document: Document, assignments: Iterable[str]) -> Document:
    """Writes `section.key=value` assignments, values in YAML, into the document."""
    mistakes = document.mistakes
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            mistakes.append(f"--set {assignment}: write it as section.key=value")
            continue
        try:
            value = _parse_yaml("--set", text).values
            _refuse_left_out(text)
        except RecipeError as error:
            mistakes += [
                f"--set {assignment}: {re.sub(r'^--set:?[0-9]*: ', '', mistake)}" for mistake in error.mistakes
            ]
            continue
        target = document.values
        for i, name in enumerate(path[:-1], start=1):
            if target.get(name) is None:
                target[name] = {}
            target = target[name]
            if not isinstance(target, dict):
                section = ".".join(path[:i])
                mistakes.append(
                    f"--set {assignment}: {section} is {show(target)}, which has no keys; set {section} as a whole"
                )
                break
        else:
            before = target.get(path[-1])
            if isinstance(before, dict) and isinstance(value, dict):
                lost = [f"{name}: {show(was)}" for name, was in flatten(before).items() if name not in flatten(value)]
                if lost:
                    document.notes.append(f"--set {assignment}: replaces the whole of {key}, without {', '.join(lost)}")
            elif path in document.overrides and before not in (None, value):
                document.notes.append(f"--set {assignment}: replaces {show(before)} of an earlier --set")
            target[path[-1]] = value
            document.overrides.add(path)
    return document


def _refuse_left_out(text: str) -> None:
    """Refuses a value of which YAML would leave out a part, or all.

    Raises:
        RecipeError: a comment; or nothing or a ~, which YAML reads as null.
    """
    if not text.strip():
        raise RecipeError("is empty; write a value, or null to unset the key")
    node = _StrictLoader(text).get_single_node()
    if comment := text[node.end_mark.index if node else 0 :].strip():
        quoted = text.strip().replace("\\", "\\\\").replace('"', '\\"')
        raise RecipeError(f'YAML takes {show(comment)} for a comment; write the value in quotes within it: "{quoted}"')
    if text.strip() == "~":
        raise RecipeError("~ is not expanded here, and means null; write the folder in full, or null to unset the key")


def find_file(name: str, place: Callable[[], str], folder: Path | None = None, *, beside: Path = Path()) -> list[str]:
    """One mistake if a file does not exist, with the nearest name in `folder` (default: the file's own).

    Args:
        beside: the folder that a relative name starts from; by default the current one.
    """
    path = beside / name
    if path.is_file():
        return []
    is_relative = folder is None and not Path(name).is_absolute()
    neighbours = {
        other.stem: os.path.relpath(other, beside) if is_relative else str(other)
        for other in (folder or path.parent).glob("*")
        if other.is_file()
    }
    match = closest(path.stem, neighbours)
    hint = f"; did you mean {neighbours[match]}?" if match else f" (looked in {Path.cwd() / beside})"
    return [f"{place()} is {name!r}: no such file{hint}"]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; an empty section is a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_section = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return flat


def first_line(error: BaseException | str) -> str:
    """A library's message of many lines, for the middle of ours; two where the first only announces the next."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])[:200].rstrip(".:")


def show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "empty", True: "true", False: "false"}[value]
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a very large integer"
    return shorten_text(text)


def shorten_text(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def kind_in_words(value: Any) -> str:
    """Describe a value of JSON to people: an object with its keys, a list with its length."""
    if isinstance(value, dict) and value:
        named = ", ".join(ascii(key)[:40] for key in list(value)[:3])
        more = f" and {len(value) - 3} more" if len(value) > 3 else ""
        return f"an object with the key{'s' if len(value) > 1 else ''} {named}{more}"
    if isinstance(value, list) and value:
        return f"a list of {len(value)} item{'s' if len(value) > 1 else ''}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    names = {dict: "an empty object", list: "an empty list", str: "a string", int: "a number", float: "a number"}
    return names.get(type(value)) or str(getattr(value, "words", f"a {type(value).__name__}"))  # `Unreadable` has words


def type_name(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", int: "an integer", float: "a number", bool: "true/false"}
    return names.get(type(value), type(value).__name__)
