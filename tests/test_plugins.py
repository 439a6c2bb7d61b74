"""A file outside the package adds an objective, an optimizer, a schedule and a kind of rows, and every command and
strategy takes them.

python -m pytest -q tests/test_plugins.py -m "slow or not slow"
"""

import ast
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment
from small_data import make_tokenizer

from cookbook.commands.cli import main
from cookbook.commands.rehearse import rehearsal
from cookbook.config import plugins
from cookbook.config.objectives import Objective
from cookbook.config.recipe import dump_recipe, load_recipe
from cookbook.config.strategy import find_strategy
from cookbook.start.run_plan import load_pair, make_plan
from cookbook.system import registry
from cookbook.system.files import RecipeError
from cookbook.training.checkpoint.listing import recipe_of
from cookbook.training.checkpoint.resume import changes
from cookbook.training.data.rows import BadRows, read_rows
from cookbook.training.data.tokens import tokenize
from tests.curves import WORDS, Curve, Lab, distance
from tests.needs import need_simulated_gpus, need_torchao

PLUGIN = ROOT / "tests/plugins/margin.py"
SETTINGS = {
    "objective": "{name: margin, margin: 0.5}",
    "optim": "{name: heavy_ball, learning_rate: 0.02, inertia: 0.5}",
    "schedule": "{name: sawtooth, warmup_steps: 2, tooth_steps: 5}",
    "batch": "{global_batch_size: 8, micro_batch_size: 2}",
}


