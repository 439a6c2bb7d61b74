"""Protects who runs another's recipe: no word of it reaches another program as an argument, an import or an address,
but those of `plugins` and the known options of `rounds.sampler`.

python -m pytest -q tests/test_outside_words.py
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, Book

from cookbook.commands.cli import main
from cookbook.commands.rounds import served
from cookbook.config.outside_words import OWN_OPTIONS, VLLM_OPTIONS
from cookbook.start.in_rounds import misfits
from cookbook.start.run_plan import load_pair
from cookbook.system.files import RecipeError

CANARY = "evilcanary"
HOSTILE = (f"{CANARY}.module", f"--{CANARY}", f"http://{CANARY}.example/x", f"vllm --middleware {CANARY}.module")


def free_texts(node: dict, path: str = "") -> Iterator[str]:
    """Each key of the recipe's schema that takes any text."""
    if "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    if node.get("type") == "string" and not node.keys() & {"enum", "const"}:
        yield path
    for inner in (part for key in ("anyOf", "oneOf", "allOf") for part in node.get(key, ())):
        yield from free_texts(inner, path)
    for key, inner in node.get("properties", {}).items():
        yield from free_texts(inner, f"{path}.{key}".lstrip("."))
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from free_texts(node[key], f"{path}[]" if key == "items" else f"{path}.{{}}")


SCHEMA = json.loads((ROOT / "recipes/schema.json").read_text(encoding="utf-8"))
KEYS = sorted(set(free_texts(SCHEMA)))


class Outside:
    """Records, while it is entered, what this process starts, imports by name, and connects to."""

    EVENTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "import", "socket.connect")
    EVENTS += ("socket.getaddrinfo", "urllib.Request", "exec", "compile")
    current: "Outside | None" = None
    is_installed = False

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __enter__(self) -> "Outside":
        Outside.current = self
        if not Outside.is_installed:
            sys.addaudithook(Outside._hook)  # which no call takes away
            Outside.is_installed = True
        return self

    def __exit__(self, *exception: object) -> None:
        Outside.current = None

    @staticmethod
    def _hook(event: str, arguments: tuple) -> None:
        if Outside.current is not None and event in Outside.EVENTS and CANARY in str(arguments):
            Outside.current.seen.append(f"{event} {arguments}"[:300])


def planted(values: dict, key: str, word: str) -> dict:
    """A recipe with this word under a key of `KEYS`."""
    values = json.loads(json.dumps(values))
    section, parts = values, key.replace("[]", ".[]").split(".")
    name = parts[0]
    for part in parts[1:]:
        if part == "[]":
            section[name] = inner = [{}]
            section, name = inner, 0
        else:
            if not isinstance(section[name] if isinstance(section, list) else section.get(name), dict):
                section[name] = {"path": "rows.jsonl"} if str(name) in ("train", "eval") else {}
            section, name = section[name], "held" if part == "{}" else part
        if isinstance(section, list) and part == "[]" and parts[-1] != "[]":
            section[0] = {"path": "rows.jsonl"}
    section[name] = word
    return values


SMALL = {
    "strategy": "single",
    "mixed_precision": "no",
    "model": {"name_or_path": str(ROOT / "recipes/sums/model")},
    "data": {"train": [{"path": "rows.jsonl"}], "max_length": 32},
    "batch": {"global_batch_size": 4, "micro_batch_size": 4},
    "optim": {"learning_rate": 1e-3},
    "run": {"max_steps": 1, "output_dir": "outputs/x"},
}
ROUNDS = SMALL | {"objective": {"name": "distill", "teacher": "m", "kd_ratio": 1, "beta": 1}}
ROUNDS |= {"rounds": {"num_rounds": 1, "prompts_per_round": 2}, "run": {"num_epochs": 1, "output_dir": "outputs/x"}}


def test_the_schema_has_the_texts_that_this_page_tries():
    assert len(KEYS) > 35
    assert {"rounds.sampler", "model.revision", "data.train[].name", "plugins[]", "objective.teacher"} <= {*KEYS}
    assert planted(SMALL, "data.train[].name", "w")["data"]["train"] == [{"path": "rows.jsonl", "name": "w"}]
    assert planted(SMALL, "data.eval.{}.columns.{}", "w")["data"]["eval"]["held"]["columns"] == {"held": "w"}


@pytest.mark.parametrize("key", KEYS)
def test_a_text_of_a_recipe_reaches_no_other_program(book: Book, key: str):
    """A refusal of the recipe makes no difference."""
    book.write("rows.jsonl", '{"text": "a b c"}\n' * 8)
    with Outside() as outside:
        for word in HOSTILE:
            values = planted(ROUNDS if key.startswith(("rounds", "objective")) else SMALL, key, word)
            book.write("r.yaml", yaml.safe_dump(values))
            try:
                load_pair(Path("r.yaml"), [])
            except RecipeError:
                continue
            if not key.endswith(
                ("train", "train[]", "eval", "eval.{}", "path")
            ):  # a name that the Hub would be asked for
                assert main(["check", "r.yaml", "--data"]) in (0, 2)
    assert outside.seen == []
    assert not list(Path.cwd().rglob(f"*{CANARY}*"))


