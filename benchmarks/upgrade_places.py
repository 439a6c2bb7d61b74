"""Places of the code that rest on what a library does not promise, with what guards each: docs/upgrade.md.

    python benchmarks/upgrade_places.py             # the page
    python benchmarks/upgrade_places.py --digests   # and the functions that are replaced, as they are installed here

The second is for whoever has read what a release changed in them. Both read the code by its syntax tree.
"""

import argparse
import ast
import functools
import importlib
import io
import json
import re
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.library_code import cited, definitions, digest, is_module  # noqa: E402
from cookbook.system.replaced import KNOWN, TABLE, digest_of  # noqa: E402

PAGE = ROOT / "docs/upgrade.md"
CODE_TABLE = ROOT / "tests/library_code.json"
"""Digests of the code around private names by library and version. Whoever adds a name keeps the modules that the
code has in hand: the script proposes all that define it."""
CODE: dict[str, dict[str, list[str]]] = json.loads(CODE_TABLE.read_text(encoding="utf-8"))
FAULTS = ROOT / "tests/faults.toml"
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "bitsandbytes", "torchao")
REPLACING = ("replace_functions", "replace_function", "check_function")
CITED = re.compile(rf"\b({'|'.join(LIBRARIES)})(?:'s)? (\d+\.\d+(?:\.\d+)?)", re.IGNORECASE)
CITED_CODE = re.compile(r"([\w/]+\.py)(?:,? `(\w[\w.]*)`|, (?:class )?((?=[\w.]*[A-Z_])[A-Za-z_]\w*(?:\.\w+)*))")
"""A file and a name in it, as comments cite them."""
SET = ("private name, set", "replaced in silence")
COUNTED = "counted: absent or changed ends the start"
CONFIGURATION = re.compile(r"config(\(.*\))?|text")
"""Names of variables that hold a configuration of a model or an adapter."""
IN_SOURCE = "`tests/test_library_names.py::test_a_name_asked_of_a_configuration_is_that_of_a_model_type`"


class Place(NamedTuple):
    """A place of one file."""

    kind: str
    file: str
    name: str
    guard: str
    code: str = ""
    """Where the code around a private name is: `module:name`, or `:name` of an object whose module the file does not
    say."""


def files() -> Iterator[tuple[str, str]]:
    """Path and text of each file of the project that may rest on a library."""
    for path in sorted([*(ROOT / "cookbook").rglob("*.py"), ROOT / "train.py"]):
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def own_names(nodes_of: dict[str, list[ast.AST]]) -> set[str]:
    """Names that this project defines somewhere."""
    names = set()
    for nodes in nodes_of.values():
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                names.add(node.attr)
    return names


def tests_of(faults: str) -> dict[str, list[tuple[str, str]]]:
    """By file, the quotes of planted faults with the test that notices each."""
    quotes = defaultdict(list)
    for file, tests in tomllib.loads(faults).items():
        for test, planted in tests.items():
            for before, *_ in planted.values():
                quotes[file].append((before, test))
    return quotes


@functools.cache
def places() -> list[Place]:
    """All places, each once."""
    nodes_of = {file: list(ast.walk(ast.parse(text))) for file, text in files()}
    own, quotes = own_names(nodes_of), tests_of(FAULTS.read_text(encoding="utf-8"))
    called = {name for nodes in nodes_of.values() for name in _called(nodes)}
    all_places = set[Place]()
    for file, nodes in nodes_of.items():
        of_file = list(_of_file(nodes, own, called))
        attributes = (node for node in nodes if isinstance(node, ast.Attribute))
        read = {node.attr for node in attributes if isinstance(node.ctx, ast.Load)}
        for kind, name, guard, code in of_file:
            if not guard and kind in SET and name.rpartition(".")[2] in read:
                guard = "AttributeError, since it is read as well"
            tests = sorted({test for before, test in quotes[file] if re.search(rf"\b{re.escape(name)}\b", before)})
            guards = [guard, "code compared" * bool(code), *(f"`{test}`" for test in tests)]
            all_places.add(Place(kind, file, name, "; ".join(filter(None, guards)) or "none", code))
    return sorted(all_places)


