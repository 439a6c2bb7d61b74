"""Protects that of a model with a tower the language part trains as its text-only twin does, under every strategy,
and that the export is the whole model, its tower bit for bit the old one.

python -m pytest -q tests/test_towers.py
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from cookbook.facts.language_part import language_key, why_whole
from cookbook.facts.model_types import TYPES
from cookbook.run.publish.merged import write_merged
from cookbook.run.publish.reopen import ExportDifference, reopen
from cookbook.system.files import RecipeError
from cookbook.training.checkpoint.tensors import as_weight
from cookbook.training.checkpoint.tower import Tower, copy_processors
from cookbook.training.checkpoint.write_model import write_model
from cookbook.training.models import structure
from cookbook.training.models.folder_facts import check_folder
from cookbook.training.models.language_model import load_config, open_language_model
from cookbook.training.models.structure import part_in_words
from cookbook.training.models.tokenizer_files import load_tokenizer
from tests import needs
from tests.curves import ROOT, Curve, Lab
from tests.test_equivalence import SGD_LOSS
from tests.test_new_tokens import NEW
from tests.test_new_tokens import settings as with_new_tokens
from tests.towers import FIRST_OF_IMAGES, whole_config, whole_model, write_pair

COMMON = {
    "run.max_steps": "4",
    "schedule.warmup_steps": "0",
    "optim.learning_rate": "0.02",
    "run.eval_every_steps": "2",
}
PACKED = {"data.packing": "true"}
LORA = {"adapter": "{name: lora, rank: 8}", "optim.learning_rate": "1.0"}
NEW_NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
"""Names of a Llava-like model's tensors as transformers writes them: as some of its versions wrote them."""


@pytest.fixture
def pair(lab: Lab) -> Any:
    """Folders of a model with a tower, and of its twin, by type."""

    def of(model_type: str) -> dict[str, Path]:
        need_package_of(model_type)
        folder = lab.folder / f"pair_{model_type}"
        if not folder.exists():
            tokenizer = AutoTokenizer.from_pretrained(lab.run("single").folder / "export")
            write_pair(folder, whole_config(model_type), tokenizer)
        return {"whole": folder / "whole", "twin": folder / "twin"}

    return of


def need_package_of(model_type: str) -> None:
    if package := TYPES[model_type].needs:
        needs.need_package(package)


def test_a_tower_is_kept_bit_for_bit_and_its_configuration_names_the_dtype_of_the_rest(tmp_path: Path):
    base, run, export = (tmp_path / name for name in ("base", "run", "export"))
    model = whole_model(whole_config("gemma3"))
    model.to(torch.bfloat16).save_pretrained(base)
    for place in (run, export):
        place.mkdir()
    values = json.loads((base / "config.json").read_text())
    for part in ("text_config", "vision_config"):  # as the files of the Hub have it
        values[part]["dtype"] = "bfloat16"
    for place in (base, run):
        (place / "config.json").write_text(json.dumps(values))
    Tower.of(base).keep(run)
    tower, before = Tower.read_kept(run), tensors_of(base)
    assert {name.partition(".")[0] for name in tower.tensors} == {"vision_tower", "multi_modal_projector"}
    for name, weight in tower.tensors.items():
        assert is_equal(weight.read(weight.own_dtype), before[name]), name
    tower.write_config(export, torch.float16)
    written = AutoConfig.from_pretrained(export)
    assert written.get_text_config().dtype == written.dtype == torch.float16
    assert written.vision_config.to_dict() == AutoConfig.from_pretrained(base).vision_config.to_dict()


def trained(lab: Lab, folder: Path, strategy: str, settings: dict[str, str]) -> Curve:
    return lab.run(strategy, {**COMMON, **settings, "model": f"{{name_or_path: {folder}}}"})


def curve_of(run: Curve) -> list[float]:
    return run.losses + [loss for _, loss, _ in run.evaluations]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def is_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    return tensor.dtype == other.dtype and torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))


