"""Code of a library around a name that it does not promise, as a digest, for docs/upgrade.md.

An error tells that a name is gone, and nothing that it has come to mean something else: that can be read from the
functions of its file that define it, set it or read it.
"""

import ast
import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".py", ".pyi")
NOT_READ = re.compile(r"transformers\.models\.|\.(testing|_inductor|_dynamo|inference|prototype|compile|export)\b")
"""Modules of which no definition is proposed: those of one model type, and what a run does not use."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def digest(place: str) -> str:
    """SHA-256 of code without comments, docstrings and layout; "absent" where there is none.

    Args:
        place: `torch.nn.modules.module:_modules`, the functions of a module in which a name occurs (or the schemas of
            an operation that is written in C++), or `torch.optim.adam.Adam.step`, a function, class or value itself.
    """
    module, _, name = place.partition(":")
    if name:
        code = [_dump(part) for path in _files(module) for part in _parts_with(path, _own_name(name))] or _schemas(name)
    else:
        code = [_dump(part) for part in _definition(place)]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16] if code else "absent"


def cited(path: str, name: str, libraries: tuple[str, ...]) -> list[str]:
    """Places of a name in the files whose paths end so: where it is defined, or else where it occurs."""
    places = []
    for root in filter(None, map(_folder, libraries)):
        for file in sorted(root.rglob(Path(path).name)):
            if f"/{file.relative_to(root.parent)}".endswith(f"/{path}"):
                module = ".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
                places += [f"{module}.{name}", f"{module}:{name}"]
    there = [place for place in places if digest(place) != "absent"]
    return [place for place in there if ":" not in place] or there


def is_module(path: str) -> bool:
    """True if a library has a module of this name."""
    return path == "torch.ops.aten" or bool(_files(path))


def definitions(names: set[str], libraries: tuple[str, ...]) -> Iterator[str]:
    """Places that may define names, for whoever gives a new one its row. Reads all of the libraries: two minutes."""
    by_own = {_own_name(name): name for name in names}
    pattern = re.compile(rf"\b({'|'.join(by_own)})\b")
    for root in filter(None, map(_folder, libraries)):
        for path in sorted(root.rglob("*.py*")):
            module = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
            if path.suffix in SUFFIXES and not NOT_READ.search(module):
                text = path.read_text(encoding="utf-8", errors="replace")
                own_names = {name for name in set(pattern.findall(text)) if _is_defined(ast.parse(text), name)}
                yield from (f"{module}:{by_own[name]}" for name in own_names)


def _own_name(name: str) -> str:
    """The name in the class that has it: Python writes `__x` of a class C as `_C__x`."""
    return f"__{name.rpartition('__')[2]}" if name.startswith("_") and "__" in name.strip("_") else name


def _schemas(name: str) -> list[str]:
    import torch

    packet: Any = getattr(torch.ops.aten, name, None)
    return sorted(str(getattr(packet, overload)._schema) for overload in packet.overloads()) if packet else []


@functools.cache
def _files(module: str) -> list[Path]:
    """The source of a module, and the stub of one that is written in C++."""
    library, *rest = module.split(".")
    folder = _folder(library)
    if folder is None:
        return []
    path = folder.joinpath(*rest)
    candidates = [path.with_name(path.name + suffix) for suffix in SUFFIXES] if rest else []
    candidates += [path / f"__init__{suffix}" for suffix in SUFFIXES]
    return [path for path in candidates if path.is_file()]


def _folder(library: str) -> Path | None:
    spec = importlib.util.find_spec(library)
    return Path(spec.origin).parent if spec and spec.origin else None


def _parts_with(path: Path, name: str) -> list[ast.AST]:
    """The functions, and the statements outside of functions, in which a name occurs; all of a class that it names."""
    pattern = re.compile(rf"\b{re.escape(name)}\b")
    return [
        part
        for part, text in _parts(path)
        if (part.name == name if isinstance(part, ast.ClassDef) else pattern.search(text))
    ]


def _definition(place: str) -> list[ast.stmt]:
    """The function, class or value of that name in a module or a class of it; several if it is defined again."""
    words = place.split(".")
    length = next((n for n in range(len(words) - 1, 0, -1) if is_module(".".join(words[:n]))), 0)
    blocks: list[Any] = [ast.parse(path.read_text(encoding="utf-8")) for path in _files(".".join(words[:length]))]
    for word in words[length:]:
        blocks = [part for block in blocks for part in getattr(block, "body", ()) if word in _names_of(part)]
    return blocks


def _names_of(part: ast.stmt) -> list[str]:
    targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
    return [getattr(part, "name", ""), *(target.id for target in targets if isinstance(target, ast.Name))]


@functools.cache
def _parts(path: Path) -> list[tuple[ast.stmt, str]]:
    """Classes, and what is in them or beside them, each with its source."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    return [(node, "\n".join(lines[node.lineno - 1 : node.end_lineno])) for node in _statements(ast.parse(source))]


def _statements(block: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    for node in block.body:
        yield node
        if isinstance(node, ast.ClassDef):
            yield from _statements(node)


def _dump(part: ast.AST) -> str:
    for node in ast.walk(part):
        if isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    return ast.dump(part)


def _is_defined(tree: ast.AST, name: str) -> bool:
    """True if a name is that of a function or class, or is set somewhere, by itself or as a text."""
    return any(
        getattr(node, "name", None) == name
        or (isinstance(node, ast.Constant) and node.value == name)
        or (
            name in (getattr(node, "attr", None), getattr(node, "id", None))
            and isinstance(getattr(node, "ctx", None), ast.Store)
        )
        for node in ast.walk(tree)
    )
