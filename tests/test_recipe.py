"""Protects the recipe: its defaults, its schema, and that a resolved recipe is the same recipe.

python -m pytest -q tests/test_recipe.py
"""

import copy
import json
import re
from pathlib import Path

import pytest
import yaml
from conftest import RECIPE as SMALL
from conftest import RECIPE_TEXT, ROOT
from pydantic import ValidationError

from cookbook.config.recipe import Recipe, dump_recipe, leaves, load_recipe, recipe_schema
from cookbook.system.files import RecipeError
from cookbook.system.registry import NamedSection, Section
from cookbook.training.checkpoint.resume import rule_of

RECIPE = Path(SMALL)
RECIPES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.yaml"))

OVERRIDES = {
    "as written": [],
    "sgd": ["optim={name: sgd, learning_rate: 1e-2, momentum: 0.5}"],
    "betas": ["optim.betas=[0.9, 0.95]", "optim.eps=1e-4"],
    "epochs": ["run.max_steps=null", "run.num_epochs=2"],
    "no evaluation": ["data.eval=null"],
    "named evaluations": ["data.eval={code: {path: python-stdlib, split: test}, same: python-stdlib}"],
    "mixture": ["data.train=[{path: python-stdlib, weight: 0.5}, {path: some/data, split: x}]", "data.holdout=0.1"],
    "stream": ["data.streaming=true", "data.shuffle_rows=100"],
    "adapter": ["adapter={name: dora, rank: 8, targets: [q_proj, v_proj], modules_to_save: [lm_head]}"],
    "adapter on all linear layers": ["adapter={name: lora, targets: all-linear}"],
    "checkpointing": ["model.gradient_checkpointing=selective"],
    "dpo": ["objective={name: dpo, loss: ipo, beta: 0.3}"],
    "orpo": ["objective={name: orpo, beta: 0.3}"],
    "simpo": ["objective={name: simpo, beta: 2.5, gamma: 1.4, nll_weight: 0.5}"],
    "cpo": ["objective={name: cpo, beta: 0.2}"],
    "reward": ["objective={name: reward, center_rewards_coefficient: 0.01}"],
    "classify": ["objective={name: classify, classes: ['no', 'yes', '2']}"],
    "regress": ["objective={name: regress}"],
    "kto_zero": ["objective={name: kto_zero, undesirable_weight: 1.5}"],
    "grpo": ["objective={name: grpo, loss_type: dr_grpo, max_completion_length: 64, epsilon_high: 0.28, beta: 0.04}"],
    "distill": ["objective={name: distill, teacher: some/teacher, loss_top_k: 8, beta: 0.5, temperature: 2.0}"],
    "cpt": ["objective={name: cpt}", "batch={global_batch_size: 8, micro_batch_tokens: 512}"],
    "muon": ["optim={name: muon, learning_rate: 1e-3}"],
    "wsd": ["schedule={name: wsd, warmup_steps: 3, decay_steps: 9, scale_lr: sqrt, base_batch_size: 8}"],
    "Hub model with a revision that looks like a number": [
        "model={name_or_path: '12e5', revision: '123e45'}",
        "data.train={path: some/data, revision: '010', max_rows: 5}",
    ],
    "odd texts": ["run.output_dir='no'", "model={name_or_path: 'a: b # c'}"],
}


@pytest.mark.parametrize("assignments", OVERRIDES.values(), ids=OVERRIDES)
def test_a_resolved_recipe_reloads_to_an_equal_one(book, assignments):
    recipe = load_recipe(RECIPE, assignments)
    book.write("resolved.yaml", dump_recipe(recipe))
    again = load_recipe(Path("resolved.yaml"))
    assert again == recipe
    assert dump_recipe(again) == dump_recipe(recipe)


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_resolves_and_reloads(library, name):
    recipe = load_recipe(Path(name))
    library.write("resolved.yaml", dump_recipe(recipe))
    assert load_recipe(Path("resolved.yaml")) == recipe


def test_a_resolved_recipe_writes_out_every_default_that_has_effect(book):
    text = dump_recipe(load_recipe(RECIPE))
    for key in ("betas", "eps", "max_grad_norm", "tie_word_embeddings", "on_bad_row", "gradient_checkpointing"):
        assert f"{key}:" in text
    assert "momentum" not in text  # adamw would ignore it