def write_duels(path: Path) -> None:
    chance = random.Random(3)

    def text() -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(1, 20)))

    rows = [
        {"question": text(), "better": text(), "worse": text() + " no", "weight": chance.choice([0.5, 1, 2])}
        for _ in range(45)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings_in(folder: Path) -> dict[str, str]:
    path = folder / "duels.jsonl"
    if not path.exists():
        write_duels(path)
    return {
        "plugins": f"[{PLUGIN}]",
        "data.train": str(path),
        "data.eval": f"{{path: {path}, max_rows: 9}}",
        **SETTINGS,
    }


@pytest.fixture
def recipe(book) -> Path:
    """In the test's folder, beside its plugin."""
    book.write("recipes/mine.py", PLUGIN.read_text())
    write_duels(Path("duels.jsonl"))
    text = Path("recipes/small.yaml").read_text()
    for section in ("objective:\n  train_on: assistant\n", "batch:\n  global_batch_size: 16\n  micro_batch_size: 8\n"):
        assert section in text
        text = text.replace(section, "")
    text = text.replace("optim:\n  learning_rate: 3e-3\n  weight_decay: 0.1\n", "")
    text = text.replace("schedule:\n  name: cosine\n  warmup_steps: 10\n", "")
    text = text.replace("train: python-stdlib", "train: duels.jsonl").replace(
        "{path: python-stdlib, split: test}", "{path: duels.jsonl, max_rows: 9}"
    )
    text += "plugins: [mine.py]\n" + "".join(f"{key}: {value}\n" for key, value in SETTINGS.items())
    book.write("recipes/mine.yaml", text)
    return Path("recipes/mine.yaml")


@pytest.fixture(autouse=True)
def _forget_plugins():
    yield
    plugins.use([])


def test_check_explain_and_preview_take_it(recipe, capsys):
    assert main(["check", str(recipe)]) == 0, capsys.readouterr().err
    assert "8 duels a step" in capsys.readouterr().out
    assert main(["explain", str(recipe), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    texts = {name: quantity["text"] for section in record["quantities"].values() for name, quantity in section.items()}
    assert texts["objective"] == "margin of 0.5"
    assert texts["optimizer"].startswith("heavy_ball: inertia 0.5; weight decay")
    assert texts["schedule"] == "sawtooth, from the peak to a third of it, every 5 steps"
    assert "8 x 2 x 256" in texts["tokens a step"]
    states = {state["what"]: state["num_bytes"] for state in record["bytes_a_parameter"]["states"]}
    assert states["optimizer"] == 4
    assert main(["preview", str(recipe), "--samples", "1"]) == 0
    assert "better: " in capsys.readouterr().out


def test_plan_takes_it(recipe, capsys):
    assert main(["plan", str(recipe), "--gpus", "2x80GB", "--json"]) == 0, capsys.readouterr().err
    record = json.loads(capsys.readouterr().out)
    assert "nobody has tried it" in json.dumps(record), "its refusal of FSDP1"


def test_its_own_refusal_is_one_of_the_table(recipe):
    pair = load_pair(recipe, strategy=Path("accelerate_configs/fsdp1.yaml"))
    with pytest.raises(RecipeError, match=r"optim\.name: heavy_ball with FSDP1: nobody has tried it"):
        make_plan(*pair, num_processes=2, num_gpus=0, recipe_name=str(recipe))


def test_a_loss_over_samples_that_cannot_share_them_is_refused_where_tokens_are_shared(recipe):
    pair = load_pair(recipe, strategy=Path("accelerate_configs/ddp_sp.yaml"))
    with pytest.raises(RecipeError, match="would each see a part of the sums of margin; take them from sums_by_seq"):
        make_plan(*pair, num_processes=2, num_gpus=0, recipe_name=str(recipe))


def test_a_resolved_recipe_names_the_whole_path_and_reloads(recipe, book):
    loaded = load_recipe(recipe)
    assert loaded.plugins == [str(Path("recipes/mine.py").resolve())]
    book.write("elsewhere/resolved.yaml", dump_recipe(loaded))
    again = load_recipe(Path("elsewhere/resolved.yaml"))
    assert again == loaded and again.objective.margin == 0.5


def test_its_keys_are_checked_as_those_of_the_package(recipe):
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, ["objective.margine=2", "optim.inertia=2", "schedule.tooth_steps=40"])
    text = "\n".join(caught.value.mistakes)
    assert "objective.margine: unknown key; did you mean margin?" in text
    assert "optim.inertia is 2; it must be less than 1" in text
    assert "tooth_steps is 40, after 2 warmup_steps, but the run has 30 steps" in text


def test_a_bad_row_of_its_kind_is_named(recipe):
    objective = load_recipe(recipe).objective
    rows = [json.dumps({"question": "a", "better": "b", "worse": "c", "weight": weight}) for weight in (1, 0)]
    Path("bad.jsonl").write_text("\n".join(rows))
    with pytest.raises(RecipeError, match=r"bad\.jsonl:2: weight is not above 0"):
        read_rows(load_recipe(recipe, ["data.train=bad.jsonl"]).data.train[0], "error", objective)


def test_without_its_file_its_names_are_unknown_again(recipe):
    assert load_recipe(recipe).objective.name == "margin"
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, ["plugins=[]"])
    places = [mistake.split(" is ")[0].rpartition(" ")[2] for mistake in caught.value.mistakes]
    assert places == ["objective.name", "optim.name", "schedule.name"]
    assert "duel" not in registry.members("row")


BROKEN = {
    "no file": ("none.py", None, r"plugins.0 is 'none.py': no such file"),
    "syntax": ("x.py", "def f(:\n", r"x.py:1: cannot be imported: SyntaxError"),
    "exception": ("x.py", "\n\nraise OSError('no')\n", r"x.py:3: cannot be imported: OSError: no"),
    "exit": ("x.py", "import sys\nsys.exit(0)\n", r"x.py:2: calls sys.exit\(0\), which"),
    "nothing registered": ("x.py", "x = 1\n", r"x.py: registers nothing"),
    "name of the package": (
        "x.py",
        "from typing import Literal\nfrom cookbook.system.registry import register\n"
        "from cookbook.config.schedule import Schedule\n"
        "@register\nclass Linear(Schedule):\n    name: Literal['linear']\n",
        r"x.py:4: cannot be imported: ValueError: schedule 'linear' is taken",
    ),
    "no name": (
        "x.py",
        "from cookbook.system.registry import register\nfrom cookbook.config.schedule import Schedule\n"
        "@register\nclass Mine(Schedule):\n    pass\n",
        r"x.py:3: cannot be imported: ValueError: Mine needs a name of its own",
    ),
}


@pytest.mark.parametrize(("name", "text", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_one_line_with_its_place(book, name, text, message):
    if text is not None:
        book.write(f"recipes/{name}", text)
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(Path("recipes/small.yaml"), [f"plugins=[{name}]"])
    assert len(caught.value.mistakes) == 1
    assert load_recipe(Path("recipes/small.yaml")).schedule.name == "cosine"


def test_a_changed_plugin_is_read_again_in_the_same_process(recipe):
    assert load_recipe(recipe).schedule.ends().startswith("from the peak to a third")
    path = Path("recipes/mine.py")
    path.write_text(path.read_text().replace("from the peak to a third", "from the peak to one third"))
    assert load_recipe(recipe).schedule.ends().startswith("from the peak to one third")


def test_tokenizing_processes_know_it(recipe):
    loaded = load_recipe(recipe)
    rows = read_rows(loaded.data.train[0], "error", loaded.objective)
    bad_rows, tokenizer = BadRows(), make_tokenizer()
    together, alone = (
        tokenize(
            [rows],
            tokenizer,
            max_length=500,
            objective=loaded.objective,
            bad_rows=bad_rows,
            num_processes=num_processes,
        )
        for num_processes in (2, 1)
    )
    assert (len(together), together.group_size) == (45, 2)
    assert together.fingerprint == alone.fingerprint and set(together.values) == {0.5, 1, 2}


def test_a_changed_plugin_of_the_same_length_and_time_is_the_changed_one(tmp_path):
    """Compiled files know a source by its time and length alone."""
    path, before = tmp_path / "x.py", None
    for factor in ("0.25", "0.75"):
        text = PLUGIN.read_text().replace("2 / 3", factor)
        path.write_text(text)
        if before is not None:
            subprocess.run(["touch", "-r", str(before), str(path)], check=True)
        before = tmp_path / "first"
        subprocess.run(["cp", "-p", str(path), str(before)], check=True)
        code = (
            f"from cookbook.config import plugins, schedule; plugins.use([{str(path)!r}]);"
            "print(schedule.Schedule.of(name='sawtooth', tooth_steps=2).factor(1, 9))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=clean_environment(), capture_output=True, text=True, check=True
        )
        assert float(done.stdout) == 1 - float(factor) / 2
    assert not list(tmp_path.glob("__pycache__/*"))


def test_a_checkpoint_names_no_code_that_is_run(tmp_path):
    """The record of a run is read by export and by whoever gets the folder."""
    marker = tmp_path / "was_run"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    values = load_recipe(ROOT / "recipes/quickstart.yaml").model_dump(mode="json", exclude_none=True)
    values |= {"plugins": [str(tmp_path / "evil.py")], "objective": {"name": "margin", "margin": 0.5}}
    loaded = recipe_of(values)
    assert not marker.exists()
    assert loaded.objective.name == "margin"
    assert "margin: 0.5" in dump_recipe(loaded), "for the model card"


def test_a_run_resumes_with_its_own_objective_and_plugins_only():
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml")
    digests = {"data": "a", "model": "b"}
    state = {"recipe": recipe.model_dump(mode="json", exclude_none=True), "made_from": digests}
    assert changes(state, recipe, digests) == ([], [])
    other = recipe.model_copy(update={"objective": Objective.of(name="sft", train_on="all"), "plugins": ["x.py"]})
    mistakes, _ = changes(state, other, digests | {"plugins": "c"})
    assert [mistake.split(" ")[0] for mistake in mistakes[:3]] == ["the", "objective.train_on", "plugins"]


def test_objectives_of_the_package_are_still_checked_with_a_plugin(recipe):
    load_recipe(recipe)
    with pytest.raises(Exception, match="margin would be ignored by sft"):
        Objective.of(name="sft", margin=1.0)


def test_the_plugin_of_the_page_is_a_good_one(tmp_path):
    import torch

    from cookbook.training.models.logits import PLAIN, HeadLogits, Reading

    texts = re.findall(r"(?s)```python\n(.*?)```", (ROOT / "docs/recipes.md").read_text())
    (tmp_path / "my_objective.py").write_text("\n".join(texts))
    plugins.use([str(tmp_path / "my_objective.py")])
    objective = Objective.of(name="hinge")
    nll, reference = torch.tensor([2.0, 30.0, 5.0, 1.0]), torch.tensor([-3.0, -4.0, -1.0, -2.0])
    batch = {"target_sequences": torch.arange(4), "num_sequences": 4, "reference_logps": reference, "targets": nll}
    outcome = objective.compute(lambda targets: targets, batch)
    # Ratios 1, -26, -4 and 1: gaps 27 and -5.
    assert outcome.count == 2 and outcome.loss_sum.item() == pytest.approx(0 + 1 + 0.05 * 5)
    assert objective.words() == "hinge, beta 0.05" and objective.needs_reference
    products, targets = torch.randn(4, 9), torch.tensor([0, 3, 8, 3])

    def model(targets, function):
        return function(HeadLogits(products, Reading(None, PLAIN)), slice(None))

    outcome = Objective.of(name="z_loss", weight=0.5).compute(model, {"targets": targets})
    nll = torch.nn.functional.cross_entropy(products, targets, reduction="sum").item()
    assert outcome.metrics["nll"].item() == pytest.approx(nll)
    assert outcome.loss_sum.item() == pytest.approx(nll + 0.5 * products.logsumexp(1).square().sum().item())


def run(lab: Lab, strategy: str, **more: str) -> Curve:
    return lab.run(strategy, settings_in(lab.folder) | more)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero2"])
def test_the_curve_is_that_of_one_process(lab: Lab, strategy: str):
    curve, reference = run(lab, strategy), run(lab, "single")
    apart = distance(curve, reference)
    assert apart.loss < 1e-5 and apart.norm < 1e-4, apart
    assert reference.steps[0]["loss"] > 1.2 * reference.steps[-1]["loss"], "it learns"
    (record,) = curve.record["plugins"]
    assert record["file"] == str(PLUGIN) and len(record["sha256"]) == 64


@pytest.mark.slow
def test_a_resumed_run_is_the_whole_one_and_a_changed_plugin_is_noticed(lab: Lab, tmp_path: Path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(PLUGIN.read_text())
    settings = settings_in(lab.folder) | {"plugins": f"[{plugin}]", "run.output_dir": str(tmp_path / "out")}
    settings |= {"run.save_every_steps": "10", "run.resume": "auto"}
    done = lab.start("zero2", settings | {"run.stop_after_steps": "10"})
    assert done.returncode == 75, done.stdout[-3000:]
    plugin.write_text(PLUGIN.read_text().replace("1 - 2 / 3", "1 - 1 / 3"))
    done = lab.start("fsdp2", settings)
    assert done.returncode == 2 and "the plugins are not what the checkpoint was made with" in done.stdout
    plugin.unlink()
    moved = tmp_path / "elsewhere.py"
    moved.write_text(PLUGIN.read_text())
    done = lab.start("fsdp2", settings | {"plugins": f"[{moved}]"})
    assert done.returncode == 0, done.stdout[-3000:]
    apart = distance(Curve(tmp_path / "out"), run(lab, "single"))
    assert apart.loss < 1e-5 and apart.norm < 1e-4, apart


@pytest.mark.slow
def test_a_rehearsal_takes_it(recipe, capsys, monkeypatch):
    need_simulated_gpus()
    for name in set(rehearsal.os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    path = recipe.resolve()
    settings = [f"data.train={Path('duels.jsonl').resolve()}", "data.eval=null"]
    monkeypatch.chdir(ROOT)
    code = rehearsal.rehearse(path, assignments=settings, strategy=find_strategy("fsdp2"), processes=None)
    assert code == 0, capsys.readouterr().err
    assert "objective margin on rows of duel" in capsys.readouterr().out


@pytest.mark.slow
def test_a_plugin_that_imports_torchao_brings_none_of_its_warnings(tmp_path):
    """A warning of its own is printed: it is not that all are hidden."""
    need_torchao()
    plugin = tmp_path / "own.py"
    text = "import logging\nimport torchao\nfrom cookbook.config.metric_functions import metric\n"
    text += "logging.getLogger('own').warning('of the plugin')\n\n@metric\ndef hits(logits, labels): ...\n"
    plugin.write_text(text)
    line = [sys.executable, "-m", "cookbook", "check", "recipes/quickstart.yaml", "--set", f"plugins=[{plugin}]"]
    done = subprocess.run(line, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("recipes/quickstart.yaml: fine")
    assert done.stderr == "of the plugin\n"


def test_modules_of_one_s_own_that_a_plugin_imports_are_part_of_it(tmp_path: Path):
    """An edit of what it computes with is an edit of it; a file beside it that it does not import is none."""
    package, plugin = tmp_path / "own_sizes", tmp_path / "plugin.py"
    package.mkdir()
    texts = {
        plugin: "import numpy, own_sizes.outer\n" + PLUGIN.read_text(),
        package / "__init__.py": "",
        package / "outer.py": "from .inner import SIZE\ndef late():\n    from .late import SIZE\n",
        package / "inner.py": "SIZE = 1.0\n",
        package / "late.py": "SIZE = 2.0\n",
        package / "not_imported.py": "SIZE = 3.0\n",
    }
    for path, text in texts.items():
        path.write_text(text)

    def digest() -> str:
        """The digest in a process of its own."""
        code = (
            "import sys; from cookbook.config import plugins; sys.path.insert(0, sys.argv.pop(1)); file = sys.argv[1:]"
        )
        code += "; plugins.use(file); print(plugins.digest(file), plugins.record(file))"
        words = [sys.executable, "-B", "-c", code, str(tmp_path), str(plugin)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        of_all, _, record = done.stdout.partition(" ")
        names = [Path(entry["file"]).name for entry in ast.literal_eval(record)]
        assert names == ["plugin.py", "__init__.py", "inner.py", "late.py", "outer.py"]
        return of_all

    digests = [digest()]
    for path in (package / "inner.py", package / "late.py", package / "not_imported.py"):
        path.write_text("SIZE = 7.0\n")
        digests.append(digest())
    assert len(set(digests[:3])) == 3 and digests[3] == digests[2]
