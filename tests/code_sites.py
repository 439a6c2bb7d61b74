"""Where a file's code can be changed, and in which block each place lies. No imports of the project.

tests/drawn_mutants.py draws among these places; `OPERATORS` has the changes.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPOUND = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
AT_IMPORT = 0
"""The block of what runs when a file is imported; others are known by the line of their first statement."""


def blocks_of(tree: ast.Module, *, recorder: str = "", file: str = "") -> dict[ast.stmt, int]:
    """The block of each statement: those of a block run one after the other.

    Args:
        recorder: a function which the tree shall call at the beginning of each block, with `file:block`.
    """
    blocks: dict[ast.stmt, int] = {}

    def walk(body: list[ast.stmt], in_function: bool) -> None:
        begins, block, firsts = True, AT_IMPORT, []
        for place, statement in enumerate(body):
            if in_function and begins and not (place == 0 and is_text(statement)):
                block, begins = statement.lineno, False
                firsts.append(place)
            blocks[statement] = block
            for below in bodies_of(statement):
                walk(
                    below, isinstance(statement, FUNCTIONS) or (in_function and not isinstance(statement, ast.ClassDef))
                )
            begins = begins or isinstance(statement, COMPOUND)
        for place in reversed(firsts if recorder else []):
            call = ast.parse(f"{recorder}({f'{file}:{body[place].lineno}'!r})").body[0]
            for node in ast.walk(call):
                ast.copy_location(node, body[place])
            body.insert(place, call)

    walk(tree.body, False)
    return blocks


def bodies_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements directly below a node."""
    for name in ("body", "orelse", "finalbody"):
        if isinstance(body := getattr(node, name, None), list) and body:
            yield body
    for name in ("handlers", "cases"):
        for part in getattr(node, name, ()):
            yield part.body


def is_text(statement: ast.AST) -> bool:
    """A docstring, or a text below a constant."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def negate(node: ast.AST) -> Iterator[ast.AST]:
    """The condition of a branch, a loop or a filter."""
    if isinstance(node, Condition):
        yield ast.UnaryOp(ast.Not(), node.value)


def drop_call(node: ast.AST) -> Iterator[ast.AST]:
    """A statement that is a call alone; else a call becomes its first argument, or the object whose method it was."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    elif isinstance(node, ast.Call):
        if node.args and not isinstance(node.args[0], ast.Starred | ast.GeneratorExp):
            yield node.args[0]
        elif not node.args and isinstance(node.func, ast.Attribute):
            yield node.func.value


def swap_arguments(node: ast.AST) -> Iterator[ast.AST]:
    """Two neighbours among the arguments of a call."""
    if isinstance(node, ast.Call):
        for place, (first, second) in enumerate(zip(node.args, node.args[1:], strict=False)):
            if ast.dump(first) != ast.dump(second):
                yield changed(node, args=[*node.args[:place], second, first, *node.args[place + 2 :]])


def off_by_one(node: ast.AST) -> Iterator[ast.AST]:
    """A whole number, or the border of a comparison."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
    borders = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            if other := borders.get(type(operator)):
                yield changed(node, ops=[*node.ops[:place], other(), *node.ops[place + 1 :]])


def drop_item(node: ast.AST) -> Iterator[ast.AST]:
    """One of two or more items of a tuple, a list, a set or a dict."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        for place in range(len(node.elts) if len(node.elts) > 1 else 0):
            yield changed(node, elts=[*node.elts[:place], *node.elts[place + 1 :]])
    elif isinstance(node, ast.Dict):
        for place in range(len(node.keys) if len(node.keys) > 1 else 0):
            yield ast.Dict(
                [*node.keys[:place], *node.keys[place + 1 :]], [*node.values[:place], *node.values[place + 1 :]]
            )


def drop_keyword(node: ast.AST) -> Iterator[ast.AST]:
    """A named argument of a call."""
    if isinstance(node, ast.Call):
        for place in range(len(node.keywords)):
            yield changed(node, keywords=[*node.keywords[:place], *node.keywords[place + 1 :]])