@pytest.mark.parametrize(
    ("assignment", "read"),
    [
        ("optim.learning_rate=2e-5", lambda recipe: recipe.optim.learning_rate == 2e-5),
        ("optim.learning_rate=1", lambda recipe: recipe.optim.learning_rate == 1.0),
        ("mixed_precision=bf16", lambda recipe: recipe.mixed_precision == "bf16"),
        ("optim.betas=[0.8, 0.9]", lambda recipe: recipe.optim.betas == (0.8, 0.9)),
        ("data.eval={path: python-stdlib, split: train}", lambda recipe: recipe.data.eval[""].split == "train"),
        ("data.eval=null", lambda recipe: recipe.data.eval == {}),
        (" seed = 7 ", lambda recipe: recipe.seed == 7),
        ("strategy=zero3", lambda recipe: recipe.strategy == "accelerate_configs/zero3.yaml"),
        ("strategy=accelerate_configs/zero3.yaml", lambda recipe: recipe.strategy == "accelerate_configs/zero3.yaml"),
    ],
)
def test_an_override_is_read_as_yaml(book, assignment, read):
    assert not read(load_recipe(RECIPE))
    assert read(load_recipe(RECIPE, [assignment]))


def test_null_on_the_command_line_is_as_if_the_key_had_not_been_written(book):
    """Compared with the same file without it: both are the same recipe, or both have a mistake in the same key."""
    whole = yaml.safe_load(Path(RECIPE).read_text())
    keys = sorted({key for key in leaves(Recipe) if key.startswith(("data", "optim", "adapter", "strategy"))})
    for key in keys:
        rest = copy.deepcopy(whole)
        *above, last = key.split(".")
        section = rest
        for name in above:
            section = section.get(name) or {}
        section.pop(last, None)
        book.write("without.yaml", yaml.safe_dump(rest))
        assert loaded(RECIPE, [f"{key}=null"]) == loaded("without.yaml", []), key
    assert len(keys) > 30
    assert loaded(RECIPE, ["data.holdouts=null"]) == ["data.holdouts: unknown key; did you mean holdout?"]


def loaded(path, assignments):
    """The recipe but for its folder, which has its name, or its mistakes without their places."""
    try:
        return load_recipe(Path(path), assignments).model_dump(exclude={"run": {"output_dir"}})
    except RecipeError as error:
        return [
            re.sub(rf"^(--set|{re.escape(str(path))}(:\d+)?:) ([\w.]+: (?=\w+:))?", "", mistake)
            for mistake in error.mistakes
        ]


@pytest.mark.parametrize(
    ("assignment", "replaced"),
    [
        ("run.num_epochs=2", "run.max_steps"),
        ("batch.micro_batch_tokens=4096", "batch.micro_batch_size"),
        ("model.name_or_path=some/model", "model.from_scratch"),
    ],
)
def test_an_override_takes_the_place_of_the_key_that_excludes_it(book, assignment, replaced):
    section, _, key = replaced.partition(".")
    assert getattr(getattr(load_recipe(RECIPE), section), key) is not None
    assert getattr(getattr(load_recipe(RECIPE, [assignment]), section), key) is None


def test_two_overrides_that_exclude_each_other_are_refused(book):
    with pytest.raises(RecipeError, match="num_epochs 2 and max_steps 3 are both given; keep one"):
        load_recipe(RECIPE, ["run.num_epochs=2", "run.max_steps=3"])


def test_the_last_of_two_overrides_wins(book):
    assert load_recipe(RECIPE, ["seed=1", "seed=2"]).seed == 2


def test_mistakes_in_several_sections_do_not_hide_files_that_are_missing(book):
    with pytest.raises(RecipeError) as caught:
        load_recipe(RECIPE, ["optim.lr=1", "batch.micro_batch_size=0", "data.train=no.jsonl", "strategy=no.yaml"])
    assert len(caught.value.mistakes) == 4