def test_what_reaches_another_program_would_be_seen():
    with Outside() as outside, pytest.raises(ModuleNotFoundError):
        __import__(f"{CANARY}.module")
    assert outside.seen


def sampler_problem(book: Book, sampler: str) -> str | None:
    book.write("rows.jsonl", '{"prompt": "a"}\n')
    book.write("r.yaml", yaml.safe_dump(ROUNDS | {"rounds": ROUNDS["rounds"] | {"sampler": sampler}}))
    try:
        recipe, strategy = load_pair(Path("r.yaml"), [])
        mistakes = misfits(recipe, strategy)
    except RecipeError as error:
        mistakes = error.mistakes
    return next((mistake for mistake in mistakes if "rounds.sampler" in mistake), None)


LOADS = (
    "--trust-remote-code",
    "--trust_remote_code",
    "--tool-parser-plugin a.py",
    "--tool-parser-plug a.py",
    "--reasoning-parser-plugin=a.py",
    "--middleware a.b",
    "--worker-cls a.b",
    "--worker-extension-cls a.b",
    "--logits-processors a.b",
    "--load-format pt",
    "--config a.yaml",
    "--hf-overrides {}",
    "--tokenizer other/folder",
    "--quantization a.b",
    "--distributed-executor-backend a.b",
    "--quantization ./a.py",
    "--max-num-seqs 8 extra/folder",
    "-O3",
    "--no-trust-remote-code",
    "--model=evil",
)


@pytest.mark.parametrize("options", LOADS)
def test_an_option_of_vllm_that_may_load_something_is_refused(book: Book, options: str):
    problem = sampler_problem(book, f"vllm {options}")
    assert problem is not None and "rounds.sampler has " in problem


def test_options_of_memory_and_speed_reach_vllm(book: Book):
    given = "vllm --tensor-parallel-size 2 --gpu-memory-utilization=0.85 --enforce_eager --no-enable-prefix-caching"
    assert sampler_problem(book, given) is None
    assert not VLLM_OPTIONS & OWN_OPTIONS


@pytest.mark.parametrize(
    ("address", "key", "is_sent", "problem"),
    [
        ("http://localhost:8000", "k", True, None),
        ("http://[::1]:8000", "k", True, None),
        ("https://gpu.example", "k", True, None),
        ("http://gpu.example:8000", "k", False, "would travel to gpu.example"),
        ("http://localhost.gpu.example", "k", False, "would travel to localhost.gpu.example"),
        ("http://gpu.example:8000", None, False, None),
        ("https://bob:w0rd@gpu.example", None, False, "has a name or a password"),
        ("http://gpu.example:99999", None, False, "write the address of a server"),
    ],
)
def test_the_key_of_a_server_stays_here_or_is_encrypted(book, monkeypatch, address, key, is_sent, problem):
    headers: list[dict[str, str]] = []

    class Connection:
        def __init__(self, *_: object, **__: object) -> None:
            self.sock = self

        def request(self, method: str, path: str, text: str | None, given: dict[str, str]) -> None:
            headers.append(given)
            raise OSError("refused")

        def __getattr__(self, name: str):
            return lambda *_: None

    monkeypatch.setattr(served, "HTTPConnection", Connection)
    monkeypatch.setattr(served, "HTTPSConnection", Connection)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    said = sampler_problem(book, address)
    assert said is None if problem is None else problem in said and "w0rd" not in said
    if problem is None or "travel" in problem:
        with pytest.raises(RecipeError):
            served.Client(address, address).models()
        assert [("Authorization" in given) for given in headers] == [is_sent]


def test_check_names_the_machine_that_gets_the_prompts(book: Book, capsys):
    values = ROUNDS | {"rounds": ROUNDS["rounds"] | {"sampler": "https://gpu.example"}}
    values |= {"objective": ROUNDS["objective"] | {"teacher": SMALL["model"]["name_or_path"]}}
    book.write("rows.jsonl", '{"prompt": "a"}\n')
    book.write("r.yaml", yaml.safe_dump(values))
    assert main(["check", "r.yaml"]) == 0
    assert "gpu.example gets the prompts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("model.revision", "../../other"),
        ("model.revision", "--help"),
        ("data.train[].revision", "a b"),
        ("data.train[].name", "../x"),
        ("data.train[].name", "https://x"),
        ("data.train[].split", "/etc"),
        ("data.train[].split", "../../x"),
    ],
)
def test_a_name_for_the_hub_has_no_path_and_no_address(book: Book, key: str, word: str):
    book.write("rows.jsonl", '{"text": "a b c"}\n')
    book.write("r.yaml", yaml.safe_dump(planted(SMALL, key, word)))
    with pytest.raises(RecipeError, match=f"{key.rpartition('.')[2]} is "):
        load_pair(Path("r.yaml"), [])


@pytest.mark.parametrize("name", ["pandas", "webdataset", "json"])
def test_a_reader_of_datasets_is_no_data_set(book: Book, name: str, capsys):
    """The library would read with it whatever lies in the current folder."""
    book.write("rows.jsonl", '{"text": "a b c"}\n' * 8)
    book.write("r.yaml", yaml.safe_dump(planted(SMALL, "data.train", name)))
    assert main(["check", "r.yaml", "--data"]) == 2
    assert "no data set" in capsys.readouterr().err
