"""Builds the pages as a site with search, in outputs/site/html: make site.

    python -m website.build [--repository https://HOST/OWNER/NAME] [--address https://HOST/PATH]

The navigation is docs/README.md. Links to what is no page go to the repository, or are their text alone where its
address is not known. A broken link, a missing anchor, a page outside the navigation and what another host would be
asked for are errors.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Container, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from website.reference import Entry, Pages, reference

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "outputs/site"
INDEX = "docs/README.md"
LINK = re.compile(r"\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s]+)\)")
NO_ADDRESS = "Files of the repository are named here, not linked: this site was built without its address."


def navigation() -> list[Entry]:
    """The pages that the index links to: before its first heading, with itself, and under each heading."""
    before, *groups = re.split(r"(?m)^## ", read(INDEX))
    start: Entry = {"Start": [*_linked(before), {"All pages": INDEX}]}
    return [start, *({group.partition("\n")[0]: list(_linked(group))} for group in groups)]


def _linked(text: str) -> Iterator[Entry]:
    for title, link in LINK.findall(text):
        path = resolve(INDEX, link)
        inside = sorted(str(file.relative_to(ROOT)) for file in (ROOT / path).glob("[!R]*.md"))
        yield {title: [page_of(path), *inside] if inside else page_of(path)}


def resolve(page: str, link: str) -> str:
    """The file that a link of a page names, from the top of the repository."""
    return os.path.normpath(os.path.join(os.path.dirname(page), link))


def page_of(path: str) -> str:
    """The page that stands for a folder or a notebook."""
    return f"{path}/README.md" if (ROOT / path).is_dir() else path.replace(".ipynb", ".md")


def paths_in(entry: Any) -> list[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    return [path for inner in (entry.values() if isinstance(entry, dict) else entry) for path in paths_in(inner)]


def read(page: str) -> str:
    """The text of a page; a notebook's is that of its cells."""
    notebook = (ROOT / page).with_suffix(".ipynb")
    if not notebook.exists():
        return (ROOT / page).read_text(encoding="utf-8")
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook.read_text())["cells"]]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells)


def with_links(page: str, text: str, pages: Container[str], repository: str | None) -> str:
    """A page as the generator wants it: links to what is no page go to the repository, or are their text alone."""
    is_short = False

    def replaced(match: re.Match[str]) -> str:
        nonlocal is_short
        if match["code"]:  # in a table GitHub wants a pipe escaped, and Python's Markdown does not
            return match["code"].replace("\\|", "|")
        shown, link = match.groups()[1:]
        name, _, anchor = link.partition("#")
        path = resolve(page, name)
        end = f"#{anchor}" if anchor else ""
        if not name or "://" in link or path.endswith((".png", ".svg")):
            return match[0]
        if page_of(path) in pages:
            return f"[{shown}]({os.path.relpath(page_of(path), os.path.dirname(page))}{end})"
        if not (ROOT / path).exists():
            raise SystemExit(f"{page}: {link} is not there")
        is_short |= repository is None
        return f"[{shown}]({repository}/blob/HEAD/{path}{end})" if repository else shown

    parts = re.split(r"(?ms)^(```.*?^```$)", text)
    parts[::2] = [re.sub(rf"(?P<code>`[^`\n]+`)|{LINK.pattern}", replaced, part) for part in parts[::2]]
    return "".join(parts).replace("<td>\n", "<td markdown>\n") + (f"\n\n{NO_ADDRESS}\n" if is_short else "")


def write(out: Path, repository: str | None, address: str | None) -> None:
    """Write the sources of the site: pages, pictures and settings."""
    written: Pages = {path: read(path) for path in paths_in(navigation())}
    there = {page_of(f"docs/{path.name}") for path in (ROOT / "docs").iterdir() if path.suffix in ("", ".md", ".ipynb")}
    if missing := sorted(there - written.keys()):
        raise SystemExit(f"{INDEX} has no link to {', '.join(missing)}; write one")
    entry, generated = reference(written, json.loads(read("recipes/schema.json")))
    pages = {path: with_links(path, text, written, repository) for path, text in written.items()} | generated
    for path, text in pages.items():
        (out / "pages" / path).parent.mkdir(parents=True, exist_ok=True)
        (out / "pages" / path).write_text(text, encoding="utf-8")
    for picture in (ROOT / "docs").glob("*.[ps][nv]g"):
        shutil.copy(picture, out / "pages/docs")
    shutil.copy(ROOT / "website/style.css", out / "pages")
    settings = yaml.safe_load(read("website/settings.yml")) | {"nav": [*navigation(), entry], "site_url": address}
    (out / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


class _Page(HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {""}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.add(values.get("id", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("script", "img", "link", "iframe", "source") and values.get("rel") != "canonical":
            self.loaded += [values[name] for name in ("src", "href") if name in values]


def problems(folder: Path) -> list[str]:
    """Mistakes of a site: links and anchors that lead nowhere, and what other hosts would be asked for."""
    mistakes = []
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        for link in (*page.links, *page.loaded) if path.name != "404.html" else ():  # has links from the address
            parts = urlsplit(link)
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else {""}
            if parts.scheme or parts.netloc:
                is_wrong = link in page.loaded and parts.scheme != "data"
            else:
                is_wrong = not target.is_file() or unquote(parts.fragment) not in anchors
            if is_wrong:
                mistakes.append(f"{path.relative_to(folder)}: {link}")
    for path in sorted(folder.rglob("*.css")):
        links = re.findall(r"(?:url\(|@import)[\s\"'(]*((?:https?:)?//[^\s\"')]+)", path.read_text(encoding="utf-8"))
        mistakes += [f"{path.relative_to(folder)}: {link}" for link in links]
    return mistakes


def build(out: Path, repository: str | None = None, address: str | None = None) -> list[str]:
    """Build the site anew in a folder. Returns what is wrong with it."""
    shutil.rmtree(out, ignore_errors=True)
    write(out, repository, address)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(out / "mkdocs.yml")]
    if code := subprocess.run(command).returncode:
        return [f"zensical ended with {code}"]
    return problems(out / "html")


def main() -> int:
    """The command line."""
    urls = tomllib.loads(read("pyproject.toml"))["project"].get("urls", {})
    parser = argparse.ArgumentParser(description="The pages as a site with search.")
    parser.add_argument("--repository", default=urls.get("Repository"), help="its address, for links to files")
    parser.add_argument("--address", default=urls.get("Documentation"), help="of the site, for search engines")
    arguments = parser.parse_args()
    if wrong := build(OUT, arguments.repository, arguments.address):
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    print("python -m http.server --directory outputs/site/html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
