"""Pages that nobody writes: one for each command by its help, and one for each key of a recipe by its schema."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import typer

from cookbook.commands import cli

Pages = dict[str, str]
"""Markdown by path; what the repository has keeps its own."""
Entry = dict[str, Any]
"""A title of the navigation with its page, or with a list of what is below it."""
Forms = list[tuple[str, dict[str, Any]]]
"""Kinds that have a key, as of an optimizer, each with its part of the schema."""


@dataclass(frozen=True)
class Thing:
    """A command or a key."""

    group: str
    name: str
    about: str
    body: str

    def name_in(self, above: str) -> str:
        """The name below that of a section."""
        return self.name.removeprefix(f"{above}.")


def reference(written: Pages, schema: dict[str, Any]) -> tuple[Entry, Pages]:
    """Commands and keys: their part of the navigation, and their pages with links to the written ones."""
    pages: Pages = {}
    commands = _section(pages, "commands", list(_commands()), written, r"\bcookbook {}\b")
    keys = _section(pages, "keys", list(_keys(schema)), written, r"`{}(?![\w.])")
    return {"Reference": [{"Commands": commands}, {"Keys of a recipe": keys}]}, pages


def _section(pages: Pages, folder: str, things: list[Thing], written: Pages, pattern: str) -> list[Entry]:
    """Add the pages of a folder. Returns their navigation."""
    overview = {thing.group: [other for other in things if other.group == thing.group] for thing in things}
    tables = [f"## {group}\n\n{_contents(members, group)}" for group, members in overview.items()]
    pages[f"{folder}/README.md"] = _page(f"All {folder}", *tables)
    for thing in things:
        inner = [other for other in things if other.name.startswith(f"{thing.name}.")]
        named = _places(written, pattern.format(re.escape(thing.name)))
        words = [f"Named in {', '.join(named)}."] if named else []
        title = f"cookbook {thing.name}" if folder == "commands" else thing.name
        tables = [_contents(inner, thing.name)] if inner else []
        pages[f"{folder}/{thing.name}.md"] = _page(title, thing.body, *tables, *words)
    below = [
        {group: [{thing.name_in(group): f"{folder}/{thing.name}.md"} for thing in members]}
        for group, members in overview.items()
    ]
    return [{"Overview": f"{folder}/README.md"}, *below]


def _page(title: str, *parts: str) -> str:
    """A page whose title for search engines is its heading: the navigation has a shorter one."""
    return "\n\n".join([f"---\ntitle: {title}\n---", f"# {title}", *parts]) + "\n"


def _contents(things: list[Thing], above: str) -> str:
    return _table("name | meaning", ((f"[`{thing.name_in(above)}`]({thing.name}.md)", thing.about) for thing in things))


def _places(written: Pages, pattern: str) -> list[str]:
    """Links to the first heading of each page under which something is named."""
    links = []
    for path, text in written.items():
        if named := re.search(pattern, text):
            before = text[: text.index("\n", named.start())]
            headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?(^```$|\Z)", "", before))
            slug = re.sub(r"[^\w\- ]", "", headings[-1].lower()).replace(" ", "-")
            links.append(f"[{': '.join(dict.fromkeys([headings[0], headings[-1]]))}](../{path}#{slug})")
    return links


def _table(head: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {first} | {' '.join(_plain(second).split())} |" for first, second in rows]
    return "\n".join([f"| {head} |", "|---|---|", *lines])


def _plain(text: str) -> str:
    """A text in which code is marked, and nothing else."""
    parts = re.split("(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([<|*_\[])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def _commands() -> Iterator[Thing]:
    """Yield the commands of users."""
    app: Any = typer.main.get_command(cli.app)
    for name, command in app.commands.items():
        if not command.hidden:
            context = typer.Context(command, info_name=f"cookbook {name}")
            records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
            usage = command.get_usage(context).removeprefix("Usage: ")
            rows = _table("argument | meaning", ((f"`{words}`", about) for words, about in records))
            body = f"{_plain(command.help)}\n\n```text\n{usage}\n```\n\n{rows}"
            yield Thing(command.rich_help_panel, name, command.help, body)


def _keys(schema: dict[str, Any]) -> Iterator[Thing]:
    """Yield the keys of a recipe; what two kinds have differently is told for each."""
    keys: dict[str, Forms] = {}
    _collect(keys, schema, schema["$defs"], "")
    for key, forms in keys.items():
        kinds: dict[str, list[str]] = {}
        for kind, form in forms:
            facts = [("type", _type(form))]
            facts += [(name, json.dumps(form[name])) for name in ("default", "examples") if name in form]
            rows = _table("property | value", ((name, f"`{fact}`") for name, fact in facts))
            text = f"{_plain(form['description'])}\n\n{rows}"
            kinds.setdefault(text, []).append(f"`{kind}`")
        texts = [f"With {', '.join(names)}: {text}" if kinds.keys() > {text} else text for text, names in kinds.items()]
        section = key.partition(".")[0]
        is_single = not any(other.startswith(f"{section}.") for other in keys)
        yield Thing("recipe" if is_single else section, key, forms[0][1]["description"], "\n\n".join(texts))


def _collect(keys: dict[str, Forms], node: dict[str, Any], sections: dict[str, Any], path: str) -> None:
    """Add the keys below a part of the schema, with their whole path."""
    if "$ref" in node:
        node = sections[node["$ref"].rpartition("/")[2]]
    properties = node.get("properties", {})
    kind = properties.get("name", {}).get("const", "")
    for name, form in properties.items():
        about = node["description"] if "const" in form else form.get("description", "")
        keys.setdefault(f"{path}{name}", []).append((kind, form | {"description": about}))
        if f"{path}{name}" != "data.eval":  # has the keys of data.train
            _collect(keys, form, sections, f"{path}{name}.")
    for form in (*node.get("anyOf", ()), node.get("items"), node.get("additionalProperties")):
        if isinstance(form, dict):
            _collect(keys, form, sections, path)


BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def _type(form: dict[str, Any]) -> str:
    """The values that a part of the schema admits, in a few words."""
    choices = [json.dumps(choice) for choice in ([form["const"]] if "const" in form else form.get("enum", ()))]
    if choices or "anyOf" in form:
        return " or ".join(dict.fromkeys([*choices, *map(_type, form.get("anyOf", ()))]))
    bounds = [f"{words} {form[bound]}" for bound, words in BOUNDS.items() if bound in form]
    kind = form.get("type", "object")
    return " ".join([{"array": "list", "object": "mapping"}.get(kind, kind), *bounds])