USUAL = ("gemma3", "gemma4", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl")
TOWERS = [name for name, facts in TYPES.items() if facts.language_part is True]
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in TOWERS if name not in USUAL and not TYPES[name].needs]
WITH_TIMM = pytest.mark.thorough(needs="timm")


@pytest.mark.parametrize("model_type", [*USUAL, *OTHERS, pytest.param("gemma3n", marks=WITH_TIMM)])
def test_the_language_part_alone_has_the_logits_of_the_whole(model_type: str, tmp_path: Path):
    need_package_of(model_type)
    model = whole_model(whole_config(model_type))
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, FIRST_OF_IMAGES, (1, 40), generator=torch.Generator().manual_seed(1))
    part = open_language_model(tmp_path, dtype=torch.float32).eval()
    assert check_folder(tmp_path, load_config(str(tmp_path), 64)).num_embeddings == 512
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        assert (part(input_ids=ids).logits - logits).abs().max() <= 5e-7 < logits.abs().max()
    assert sum(p.numel() for p in part.parameters()) < sum(p.numel() for p in model.parameters())


CASES = [
    ("gemma3", "single", PACKED),
    pytest.param("gemma3", "fsdp2", {}, marks=pytest.mark.slow),
    pytest.param("gemma3", "zero3", {}, marks=pytest.mark.slow),
    pytest.param("gemma3", "tp", {}, marks=[pytest.mark.slow, pytest.mark.thorough]),
    pytest.param("llama4", "fsdp2", {}, marks=pytest.mark.slow),
    pytest.param("mistral3", "pp", {}, marks=[pytest.mark.slow, pytest.mark.thorough]),
    pytest.param("qwen3_5", "ddp", {}, marks=[pytest.mark.slow, pytest.mark.thorough]),
    *(pytest.param("gemma3n", name, {}, marks=WITH_TIMM) for name in ("single", "fsdp2", "zero3")),
]


@pytest.mark.parametrize(("model_type", "strategy", "settings"), CASES)
def test_it_trains_as_its_text_only_twin(lab: Lab, pair, model_type: str, strategy: str, settings: dict):
    folders = pair(model_type)
    run = trained(lab, folders["whole"], strategy, settings | {"run.check_export": "true"})
    twin = trained(lab, folders["twin"], strategy, settings)
    assert max(abs(a - b) for a, b in zip(curve_of(run), curve_of(twin), strict=True)) <= SGD_LOSS
    before, after, expected = map(tensors_of, (folders["whole"], run.folder / "export", twin.folder / "export"))
    assert after.keys() == before.keys()
    language = {language_key(key): key for key in after if language_key(key) in expected}
    assert language.keys() == expected.keys()
    assert all((after[key] - expected[name]).abs().max() <= SGD_LOSS for name, key in language.items())
    rest = after.keys() - {*language.values()}
    assert len(rest) > 10 and all(is_equal(after[key], before[key]) for key in rest)
    assert not all(is_equal(after[key], before[key]) for key in language.values())