def test_the_examples_for_missing_keys_make_a_recipe(book):
    book.write("empty.yaml", "seed: 1\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(Path("empty.yaml"))
    assert len(caught.value.mistakes) == sum(field.is_required() for field in Recipe.model_fields.values())
    examples = [mistake.partition(", for example ")[2] for mistake in caught.value.mistakes]
    book.write("rows.jsonl", "{}\n")
    book.write("full.yaml", "\n".join(examples))
    assert load_recipe(Path("full.yaml")).model.name_or_path == "my-model"


def test_a_recipe_cannot_be_changed_after_loading(book):
    recipe = load_recipe(RECIPE)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.optim.learning_rate = 1.0


@pytest.mark.core
def test_the_schema_file_is_the_schema_of_the_recipe():
    assert json.loads((ROOT / "recipes/schema.json").read_text()) == recipe_schema()
    assert (ROOT / "recipes/schema.json").read_text() == json.dumps(recipe_schema(), indent=2) + "\n"


def sections(model=Recipe):
    yield model
    if issubclass(model, NamedSection) and model.is_base():
        for kind in model.kinds():
            yield from sections(kind)
    for info in model.model_fields.values():
        for candidate in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, Section):
                yield from sections(candidate)


def test_the_schema_closes_every_section_and_knows_every_key():
    schema = recipe_schema()
    blocks = {**schema["$defs"], "Recipe": schema}
    names = {model.__name__: model for model in sections()}
    assert len(names) >= 9
    for base in (model for model in names.values() if issubclass(model, NamedSection) and model.is_base()):
        kinds = {kind["title"]: kind for kind in blocks.pop(base.__name__)["anyOf"]}
        assert list(kinds) == [kind.__name__ for kind in base.kinds()]
        blocks |= kinds
    assert names.keys() - blocks.keys() == {"Objective", "Optimizer", "Schedule"}
    for name, model in ((name, names[name]) for name in blocks.keys() & names.keys()):
        assert blocks[name]["additionalProperties"] is False
        assert set(blocks[name]["properties"]) == {*model.model_fields, *(["base"] if model is Recipe else [])}
    assert set(schema["else"]["required"]) == {"strategy", "model", "data", "batch", "optim", "run"}


def test_what_a_resumed_run_may_change_is_what_leaves_its_curve_as_it_is():
    """The keys outside of `run` are written by hand: `rule_of` derives them from `explain`'s effect of each."""
    free = {key for key in leaves(Recipe) if rule_of(key) == "free" and key.split(".")[0] != "run"}
    batch = {"batch.micro_batch_size", "batch.micro_batch_tokens"}
    model = {"model.gradient_checkpointing", "model.compile", "model.liger_kernels"}
    between_runs = {"rounds.sampler", "rounds.keep_server"}  # each run of rounds begins with samples that are there
    assert free == {"strategy", "data.eval", "data.packing"} | batch | model | between_runs


def test_a_chat_template_is_given_by_name_or_path(library):
    """A bare name is a shipped one, whatever lies beside the recipe; a path is where the recipe says."""
    template = Path("recipes/chat_templates/qwen3.jinja")

    def located_of(name, *assignments):
        recipe = RECIPE_TEXT.replace("max_length", f"chat_template: {name}\n  max_length", 1)
        library.write("other/mine.yaml", recipe)
        return Path(load_recipe(Path("other/mine.yaml"), list(assignments)).data.chat_template)

    library.write("other/qwen3", "a folder or a file of that name")
    library.write("other/own.jinja", "{{ messages }}")
    assert located_of("qwen3") == template
    assert located_of("./qwen3").read_text() == "a folder or a file of that name"
    assert located_of("own.jinja").read_text() == "{{ messages }}"
    assert located_of("own.jinja", "data.chat_template=qwen3") == template
    assert located_of("recipes/chat_templates/qwen3.jinja") == template


def test_a_strategy_beside_the_recipe_is_given_by_name_or_path(book):
    def located_of(name: str, *assignments: str) -> Path:
        book.write("other/mine.yaml", RECIPE_TEXT.replace("accelerate_configs/ddp.yaml", name))
        return Path(load_recipe(Path("other/mine.yaml"), list(assignments)).strategy)

    folder = Path.cwd() / "other"
    shipped = Path("accelerate_configs/zero3.yaml")
    assert located_of("zero3") == located_of("./accelerate_configs/zero3.yaml") == shipped
    for name in ("own.yaml", "accelerate_configs/zero3.yaml"):
        book.write(f"other/{name}", Path("accelerate_configs/ddp.yaml").read_text())
    assert located_of("own.yaml") == located_of("./own.yaml") == folder / "own.yaml"
    assert located_of("zero3") == folder / shipped
    assert located_of("own.yaml", "strategy=zero3") == shipped
