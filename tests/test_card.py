"""The card of an export, whole and by hand, and what a push to the Hub asks and says; the Hub is planted.

python -m pytest -q tests/test_card.py
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from cookbook.config.recipe import load_recipe
from cookbook.run.publish import card, push
from cookbook.system.files import RecipeError
from cookbook.training.adapters.base_model import Base

STATE = {
    "step": 12,
    "num_samples": 3456,
    "made_from": {"data": "d1g3st"},
    "run": {
        "versions": {"torch": "2.13.0", "deepspeed": None, "peft": "0.18"},
        "strategy": {"file": "accelerate_configs/zero3.yaml", "processes": 4},
    },
}
CHECKED = {"tensors": "9 tensors equal", "logits": "logits equal"}


def card_of(book: Any, *settings: str, base: Base, **options: Any) -> tuple[dict[str, Any], str]:
    """The front matter and the rest."""
    recipe = load_recipe(Path("recipes/small.yaml"), [f"run.output_dir={Path('out/mine').absolute()}", *settings])
    given = {"merged": False, "checked": CHECKED} | options
    text = card.model_card(Path(), STATE, recipe, base, **given)
    begin, front, rest = text.split("---\n", 2)
    assert not begin
    return yaml.safe_load(front), rest


def test_the_card_of_a_new_model_is_what_it_was_trained_on_and_from(book):
    Path("metrics.jsonl").write_text('{"step": 12, "loss": 1.5}\n{"step": 13, "loss": 1.0}\n')
    front, text = card_of(book, base=Base("out/mine/model", None, "abc", is_new=True))
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["sft"]}
    table, recipe = text.split("## Recipe\n\n")
    assert table == (
        "\n# mine, step 12\n\n| | |\n|---|---|\n"
        "| trained | all weights |\n| from | a new model |\n| objective | sft |\n| steps | 12, 3,456 samples |\n"
        "| strategy | `zero3`, 4 processes |\n| precision | float32 |\n| training loss | 1.5000 at step 12 |\n"
        "| versions | torch 2.13.0, peft 0.18 |\n| checked | 9 tensors equal; logits equal |\n\n"
        "## Data\n\n- trained on `python-stdlib`, split train\n- evaluated on `python-stdlib`, split test\n\n"
        "Digest of the tokens: `d1g3st`\n\n"
    )
    written = yaml.safe_load(re.fullmatch(r"```yaml\n(.*)```\n", recipe, re.DOTALL)[1])
    assert written["run"]["output_dir"] == "mine" and written["seed"] == 42


@pytest.mark.parametrize(("merged", "kind"), [(False, "adapter"), (True, "finetune")])
def test_the_card_of_an_adapter_names_its_base_and_its_sources_on_the_hub(book, merged: bool, kind: str):
    """Folders of this machine by their last part alone, wherever they stand."""
    book.write("private/rows.jsonl", '{"text": "a"}\n')
    local, far = (
        Path("private/rows.jsonl").absolute(),
        "{path: some-org/rows, name: small, revision: v2, max_rows: 5000}",
    )
    data = [
        f"data.train=[{{path: {local}, weight: 0.5}}, {far}, {{path: some-org/rows, split: more}}]",
        f"data.eval={{near: {{path: {local}}}}}",
    ]
    keys = [
        "adapter.name=lora",
        "adapter.rank=8",
        "mixed_precision=bf16",
        "model={name_or_path: org/base, revision: v1}",
    ]
    base = Base("org/base", "v1", "abc")
    front, text = card_of(book, *data, *keys, base=base, merged=merged, checked={})
    assert front == {
        "library_name": "transformers" if merged else "peft",
        "base_model": "org/base",
        "base_model_relation": kind,
        "pipeline_tag": "text-generation",
        "tags": ["sft", "lora"],
        "datasets": ["some-org/rows"],
    }
    trained = "lora adapter of rank 8" + ", merged into the base model" * merged
    assert f"| trained | {trained} |\n| from | `org/base` at v1 |\n" in text
    assert "| precision | bf16 |\n| versions |" in text and "| checked | not yet: cookbook export does |" in text
    assert text.split("## Data\n\n")[1].split("\n\nDigest")[0].splitlines() == [
        "- trained on `rows.jsonl`, weight 0.5",
        "- trained on `some-org/rows`, (small), split train, revision v2, the first 5,000 rows",
        "- trained on `some-org/rows`, split more, no revision pinned",
        "- evaluated on (near) `rows.jsonl`",
    ]
    assert str(Path.cwd()) not in text and "path: rows.jsonl" in text and "path: some-org/rows" in text


def test_rows_that_are_held_out_and_shown_often_are_told(book):
    data = ["data.train=[{path: org/a, rows_per_epoch: 2000}]", "data.eval=null", "data.holdout=0.05"]
    _, text = card_of(book, *data, base=Base("x", None, "abc", is_new=True))
    assert "- trained on `org/a`, split train, no revision pinned, 2,000 rows an epoch\n" in text
    assert "- evaluated on a share of 0.05 of the training rows, held out\n" in text


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("org/model", True),
        *((name, False) for name in ("model", "a/b/c", "./model", "~/model", "/model", "org/.hidden", "org/")),
        ("recipes/small.yaml", False),
    ],
)
def test_a_name_on_the_hub_is_an_owner_and_a_name_and_no_file(book, name: str, is_one: bool):
    assert card._is_hub_name(name) is is_one
    assert card._public(name) == (name if is_one else Path(name).name)


# A push.


class Api:
    """The Hub, with a repository that is public, private, or not there."""

    def __init__(self, is_private: bool | None, log: list[Any]) -> None:
        self.is_private, self.log = is_private, log

    def repo_info(self, repository: str) -> Any:
        if self.is_private is None:
            raise RepositoryNotFoundError("404", response=httpx.Response(404, request=httpx.Request("GET", "http://h")))
        return SimpleNamespace(private=self.is_private)

    def create_repo(self, repository: str, *, private: bool) -> None:
        self.log.append(("made", repository, private))

    def upload_folder(self, **facts: Any) -> Any:
        self.log.append(("pushed", facts["repo_id"], facts["folder_path"], facts["commit_message"]))
        return SimpleNamespace(commit_url="http://h/commit/1")


@pytest.mark.parametrize(
    ("is_private", "public", "said", "made"),
    [
        (None, False, "a new repository, private", [("made", "me/it", True)]),
        (None, True, "a new repository, public", [("made", "me/it", False)]),
        (True, False, "an existing repository, private", []),
        (True, True, "an existing repository, private", []),
        (False, True, "an existing repository, public", []),
    ],
)
def test_a_push_lists_its_files_and_is_as_public_as_was_asked(
    tmp_path: Path, monkeypatch, capsys, is_private, public: bool, said: str, made: list[Any]
):
    log: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token: log.append(token) or Api(is_private, log))
    monkeypatch.setenv("HF_TOKEN", "of me")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/b").write_text("b" * 1234)
    (tmp_path / "a").write_text("")
    assert push.push(tmp_path, "me/it", public=public) == "http://h/commit/1"
    assert log == ["of me", *made, ("pushed", "me/it", tmp_path, "Export")]
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == f"pushing to me/it, {said}:"
    assert [line.split() for line in lines if line.strip()] == [["0", "bytes", "a"], ["1,234", "bytes", "deep/b"]]


def test_a_public_repository_and_a_hub_that_refuses_are_mistakes(tmp_path: Path, monkeypatch):
    log: list[Any] = []
    monkeypatch.setenv("HF_TOKEN", "of me")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token: Api(False, log))
    with pytest.raises(RecipeError, match="me/it is public; add --public if that is meant"):
        push.push(tmp_path, "me/it", public=False)
    response = httpx.Response(403, request=httpx.Request("POST", "http://h"))
    for error in (
        OSError("no network\nat all"),
        ValueError("no network"),
        HfHubHTTPError("no network", response=response),
    ):

        def refuse(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(Api, "upload_folder", refuse)
        with pytest.raises(RecipeError, match=re.escape("--push: the Hub refused me/it (no network)")):
            push.push(tmp_path, "me/it", public=True)
    assert not log


@pytest.mark.parametrize("name", ["it", "me/", "/it", "a/b/c"])
def test_a_push_without_an_owner_or_a_token_is_refused_before_the_export(monkeypatch, name: str):
    monkeypatch.setenv("HF_TOKEN", "of me")
    push.check_push("me/it")
    with pytest.raises(RecipeError, match=f"--push is '{name}'; write OWNER/NAME"):
        push.check_push(name)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RecipeError, match="no HF_TOKEN in the environment; set it to a token that may write to me/it"):
        push.check_push("me/it")