def other_operation(node: ast.AST) -> Iterator[ast.AST]:
    """`and` and `or`, plus and minus, times and divided by, each for the other."""
    others = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
    if isinstance(node, ast.BoolOp):
        yield changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.BinOp) and (other := others.get(type(node.op))):
        yield changed(node, op=other())


OPERATORS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    operator.__name__: operator
    for operator in (negate, drop_call, swap_arguments, off_by_one, drop_item, drop_keyword, other_operation)
}


class Condition(ast.AST):
    """An expression that decides, which no node of Python's tree has for itself."""

    def __init__(self, value: ast.expr) -> None:
        self.value = value


def changed(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of a node with other fields."""
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


@dataclass(frozen=True)
class Site:
    """A place and the ways in which an operator can change it."""

    file: str
    line: int
    function: str
    """Dotted name of the functions and classes around it."""
    at: int
    """Bytes from the beginning of that function or class, or of the file."""
    block: int
    operator: str
    span: tuple[int, int]
    """Bytes of the file."""
    others: tuple[ast.AST, ...]
    """Each can stand there in the place of what does."""

    def changes(self, code: str) -> Iterator[tuple[str, str, str]]:
        """Text that stands there, text instead, and the whole file then, where that is another program."""
        begin, end = self.span
        data = code.encode()
        for other in self.others:
            text = ast.unparse(ast.fix_missing_locations(other))
            text = text if isinstance(other, ast.stmt) else f"({text})"
            whole = (data[:begin] + text.encode() + data[end:]).decode()
            if is_other_program(whole, code):
                yield data[begin:end].decode(), text, whole


def is_other_program(code: str, before: str) -> bool:
    """True if a text is a program, and another one."""
    try:
        return ast.dump(ast.parse(code)) != ast.dump(ast.parse(before))
    except SyntaxError:
        return False


def sites_of(file: str, code: str) -> list[Site]:
    """All places of a file, in the order of its lines.

    Texts of messages, annotations, decorators and branches for type checkers have none.
    """
    tree = ast.parse(code)
    blocks = blocks_of(tree)
    starts = [0]
    for line in code.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    modules = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    sites: dict[tuple[tuple[int, int], str], Site] = {}

    def add(node: ast.AST, place: ast.expr | ast.stmt, block: int, function: str, begin: int) -> None:
        assert place.end_lineno is not None and place.end_col_offset is not None
        span = starts[place.lineno - 1] + place.col_offset, starts[place.end_lineno - 1] + place.end_col_offset
        for name, operator in OPERATORS.items():
            others = tuple(other for other in operator(node) if getattr(other, "id", None) not in modules)
            if others:  # of `os.getpid()`, `os` would be left
                # A statement comes before the call that is all of it.
                sites.setdefault(
                    (span, name), Site(file, place.lineno, function, span[0] - begin, block, name, span, others)
                )

    def walk(node: ast.AST, block: int, function: str, begin: int) -> None:
        for child in acting_children(node):
            inner_block, inner_function, inner_begin = block, function, begin
            if isinstance(child, ast.stmt):
                inner_block = blocks[child]
            if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                inner_function = f"{function}.{child.name}".lstrip(".")
                inner_begin = starts[child.lineno - 1] + child.col_offset
            if isinstance(child, ast.expr | ast.stmt):
                add(child, child, inner_block, function, begin)
            for condition in conditions_of(child):
                add(Condition(condition), condition, inner_block, function, begin)
            walk(child, inner_block, inner_function, inner_begin)

    walk(tree, AT_IMPORT, "", 0)
    return sorted(sites.values(), key=lambda site: (site.line, site.span, site.operator))


def conditions_of(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


def acting_children(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one that act in a run and are no texts for people."""
    passed_over = {"annotation", "returns", "decorator_list", "msg", "type_params"}
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            if (
                isinstance(child, ast.AST)
                and name not in passed_over
                and not is_for_types
                and not is_text(child)
                and not isinstance(child, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom)
            ):
                yield child


def files_of(root: Path, rooms: list[str]) -> list[str]:
    """The files of these folders of `cookbook`."""
    names = []
    for room in rooms:
        names += sorted((root / "cookbook" / room).rglob("*.py"))
    return [str(path.relative_to(root)) for path in names]
