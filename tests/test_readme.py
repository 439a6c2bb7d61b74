"""Protects the README's order and its facts: first how to use the project, then what is proven.

The recipe and the strategy that it shows are good ones, the lines of its reading list begin what they name, and the
messages of docs/troubleshooting.md are those that the commands print. Run alone: pytest -q tests/test_readme.py
"""

import ast
import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from cookbook.config.recipe import load_recipe
from cookbook.config.strategy import load_strategy
from cookbook.start.run_plan import load_pair, make_plan
from cookbook.system.files import RecipeError

README = (ROOT / "README.md").read_text(encoding="utf-8")
TROUBLE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
PEERS = (ROOT / "docs/peers.md").read_text(encoding="utf-8")
FIRST, *OTHERS = re.split(r"(?m)^## ", README)
HEADINGS = re.findall(r"(?m)^## (.*)$", README)
PROOF = "What is proven, and what is not"
STRATEGIES = {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}


def block(language: str) -> str:
    """The only fenced block of a language on the first screen."""
    (block,) = re.findall(rf"(?ms)^```{language}\n(.*?)^```$", FIRST)
    return block


def sentences(text: str) -> list[str]:
    """Sentences of the paragraphs and lists: without fenced blocks, tables, headings, and addresses of links."""
    text = re.sub(r"(?ms)^```.*?^```$|^<.*?>$|^\|.*?\|$|^#.*?$", "", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = [part for paragraph in re.split(r"\n\s*\n|\n- ", text) for part in re.split(r"(?<=[.?!:])\s", paragraph)]
    return [" ".join(part.split()) for part in parts if part.strip()]


def test_the_first_screen_is_short_and_use_comes_before_proof() -> None:
    assert len(FIRST.splitlines()) <= 85
    at = HEADINGS.index(PROOF)
    assert HEADINGS[at + 1 :] == ["Pages"], "proof, tables and peers come last"
    assert at >= 5 and README[: README.index(f"## {PROOF}")].count("\n") <= 190


def test_the_first_screen_has_the_promise_a_picture_the_start_and_what_is_not_trained() -> None:
    assert "never the learning curve" in " ".join(FIRST.split()) and "docs/equivalence.svg" in FIRST
    assert {"git clone", "make quickstart"} <= set(re.findall(r"git clone|make quickstart", block("bash")))
    (limits,) = [part for part in FIRST.split("\n\n") if "not trained here" in part]
    assert all(word in limits for word in ("Text only", "images", "audio", "rounds")) and limits.count("\n") == 1


def test_no_sentence_is_long() -> None:
    said = sentences(README.partition("## Pages")[0]) + sentences(TROUBLE)
    assert len(said) >= 60
    assert [sentence for sentence in said if len(sentence.split()) > 40] == []


def test_the_recipe_of_the_first_screen_is_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = block("yaml")
    assert 10 <= len(text.splitlines()) <= 14
    rows = tmp_path / yaml.safe_load(text)["data"]["train"]
    rows.parent.mkdir(parents=True)
    rows.write_text("{}\n", encoding="utf-8")  # which `load_recipe` does not read
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    recipe = load_recipe(tmp_path / "mine.yaml")
    name = Path(recipe.strategy).stem
    strategy = load_strategy(ROOT / f"accelerate_configs/{name}.yaml")
    make_plan(recipe, strategy, num_processes=8, num_gpus=8, recipe_name="mine.yaml")


def test_the_strategy_beside_it_is_the_shipped_file_of_that_name() -> None:
    name = yaml.safe_load(block("yaml"))["strategy"]
    path = f"accelerate_configs/{name}.yaml"
    assert path in FIRST
    assert len(block("yml").splitlines()) <= 8
    assert yaml.safe_load(block("yml")) == yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_curves_of_the_first_screen_are_the_same() -> None:
    (table,) = [part for part in re.findall(r"(?ms)^```text\n(.*?)^```$", FIRST) if part.startswith("loss at step")]
    rows = [line.split() for line in table.splitlines()[1:]]
    assert len(rows) == 3 and {row[0] for row in rows} <= STRATEGIES
    assert len({tuple(row[1:]) for row in rows}) == 1


@pytest.mark.parametrize("page", ["README.md", "docs/troubleshooting.md"])
def test_each_strategy_and_recipe_that_is_named_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    strategies = set(re.findall(r"(?:--strategy|STRATEGY=)[ ]?(\w+)|accelerate_configs/(\w+)\.yaml", text))
    recipes = set(re.findall(r"\brecipes/[\w/]+\.yaml", text)) - {"recipes/mine.yaml"}
    assert strategies and recipes
    assert {a or b for a, b in strategies} <= STRATEGIES
    assert [name for name in recipes if not (ROOT / name).is_file()] == []


def test_the_lines_of_the_reading_list_begin_what_they_name() -> None:
    text = README.partition("## Read the code")[2].partition("\n## ")[0]
    stops = re.findall(r"\[`([\w./]+):(\d+)`\]\(([\w./]+)#L(\d+)\) `(\w+)`", text)
    assert len(stops) >= 9
    for path, line, target, anchor, name in stops:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        kinds = (ast.FunctionDef, ast.ClassDef)
        lines = [node.lineno for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name]
        assert (path, int(line), line) == (target, *lines[:1], anchor), f"{name} begins at {path}:{lines}"


def test_the_page_of_peers_lacks_what_it_says(tmp_path: Path) -> None:
    """A page that goes on to name as missing what has been built since would pass for honest."""
    rows = PEERS.partition("## What they have")[2].partition("\n## ")[0]
    missing = dict(re.findall(r"(?m)^\| .*\| `([\w.]+): (\w+)` is (?:refused|no key)", rows))
    assert len(missing) == 3 == rows.count("\n| ") - 1
    for key, value in missing.items():
        section, _, name = key.partition(".")
        strategy = tmp_path / "strategy.yaml"
        values = yaml.safe_load((ROOT / "accelerate_configs/fsdp2.yaml").read_text(encoding="utf-8"))
        assert load_strategy(ROOT / "accelerate_configs/fsdp2.yaml")
        strategy.write_text(yaml.safe_dump({**values, section: {name: value}}), encoding="utf-8")
        is_recipes = section != "parallelism_config"
        with pytest.raises(RecipeError, match=name):
            load_pair(ROOT / "recipes/quickstart.yaml", [f"{key}={value}"]) if is_recipes else load_strategy(strategy)


FOREIGN = [
    "batch.per_device_train_batch_size=4",
    "batch.gradient_accumulation_steps=4",
    "data.num_workers=4",
    "run.ddp_timeout=1800",
]


@pytest.mark.parametrize("assignment", FOREIGN)
def test_the_page_of_symptoms_has_the_answer_to_a_foreign_key(assignment: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_pair(ROOT / "recipes/quickstart.yaml", [assignment])
    (mistake,) = str(refused.value).splitlines()
    page = TROUBLE.replace("\\|", "|")
    name, answer = assignment.partition("=")[0].rpartition(".")[2], mistake.partition("; ")[2]
    rows = [line for line in page.splitlines() if f"`{name}`" in line]
    assert mistake.removeprefix("--set ") in page or (answer and any(answer in row for row in rows)), mistake


SAID = {
    "cookbook/training/data/encode.py": "has chats, but the tokenizer has no chat template",
    "cookbook/start/launchers.py": "without --config_file it uses this user account's defaults",
    "cookbook/system/hang_report.py": "HANG: no progress for",
    "train.py": "trained parameters got no gradient in the first step",
}


@pytest.mark.parametrize("path", SAID)
def test_a_message_of_the_page_of_symptoms_stands_in_the_code(path: str) -> None:
    assert SAID[path] in (ROOT / path).read_text(encoding="utf-8") and SAID[path] in TROUBLE