def _of_file(nodes: list[ast.AST], own: set[str], called: set[str]) -> Iterator[tuple[str, str, str, str]]:
    """Kind, name, guard and place of the code of each.

    Args:
        called: names that this project reads from objects, so that a method is not a library's to call.
    """
    imported = _imported(nodes)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] in LIBRARIES:
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                if any(map(_is_private, path.split("."))) and not is_module(path):
                    yield "private import", path, "ImportError", _place_of_code(path)
        elif isinstance(node, ast.Attribute) and (path := _path(node, imported)):
            if isinstance(node.ctx, ast.Store):
                yield "replaced in silence", ast.unparse(node), "", _place_of_code(path)
            elif not is_module(path) and (_is_private(node.attr) or _is_in_private_module(path)):
                yield "private name", ast.unparse(node), "AttributeError", _place_of_code(path)
        elif isinstance(node, ast.Attribute) and _is_theirs(node, own):
            if isinstance(node.ctx, ast.Load):
                yield "private name", node.attr, "AttributeError", f":{node.attr}"
            else:
                yield "private name, set", node.attr, "", f":{node.attr}"
        elif isinstance(node, ast.Call):
            yield from ((*place, "") for place in _of_call(node, own))
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(base).split(".")[0] in imported for base in node.bases):
            for method in (part for part in node.body if isinstance(part, ast.FunctionDef)):
                if method.name not in called and not method.name.startswith("__"):
                    yield "method overridden", f"{node.name}.{method.name}", "", f":{method.name}"
        elif isinstance(node, ast.Compare) and any(".__name__" in ast.unparse(side) for side in _sides(node)):
            for value in _sides(node):
                if isinstance(value, ast.Constant):
                    yield "name of a class", str(value.value), "", ""


def _path(node: ast.Attribute, imported: dict[str, str]) -> str:
    """The whole name of what is read from a module of a library; nothing for what is read from an object."""
    value: ast.AST = node
    while isinstance(value, ast.Attribute):
        value = value.value
    if not isinstance(value, ast.Name):
        return ""
    rest = ast.unparse(node).partition(".")[2]
    module = imported.get(value.id, value.id if value.id in LIBRARIES else "")
    is_known = bool(module) and rest.replace(".", "").isidentifier()
    return f"{module}.{rest}" if is_known and (is_module(module) or isinstance(node.ctx, ast.Store)) else ""


def _is_in_private_module(path: str) -> bool:
    module = path.rpartition(".")[0]
    return is_module(module) and any(map(_is_private, module.split(".")))


def _place_of_code(path: str) -> str:
    """`module:name`, or `:name` of what an object has."""
    module, _, name = path.rpartition(".")
    return f"{module}:{name}" if is_module(module) else f":{name}"


def _is_theirs(node: ast.Attribute, own: set[str]) -> bool:
    """False for names of this project, and for `os._exit` and `_asdict` of a named tuple, which Python documents."""
    if not _is_private(node.attr) or node.attr in own:
        return False
    return not hasattr(Place, node.attr) and ast.unparse(node.value) not in sys.stdlib_module_names


def _called(nodes: list[ast.AST]) -> Iterator[str]:
    """Names that are read from objects, and those that torch promises to call."""
    yield from ("forward", "backward")
    for node in nodes:
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Call) and _is_super(node.value.func)):
            yield node.attr


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "super"


def _sides(node: ast.Compare) -> list[ast.expr]:
    return [node.left, *node.comparators]