@pytest.mark.thorough(turn=(3, 10))
def test_a_tower_of_timm_does_all_this_where_timm_is(tmp_path: Path):
    """The tests above that need it, in an environment that has it."""
    words = [
        "-q",
        "-m",
        "slow or not slow",
        "-k",
        "gemma3n",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path / 'runs'}",
    ]
    done = subprocess.run(
        [needs.python_with_timm(tmp_path / "env"), "-m", "pytest", *words, "tests/test_towers.py"],
        cwd=ROOT,
        env={**os.environ, "SKIP_NOTHING": "1", "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout[-4000:]


def renamed(folder: Path, names: dict[str, str]) -> None:
    """Rename the tensors of a folder by the beginnings of their names."""
    tensors = tensors_of(folder)
    for old, new in names.items():
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: of for name, of in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("names", [{}, NEW_NAMES], ids=["as written today", "as written before"])
def test_what_is_written_back_has_the_names_that_were_read(names: dict, tmp_path: Path):
    """With a tower in another dtype, a tensor of whole numbers, and an untied head."""
    folder, target = tmp_path / "model", tmp_path / "export"
    config = whole_config("mistral3")
    config.tie_word_embeddings = False
    whole_model(config).save_pretrained(folder)
    tensors = tensors_of(folder)
    towers = {name for name in tensors if name.startswith("vision_tower.")}
    tensors = {name: of.to(torch.bfloat16) if name in towers else of for name, of in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    renamed(folder, names)
    tower = Tower.of(folder)
    target.mkdir()
    assert tower is not None and len(tower.tensors) > len(towers)
    part = open_language_model(folder, dtype=torch.float32)
    weights = {name: as_weight(parameter.detach() + 1) for name, parameter in part.named_parameters()}
    write_model(weights, target, config=part.config, dtype=torch.float32, tower=tower, shard_size="100KB")
    before, after = tensors_of(folder), tensors_of(target)
    assert before.keys() == after.keys() and len([*target.glob("*.safetensors")]) > 1
    for name in before:
        expected = before[name] if name in tower.tensors else before[name] + 1
        assert is_equal(after[name], expected), name
    assert json.loads((target / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    model, info = AutoModelForImageTextToText.from_pretrained(target, output_loading_info=True)
    assert not any(info.values())
    ids = torch.arange(20)[None]
    logits = open_language_model(target, dtype=torch.float32).eval()(input_ids=ids).logits
    assert torch.allclose(model.float().eval()(input_ids=ids).logits, logits, atol=1e-5)


DAMAGES = {
    "a tensor of the language part is missing": (
        r"layers\.1\.mlp\.up_proj",
        "",
        r"its files lack .*layers\.1\.mlp\.up_pro",
    ),
    "one of the tower is": (r"vision_tower.*\.0\..*fc1\.weight", "", r"its files lack .*fc1\.weight"),
    "one is of nobody": (
        r"norm\.weight",
        "{}.of_nobody",
        r"its files hold .*of_nobody.*Gemma3ForConditionalGeneration",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_by_what_is_wrong_with_it(damage: str, pair, tmp_path: Path):
    pattern, name, words = DAMAGES[damage]
    folder = tmp_path / "model"
    shutil.copytree(pair("gemma3")["whole"], folder)
    tensors = tensors_of(folder)
    key = next(key for key in tensors if re.search(pattern, key))
    tensors[name.format(key) or key] = tensors[key].clone()
    if not name:
        del tensors[key]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecipeError, match=words):
        check_folder(folder, load_config(str(folder), 64))


REASONS = {
    "cohere2_vision": "leaves out the logit_scale",
    "glm4v": r"no class for its language part alone \(glm4v_text\)",
    "janus": "was not compared",
    "mllama": "attends to images in layers of its own",
    "musicgen": "not a causal language model",
    "paligemma": "looks ahead in the prompt",
}


@pytest.mark.parametrize("model_type", REASONS)
def test_whose_language_part_is_another_model_alone_is_refused_with_the_reason(model_type: str, tmp_path: Path):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=REASONS[model_type]):
        load_config(str(tmp_path), 64)


def test_a_package_that_builds_a_tower_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without it nothing could tell whether the tower's tensors are all there, or open the export."""
    AutoConfig.for_model("gemma3n").save_pretrained(tmp_path)
    monkeypatch.setattr("cookbook.facts.language_part.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"with timm, which is not installed \(`pip install timm`\); take a text"):
        load_config(str(tmp_path), 64)


def test_what_only_the_language_part_does_to_its_logits_is_refused_but_where_the_whole_does_it_too():
    for model_type, why in (("gemma3", "its own class leaves out the final_logit_softcapping"), ("gemma4", None)):
        config = whole_config(model_type)
        config.text_config.final_logit_softcapping = 30.0
        assert (why_whole(config) or "").startswith(why or "") and (why is None) == (why_whole(config) is None)


def test_parameters_of_whole_and_part_are_counted_once_for_each_size(monkeypatch: pytest.MonkeyPatch):
    """By the models themselves; a plan asks for them with each setting that it tries."""
    monkeypatch.setattr(structure, "COUNTED", {})
    for vocab_size in (97, 98):
        config = whole_config("gemma3")
        config.text_config.vocab_size = vocab_size
        with torch.device("meta"):
            whole = AutoModelForImageTextToText.from_config(config)
            part = AutoModelForCausalLM.from_config(config.text_config)
        words, again = part_in_words(config), part_in_words(config)
        assert words == again and f"{part.num_parameters():,} parameters" in words
        assert f"({whole.num_parameters() - part.num_parameters():,})" in words
    assert len(structure.COUNTED) == 2


def test_a_chat_template_that_only_the_processor_has_is_the_tokenizer_s(pair, tmp_path: Path):
    shutil.copytree(pair("gemma3")["whole"], tmp_path, dirs_exist_ok=True)
    text = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    assert load_tokenizer(str(tmp_path), None).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    assert load_tokenizer(str(tmp_path), None).chat_template == text


def test_what_prepares_images_and_sound_goes_with_a_model(tmp_path: Path):
    """Each of its files under its name, and nothing else of the folder."""
    base, target = tmp_path / "base", tmp_path / "target"
    base.mkdir()
    target.mkdir()
    names = ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
    for name in (*names, "config.json", "tokenizer.json"):
        (base / name).write_text(json.dumps({"from": name}))
    copy_processors(base, target)
    assert sorted(path.name for path in target.iterdir()) == sorted(names)
    assert all((target / name).read_bytes() == (base / name).read_bytes() for name in names)
    assert json.loads((base / names[0]).read_text()) == {"from": names[0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    ["gemma3", pytest.param("llama4", marks=pytest.mark.thorough), pytest.param("gemma3n", marks=WITH_TIMM)],
)
def test_an_adapter_is_one_of_the_whole_model(lab: Lab, pair, tmp_path: Path, model_type: str):
    """peft opens it on transformers' class for images and text, in whose tower layers have the same names."""
    folders = pair(model_type)
    run = trained(lab, folders["whole"], "single", LORA | {"run.check_export": "true"})
    twin = trained(lab, folders["twin"], "single", LORA)
    assert curve_of(run) == curve_of(twin)
    exports = {name: run_of.folder / "export" for name, run_of in (("whole", run), ("twin", twin))}
    whole = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(folders["whole"]), exports["whole"])
    adapted = {name for name, _ in whole.named_parameters() if "lora_" in name}
    assert adapted and all(".language_model." in name for name in adapted)
    others = [name for name, _ in whole.named_parameters() if ".language_model." not in name]
    assert any(name.endswith(".q_proj.weight") for name in others)
    text = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders["twin"]), exports["twin"])
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits = whole.eval()(input_ids=ids).logits
        assert (logits - text.eval()(input_ids=ids).logits).abs().max() <= 5e-7
        with whole.disable_adapter():
            assert (logits - whole(input_ids=ids).logits).abs().max() > 1e-3
    write_merged(exports["whole"], tmp_path, None)
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert (merged(input_ids=ids).logits - logits).abs().max() <= 1e-5
    before, after = tensors_of(folders["whole"]), tensors_of(tmp_path)
    same = {name for name in before if is_equal(before[name], after[name])}
    assert before.keys() == after.keys() and {name for name in before if "language_model." not in name} <= same
    assert len(same) < len(before)


def write_small_vocabulary(lab: Lab, folder: Path) -> dict[str, Path]:
    """A pair whose embedding has a row for each token of its tokenizer, and none to spare."""
    if not folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(lab.run("single").folder / "export")
        config = whole_config("gemma3")
        config.text_config.vocab_size = len(tokenizer)
        write_pair(folder, config, tokenizer)
    return {"whole": folder / "whole", "twin": folder / "twin"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "settings"), [("fsdp2", {}), ("single", LORA | {"optim.learning_rate": "0.1"})], ids=["full", "lora"]
)
def test_new_tokens_train_as_those_of_its_twin_and_the_tower_stays(lab: Lab, tmp_path: Path, strategy, settings: dict):
    folders = write_small_vocabulary(lab, lab.folder / "pair_small")
    rows = with_new_tokens(lab, COMMON | settings | {"run.check_export": "true"})
    del rows["model.new_tokens"]
    asked = {name: json.dumps({"name_or_path": str(folder), "new_tokens": NEW}) for name, folder in folders.items()}
    run, twin = lab.run(strategy, rows | {"model": asked["whole"]}), lab.run("single", rows | {"model": asked["twin"]})
    assert max(abs(a - b) for a, b in zip(curve_of(run), curve_of(twin), strict=True)) <= SGD_LOSS
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "export")
    written = run.folder / "export"
    if settings:
        write_merged(written, tmp_path, None)
        opened = AutoModelForImageTextToText.from_pretrained(folders["whole"])
        opened.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        opened, written = PeftModel.from_pretrained(opened, written), tmp_path
    model, info = AutoModelForImageTextToText.from_pretrained(written, output_loading_info=True)
    assert not any(info.values()) and model.config.text_config.vocab_size % 64 == 0
    ids = tokenizer("<|think|> the fox<|tool|>", return_tensors="pt")["input_ids"]
    assert {*tokenizer.convert_tokens_to_ids(NEW)} < {*ids[0].tolist()}
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
        alone = open_language_model(written, dtype=torch.float32).eval()(input_ids=ids).logits
        assert (logits - alone).abs().max() <= 5e-7
        if settings:
            assert (opened.eval()(input_ids=ids).logits - logits[..., : len(tokenizer)]).abs().max() <= 1e-5
    before, after = tensors_of(folders["whole"]), tensors_of(written)
    assert before.keys() == after.keys()
    same = {name for name in before if is_equal(before[name], after[name])}
    assert {name for name in before if not name.startswith("language_")} <= same


def test_a_new_token_with_the_id_of_an_image_or_without_a_row_in_each_layer_is_refused(pair):
    for model_type, count, words in (
        ("gemma3", 240, "image_token_index"),
        ("gemma4", 300, "the embedding of its layers"),
    ):
        folder = pair(model_type)["whole"]
        new = [f"<{number}>" for number in range(count)]
        tokenizer, config = load_tokenizer(str(folder), None, new), load_config(str(folder), 64)
        assert check_folder(folder, config, load_tokenizer(str(folder), None, new[:9]), new_tokens=new[:9])
        with pytest.raises(RecipeError, match=words):
            check_folder(folder, config, tokenizer, new_tokens=new)


def test_an_export_whose_tower_has_changed_is_found(lab: Lab, pair, tmp_path: Path):
    run = trained(lab, pair("gemma3")["whole"], "single", PACKED | {"run.check_export": "true"})
    (checkpoint,) = [path for path in (run.folder / "checkpoints").iterdir() if path.name.startswith("step")]
    shutil.copytree(run.folder / "export", tmp_path / "export")
    path = tmp_path / "export" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.startswith("vision_tower."))
    assert reopen(tmp_path / "export", run.folder / "model", checkpoint, torch.float32)
    save_file(tensors | {name: tensors[name] + 0.001}, path, metadata={"format": "pt"})
    with pytest.raises(ExportDifference, match=f"{name}, which was not trained, has changed"):
        reopen(tmp_path / "export", run.folder / "model", checkpoint, torch.float32)
