"""Protects the site of the pages: every page, command and key is in it, links lead somewhere, search finds words.

python -m pytest -q tests/test_site.py -m "slow or not slow"
"""

import functools
import json
import queue
import re
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT
from test_docs import prose, recipe_keys, run_cookbook, slug

from tests.needs import need_chromium, need_zensical
from website import build

ADDRESS = "https://host/owner/name"


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    build.write(out, ADDRESS, None)
    return out / "pages"


def test_the_navigation_is_the_index_with_each_page_once() -> None:
    groups = [title for entry in build.navigation() for title in entry]
    assert groups == ["Start", "Train", "Choose", "Look", "Proof"]
    paths = build.paths_in(build.navigation())
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(paths) == sorted({*pages, "docs/quickstart.md", "README.md", "CONTRIBUTING.md", "recipes/README.md"})


def test_a_page_that_the_index_does_not_name_is_an_error(tmp_path, monkeypatch) -> None:
    index = build.read(build.INDEX).replace("(terms.md)", "(doctor.md)")
    read = build.read
    monkeypatch.setattr(build, "read", lambda page: index if page == build.INDEX else read(page))
    with pytest.raises(SystemExit, match=r"no link to docs/terms\.md"):
        build.write(tmp_path, None, None)


def test_each_command_has_a_page_with_the_arguments_of_its_help(sources: Path, tmp_path: Path) -> None:
    shown = run_cookbook(tmp_path, "--help")
    names = re.findall(r"(?m)^  ([a-z-]+) ", shown.partition("Before a run:")[2])
    pages = {path.stem: path.read_text() for path in (sources / "commands").glob("[!R]*.md")}
    assert len(names) > 20 and sorted(pages) == sorted(names)
    for name in ("launch", "plan", "init"):
        shown = run_cookbook(tmp_path, name, "--help")
        words = re.findall(r"(?m)^  (--[a-z-]+|[A-Z|]{3,})\b", shown)
        assert len(words) > 4 and [word for word in words if f"\n| `{word}" not in pages[name]] == []
    assert "(../docs/for_programs.md#cookbook-checkpoint)" in pages["checkpoint"]


def test_each_key_has_a_page_with_its_default(sources: Path) -> None:
    pages = {path.stem: path.read_text() for path in (sources / "keys").glob("[!R]*.md")}
    keys = recipe_keys()
    assert len(keys) > 150 and {key for key, _ in keys} <= pages.keys() and len(pages) < len(keys)
    defaults = [(key, default) for key, default in keys if isinstance(default, (bool, int, float, str))]
    written = [(key, f"| default | `{json.dumps(default)}` |") for key, default in defaults if default != "derived"]
    assert len(written) > 60 and [key for key, row in written if row not in pages[key]] == []
    assert "With `dpo`: " in pages["objective.label_smoothing"] and "With " not in pages["optim.learning_rate"]


def test_each_link_of_the_sources_leads_to_a_page_or_to_the_repository(sources: Path) -> None:
    texts = {path: prose(path.read_text()) for path in sources.rglob("*.md")}
    anchors = {path: {"", *map(slug, re.findall(r"(?m)^#+ (.*)$", text))} for path, text in texts.items()}
    broken, to_files = [], 0
    for path, text in texts.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            name, _, anchor = link.partition("#")
            if link.startswith(f"{ADDRESS}/blob/HEAD/"):
                to_files += 1
                is_good = (ROOT / name.removeprefix(f"{ADDRESS}/blob/HEAD/")).exists()
            else:
                target = (path.parent / name).resolve() if name else path
                is_good = "://" in name or (target.is_file() and anchor in anchors.get(target, {""}))
            broken += [] if is_good else [f"{path.name}: {link}"]
    assert to_files > 100 and broken == []


def test_without_the_address_of_the_repository_a_page_says_that_its_files_are_not_linked() -> None:
    text = "A [b](docs/data.md#c), [`d`](train.py#L1), `[e](f)`, and\n```\n[g](h)\n```\n"
    linked = build.with_links("README.md", text, {"docs/data.md"}, ADDRESS)
    assert linked == text.replace("train.py", f"{ADDRESS}/blob/HEAD/train.py")
    plain = build.with_links("README.md", text, {"docs/data.md"}, None)
    assert plain == f"{text.replace('[`d`](train.py#L1)', '`d`')}\n\n{build.NO_ADDRESS}\n"
    with pytest.raises(SystemExit, match=r"README\.md: none\.py is not there"):
        build.with_links("README.md", "[a](none.py)", {}, None)