def _of_call(node: ast.Call, own: set[str]) -> Iterator[tuple[str, str, str]]:
    called = ast.unparse(node.func).rpartition(".")[2]
    texts = [value.value for value in node.args if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    if called in REPLACING:
        for name in texts or [keyword.arg for keyword in node.keywords if keyword.arg]:
            yield (
                "replaced function",
                f"{ast.unparse(node.args[0])}.{name}",
                COUNTED,
            )
    elif called == "set_values":
        for keyword in node.keywords:
            yield "replaced in silence", f"{ast.unparse(node.args[0])}.{keyword.arg}", "counted: absent ends the start"
    elif re.fullmatch(r"register_\w*hook", called):
        is_counted = any("count_calls(" in ast.unparse(value) for value in node.args)
        yield (
            "hook",
            ast.unparse(node.func),
            "counted: a first step in which it is not called ends the run" * is_counted,
        )
    elif called in ("getattr", "hasattr") and texts and _is_private(texts[0]) and texts[0] not in own:
        yield "private name, asked for", texts[0], ""
    elif called in ("getattr", "hasattr") and texts and CONFIGURATION.fullmatch(_last_word(node.args[0])):
        yield "name in a configuration", texts[0], IN_SOURCE
    elif called == "signature":
        yield "signature", ast.unparse(node.args[0]), "derived"


def _last_word(node: ast.AST) -> str:
    """`config` of `self.model.config`."""
    return ast.unparse(node).rpartition(".")[2]


def _imported(nodes: list[ast.AST]) -> dict[str, str]:
    """Names of a file that come from a library, with what they stand for."""
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (library := alias.name.split(".")[0]) in LIBRARIES:
                    names[alias.asname or library] = alias.name if alias.asname else library
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def citations() -> dict[str, dict[str, int]]:
    """How often comments and docstrings of each file name a version of a library."""
    counts: dict[str, dict[str, int]] = {}
    for file, text in files():
        versions: dict[str, int] = defaultdict(int)
        for comment in _comments(text):
            for library, version in CITED.findall(comment):
                versions[f"{library.lower()} {version}"] += 1
        if versions:
            counts[file] = dict(sorted(versions.items()))
    return counts


def cited_code() -> set[tuple[str, str]]:
    """Path and name of what comments cite of the libraries' files, not of this project's."""
    own = [*(ROOT / "cookbook").rglob("*.py"), *(ROOT / "tests").glob("*.py")]
    citations = {
        (path, quoted or plain)
        for _, text in files()
        for comment in _comments(text)
        for path, quoted, plain in CITED_CODE.findall(comment)
    }
    return {
        (path, name)
        for path, name in citations
        if not any(str(file).endswith(f"/{path}") and name in file.read_text(encoding="utf-8") for file in own)
    }


def is_of(place: str, path: str, name: str) -> bool:
    """True if a place of the table is what a comment cites."""
    module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return f".{place}".endswith((f".{module}.{name}", f".{module}:{name}"))


@functools.cache
def _comments(text: str) -> list[str]:
    """Texts, and comments of several lines, each as one line."""
    comments: list[str] = []
    lines: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines.append(token.string.lstrip("# "))
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            comments += [" ".join(lines)] if lines else []
            comments += [" ".join(token.string.split())] if token.type == tokenize.STRING else []
            lines = []
    return comments


def page() -> str:
    """The text of docs/upgrade.md."""
    all_places, versions_of = places(), citations()
    kinds: dict[str, list[Place]] = defaultdict(list)
    for place in all_places:
        kinds[place.kind].append(place)
    unguarded = sum(place.guard == "none" for place in all_places)
    lines = [
        HEAD.format(
            places=len(all_places), unguarded=unguarded or "none", citations=sum(map(len, versions_of.values()))
        )
    ]
    for kind, of_kind in kinds.items():
        lines += [f"## {kind[0].upper()}{kind[1:]}", "", WORDS[kind], "", "| place | guard |", "|---|---|"]
        lines += [f"| {place.file}: `{place.name}` | {place.guard} |" for place in of_kind]
        lines.append("")
    lines += ["## Code as it was read", "", DIGESTS, "", "| place | versions |", "|---|---|"]
    for name, digests in sorted((KNOWN | CODE).items()):
        lines.append(f"| `{name}` | {'; '.join(', '.join(versions) for versions in digests.values())} |")
    lines += ["", "## Versions that comments name", "", VERSIONS, "", "| place | versions |", "|---|---|"]
    for file, versions in versions_of.items():
        lines.append(f"| {file} | {', '.join(f'{name}' for name in versions)} |")
    return "\n".join(lines) + "\n"


HEAD = """# When a library moves

`python benchmarks/upgrade_places.py` writes this page from the code; a test compares it. It lists {places} places that
rest on what a library does not promise, each once for a file, and what happens if a release changes it. A guard is an
error (the name is looked up, and its absence ends the start), "counted" (the start counts what it finds, and ends with
exit code 2 if that is not what is known), "derived" (the code asks the library), "code compared" (a name keeps and its
meaning moves: `tests/test_upgrade.py::test_the_code_around_a_private_name_is_as_it_was_read` fails where a release
changed the functions that define, set or read it), or a test, which notices a fault that was planted at the place
(`make mutants`). Without a guard: {unguarded}.

Beside these, the start tries packed rows on a small model (`cookbook/training/models/stateful_layers.py`): layers with
a state are found by what they do, a type that is known to have some and of which none is found ends the start, and so
do samples that mix, and losses that are not those of transformers' own code, as without a window, a cap, sinks or a
scale that a release has renamed. Padded rows are tried so if their type was not measured with the installed version.
Optional packages are hidden from transformers (`cookbook/system/optional.py`). A start under
versions that were not tested says so, and `run.strict_versions` refuses it.

On the day of a release: `make test-newest`; read what changed in each function that it names; then
`python benchmarks/upgrade_places.py --digests` in the environment that has the release.
"""
WORDS = {
    "private import": "A start that imports the file ends where the name is gone.",
    "private name": "Read from an object of a library.",
    "private name, set": "Set on an object of a library, which may no longer read it.",
    "name in a configuration": "Not every model type has it, so that none fails if a release renames it in all.",
    "private name, asked for": "Looked up with an answer for the case that it is not there.",
    "method overridden": "Called by the library's class in place of its own, if it still calls a method of this name.",
    "replaced function": "`cookbook/system/replaced.py` compares the code of the function with what was read.",
    "replaced in silence": "Values of a library that are set, or functions that cost time and change no number.",
    "hook": "Called by torch around a module or a gradient.",
    "name of a class": "Compared as a text, whole or as a part of it.",
    "signature": "Asked of the function itself.",
}
DIGESTS = """Versions of the library in which the code is what was read, apart from comments and layout: of a function
that is replaced or that a comment cites by file and name, and around a name that is not promised (after a colon).
Versions after a semicolon have another code, which was read too, or lack it. Who calls the function is not compared."""
VERSIONS = """Each is a fact that was seen under that version. The comment says where to look: at code by file and
name, which is compared (above), at C++, an issue or a test, or it is a figure that was measured."""


def add_digests() -> None:
    """Add the functions that are replaced, and the code around private names, as they are installed here."""
    replaced = dict(KNOWN)
    for place in replaced:
        owner, name = _resolve(place)
        if owner is not None and hasattr(owner, name):
            _add(replaced[place], place, digest_of(owner, name))
    _write(TABLE, replaced)
    compared = {place: CODE.get(place, {}) for place in _needed()}
    for place, digests in compared.items():
        _add(digests, place, digest(place))
    _write(CODE_TABLE, compared)


def _needed() -> set[str]:
    """Places of code that the page's rows and the comments need: those of the table, and for what has none all that
    define it."""
    code = {place.code for place in places() if place.code}
    needed = {place for place in code if not place.startswith(":")}
    unknown = set()
    for name in code - needed:
        known = {place for place in CODE if place.endswith(name)}
        needed |= known
        if not known:
            unknown.add(name[1:])
    needed |= set(definitions(unknown, LIBRARIES)) if unknown else set()
    for path, name in cited_code():
        known = {place for place in CODE if is_of(place, path, name)} or set(cited(path, name, LIBRARIES))
        if not known:
            raise SystemExit(f"no library has {name} in {path}, which a comment cites")
        needed |= known
    return needed


def _add(digests: dict[str, list[str]], place: str, digest: str) -> None:
    library = re.split(r"[.:]", place)[0]
    version = metadata.version(library).partition("+")[0]
    for versions in digests.values():
        if version in versions:
            versions.remove(version)
    digests[digest] = sorted([*digests.get(digest, []), version])


def _write(path: Path, table: dict[str, dict[str, list[str]]]) -> None:
    kept = {place: {digest: v for digest, v in digests.items() if v} for place, digests in table.items()}
    path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _resolve(place: str) -> tuple[Any, str]:
    """The module or class that has a function, and its name there; None where the library has none."""
    path, _, name = place.rpartition(".")
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:length]))
            for part in parts[length:]:
                owner = getattr(owner, part)
            return owner, name
        except (ImportError, AttributeError):
            continue
    return None, name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--digests", action="store_true", help="add the functions that are replaced, as they are here")
    if parser.parse_args().digests:
        add_digests()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