def test_broken_links_and_what_other_hosts_would_send_are_found(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/index.html").write_text('<h1 id="c">C</h1><a href="../a.html#none">a</a><img src="data:,">')
    good = '<a href="b/#c">b</a><a href="https://host/">h</a><a href="#d"><i id="d"></i></a><link href="e.css">'
    bad = (
        '<a href="none.html"></a><a href="#none"></a><script src="https://host/x.js"></script><img src="//host/y.png">'
    )
    (tmp_path / "a.html").write_text(good + bad)
    (tmp_path / "e.css").write_text('@import "https://host/z.css"; a { background: url(data:,) }')
    wrong = ["a.html: none.html", "a.html: #none", "a.html: https://host/x.js", "a.html: //host/y.png"]
    assert build.problems(tmp_path) == [*wrong, "b/index.html: ../a.html#none", "e.css: https://host/z.css"]


READER = """<iframe width=390 height=800></iframe><script>
const frame = document.querySelector("iframe"), said = { wide: [], hits: {} };
const open = (page) => new Promise((go) => { frame.onload = go; frame.src = page; });
const until = async (look) => {
  for (;;) {
    const seen = look();
    if (seen) return seen;
    await new Promise((go) => setTimeout(go, 50));
  }
};
const all = (root) => [...root.querySelectorAll("*")].flatMap(
  (node) => [node, ...(node.shadowRoot ? all(node.shadowRoot) : [])]);
const shadowed = (name) => all(frame.contentDocument).filter(
  (node) => node.tagName === name && node.getRootNode() !== frame.contentDocument);
(async () => {
  for (const page of PAGES) {
    await open(page);
    if (frame.contentDocument.documentElement.scrollWidth > 390) said.wide.push(page);
  }
  for (const word of WORDS) {
    await open("index.html");
    frame.contentDocument.querySelector(".md-search__button").click();
    const input = await until(() => shadowed("INPUT")[0]);
    input.value = word;
    input.dispatchEvent(new Event("input", { bubbles: true }));
    const links = await until(() => shadowed("A").length && shadowed("A"));
    said.hits[word] = links.slice(0, 5).map((link) => link.href);
  }
  fetch("said", { method: "POST", body: JSON.stringify(said) });
})();
</script>"""
"""A page that opens others at a phone's width, types words into their search, and posts what it saw."""


def seen_by_a_browser(folder: Path, reader: str, profile: Path) -> dict:
    (folder / "reader.html").write_text(reader)
    posted: queue.Queue[dict] = queue.Queue()

    class Handler(SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        with subprocess.Popen([need_chromium(), *flags, f"{address}reader.html"], stderr=subprocess.DEVNULL) as browser:
            try:
                said = posted.get(timeout=120)
            finally:
                browser.terminate()
        server.shutdown()
    return json.loads(json.dumps(said).replace(address, ""))


@pytest.mark.slow
def test_the_site_is_built_without_a_mistake_and_its_search_finds_words_on_a_phone(tmp_path: Path) -> None:
    need_zensical()
    need_chromium()
    assert build.build(tmp_path / "site") == []
    wanted = {
        "zero3": "docs/strategies.html?h=zero3#zero3",
        "micro_batch_size": "keys/batch.micro_batch_size.html?h=micro_batch_size",
        "nvme": "docs/strategies.html?h=nvme#zero3_nvme",
    }
    pages = ["index.html", "docs/recipes.html", "docs/architectures.html", "commands/launch.html", "keys/index.html"]
    reader = READER.replace("PAGES", json.dumps(pages)).replace("WORDS", json.dumps([*wanted]))
    said = seen_by_a_browser(tmp_path / "site/html", reader, tmp_path / "profile")
    assert said["wide"] == []
    assert [word for word, link in wanted.items() if link not in said["hits"][word]] == [], said["hits"]
