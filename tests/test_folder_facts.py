"""No strategy decides which model is trained: what a folder says of itself is compared before its weights are read.

python -m pytest -q tests/test_folder_facts.py
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks import tiny_models
from cookbook.commands.cli import main
from cookbook.config.objectives import Objective
from cookbook.config.sections import AdapterSection, DataSection, ModelSection
from cookbook.facts.model_types import TYPES
from cookbook.facts.tiny_types import small_default
from cookbook.system.files import RecipeError
from cookbook.training.adapters import adapter_files, base_model, insertion
from cookbook.training.data.stream import Stream
from cookbook.training.models import folder_facts
from cookbook.training.models.folder_facts import FolderFacts, check_folder
from cookbook.training.models.language_model import load_config
from cookbook.training.models.logits import other_logits
from cookbook.training.models.model_source import weights_digest
from cookbook.training.models.structure import LogitTransform, _check_router, logit_transform
from cookbook.training.models.tokenizer_files import train_tokenizer
from tests.curves import ROOT, Lab
from tests.experts import experts, needs_experts
from tests.turns import FAMILIES, others_by_turn

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
MINUS = torch.tensor(-1e4)
UP = "model.layers.1.mlp.up_proj.weight"


def tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes the tensors of the file."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write(folder: Path, name: str, **keys: object) -> None:
    """Writes keys of a JSON file."""
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def other_head(folder: Path, *, like_embedding: bool = False) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[HEAD] = weights[EMBEDDING] + (0.0 if like_embedding else 1.0)

    tensors(folder, change)


def short(folder: Path, rows: int) -> None:
    """Leaves the first rows of the embedding."""
    tensors(folder, lambda weights: weights.update({EMBEDDING: weights[EMBEDDING][:rows].clone()}))
    write(folder, "config.json", vocab_size=rows)


def sharded(folder: Path) -> Path:
    """Divide a folder's tensors into files of which an index tells. Returns the last."""
    model = LlamaForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    return max(folder.glob("model-*.safetensors"))


def in_two_shards(folder: Path, more: float) -> None:
    """The last shard has a tensor of another too, with more added to it."""
    last = sharded(folder)
    name, tensor = min(load_file(min(folder.glob("model-*.safetensors"))).items())
    save_file({**load_file(last), name: tensor + more}, last, metadata={"format": "pt"})


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor is missing": (
        lambda folder: tensors(folder, lambda weights: weights.pop(UP)),
        rf"its files lack {UP}, which would be random",
    ),
    "a norm is missing": (lambda folder: tensors(folder, lambda weights: weights.pop(NORM)), rf"lack {NORM}"),
    "a tensor too many": (
        lambda folder: tensors(folder, lambda weights: weights.update({"model.layers.2.x": torch.ones(2)})),
        r"hold model.layers.2.x, for which LlamaForCausalLM of its config.json has no place; .*save_pretrained",
    ),
    "a layer more than config.json has": (
        lambda folder: write(folder, "config.json", num_hidden_layers=1),
        r"hold model.layers.1.\S+, .* and 4 more, for which",
    ),
    "another shape": (
        lambda folder: write(folder, "config.json", intermediate_size=64),
        r"by its config.json: .*mlp.up_proj.weight \[48, 32\] and \[64, 32\].* and 1 more; correct config.json",
    ),
    "tied, and two matrices": (
        other_head,
        rf"tie_word_embeddings: true, but its files hold {HEAD}, {EMBEDDING} with other values; write false",
    ),
    "not tied, and no head": (
        lambda folder: write(folder, "config.json", tie_word_embeddings=False),
        rf"lack {HEAD}, .*tie_word_embeddings: true",
    ),
    "a shard is not there": (
        lambda folder: sharded(folder).unlink(),
        r"model-\S+.safetensors cannot be read \(No such file or directory\); fetch it again",
    ),
    "a tensor is in two shards": (
        lambda folder: in_two_shards(folder, 1.0),
        r"model-0000\d\S+ and model-0000\d\S+ hold model\S+ with other values; fetch both again",
    ),
    "a shard is short": (
        lambda folder: cut(sharded(folder), 1000),
        r"model-\S+.safetensors has 1,000 bytes, and by its header [\d,]+; fetch",
    ),
    "a file is cut in its header": (
        lambda folder: cut(folder / "model.safetensors", 100),
        r"model.safetensors does not begin as safetensors do",
    ),
    "quantized": (
        lambda folder: write(folder, "config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        r"its weights are quantized \(gptq\), which cannot be trained; name the model",
    ),
    "quantized by GPTQ, whose file its config.json does not name": (
        lambda folder: tensors(
            folder,
            lambda weights: [
                weights.pop(UP),
                weights.update({UP.replace("weight", "qweight"): torch.zeros(4, 4, dtype=torch.int32)}),
            ],
        ),
        r"hold model.layers.1.mlp.up_proj.qweight, as quantized weights do, .*; name the model in 16 or 32 bits",
    ),
    "quantized by ModelOpt, with a scale that is a number": (
        lambda folder: tensors(
            folder,
            lambda weights: weights.update({UP: weights[UP].to(torch.float8_e4m3fn), f"{UP}_scale": torch.tensor(0.1)}),
        ),
        rf"hold {UP}_scale, as quantized weights do",
    ),
    "the padding is beyond": (
        lambda folder: write(folder, "config.json", pad_token_id=400),
        r"config.json: pad_token_id 400 is not below vocab_size \d+; write null",
    ),
    "the embedding is short": (
        lambda folder: short(folder, 50),
        r"a token of its chat template is \d+ \(\S+\), but its embedding has 50 rows",
    ),
    "of a newer transformers, which changes what is computed": (
        lambda folder: write(folder, "config.json", transformers_version="99.1", scale_of_the_next_release=0.5),
        r"was written by transformers 99\.1, and \S+ here has no scale_of_the_next_release: 0\.5: the model would be",
    ),
    "the tokenizer ends beyond": (
        lambda folder: write(folder, "tokenizer_config.json", eos_token="<|of another|>"),
        r"its eos_token is \d+ \(<\|of another\|>\), but its embedding has \d+ rows; take the tokenizer of this model",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound model with tied embeddings."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 5, 300)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlamaConfig(**SIZES, vocab_size=len(tokenizer), tie_word_embeddings=True, **ids)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def facts(folder: Path) -> FolderFacts:
    return check_folder(folder, AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


def mistakes(folder: Path) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        facts(folder)
    return caught.value.mistakes


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_by_what_is_wrong_with_it(damage: str, folder: Path):
    make, words = DAMAGES[damage]
    make(folder)
    (mistake,) = mistakes(folder)
    assert mistake.startswith(f"model.name_or_path is {str(folder)!r}: ") and re.search(words, mistake), mistake


def test_all_that_is_wrong_is_said_at_once(folder: Path):
    tensors(folder, lambda weights: [weights.pop(UP), weights.update({"y": torch.ones(1)})])
    write(folder, "config.json", intermediate_size=64)
    write(folder, "tokenizer_config.json", eos_token="<|of another|>")
    said = "\n".join(mistakes(folder))
    assert all(words in said for words in (f"lack {UP}", "hold y,", "[48, 32] and [64, 32]", "eos_token is"))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: None,
        sharded,
        lambda folder: in_two_shards(folder, 0.0),
        lambda folder: other_head(folder, like_embedding=True),
        lambda folder: tensors(folder, lambda weights: weights.update({HEAD: weights.pop(EMBEDDING)})),
        lambda folder: tensors(
            folder, lambda weights: [weights.update({k.removeprefix("model."): weights.pop(k)}) for k in [*weights]]
        ),
        lambda folder: tensors(folder, lambda weights: weights.update({k: t.half() for k, t in weights.items()})),
        lambda folder: tensors(folder, lambda weights: weights.update({"a.bias": torch.ones(1, 1, 4, 4), "b": MINUS})),
        lambda folder: write(folder, "config.json", transformers_version="99.1", rope_theta=1e4, auto_map={"a": "b"}),
        lambda folder: write(folder, "config.json", transformers_version="99.1", one_of_the_next=None, other=False),
        lambda folder: write(folder, "config.json", transformers_version="4.40.0", pretraining_tp_of_old=2),
        lambda folder: write(folder, "config.json", transformers_version="of a fork"),
        lambda folder: write(folder, "config.json", transformers_version=5),
    ],
    ids=[
        "as saved",
        "in shards",
        "a tensor twice",
        "head stored too",
        "only the head",
        "of the backbone",
        "in 16 bits",
        "an old mask",
        "of a newer transformers",
        "of a newer transformers, whose keys ask for nothing",
        "a key of an older transformers",
        "of a version that is none",
        "of a version that is a number",
    ],
)
def test_a_sound_folder_passes(change: Callable[[Path], object], folder: Path):
    change(folder)
    result = facts(folder)
    assert result == FolderFacts(len(AutoTokenizer.from_pretrained(folder)), [])


def test_tied_matrices_are_compared_to_the_last_row(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder_facts, "ROWS_AT_ONCE", 7)
    other_head(folder, like_embedding=True)
    assert facts(folder)

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[HEAD][-1] += 1

    tensors(folder, change)
    (mistake,) = mistakes(folder)
    assert "with other values" in mistake


def test_the_first_id_without_a_row_is_beyond(folder: Path):
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    write(folder, "config.json", bos_token_id=rows - 1)
    assert not facts(folder).notes
    write(folder, "config.json", bos_token_id=rows)
    (note,) = facts(folder).notes
    assert f"bos_token_id {rows} of config.json is none of the {rows:,} rows of its embedding" in note


def test_an_embedding_may_have_more_rows_than_the_tokenizer(folder: Path):
    size = len(AutoTokenizer.from_pretrained(folder))
    tensors(folder, lambda weights: weights.update({EMBEDDING: torch.ones(size + 20, 32)}))
    write(folder, "config.json", vocab_size=size + 20)
    assert facts(folder) == FolderFacts(size + 20, [])


def test_what_does_not_harm_the_training_is_a_note(folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|unused|>"])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    write(folder, "config.json", eos_token_id=[0], bos_token_id=999)
    write(folder, "generation_config.json", eos_token_id=[0])
    result = facts(folder)
    assert result.num_embeddings == len(tokenizer) - 1
    beyond, begin, ends = result.notes
    assert "more tokens than its embedding has rows" in beyond and "bos_token_id 999 of config.json is none of" in begin
    assert "texts end with 2 (<|im_end|>)" in ends


@pytest.mark.parametrize("damage", ["a tensor is missing", "a tensor too many", "tied, and two matrices"])
def test_transformers_alone_would_load_it(damage: str, folder: Path):
    """Else nothing above would be missed."""
    DAMAGES[damage][0](folder)
    assert LlamaForCausalLM.from_pretrained(folder).num_parameters() > 20_000


def test_an_expert_of_another_shape_is_named_as_the_files_have_it(folder: Path):
    """transformers says only that it cannot make one tensor of them all."""
    config = mixtral(folder)

    def change(weights: dict[str, torch.Tensor]) -> None:
        (name,) = (
            name for name in weights if re.search(r"layers.0\..*experts.2\..*w3|layers.0\..*experts.2.up_proj", name)
        )
        weights[name] = weights[name][:-1].clone()

    tensors(folder, change)
    with pytest.raises(RecipeError, match=r"layers.0\.\S+experts.2.\S+ \[47, 32\] and \[48, 32\]; correct config.json"):
        check_folder(folder, config)


def test_a_router_takes_no_more_experts_than_there_are(folder: Path):
    mixtral(folder, num_experts_per_tok=5)
    with pytest.raises(RecipeError, match=r"config\.json has 5 experts for each token, of 4 in a layer"):
        load_config(str(folder), 64)


@pytest.mark.parametrize(("name", "key"), [("aria_text", "moe_topk"), ("dbrx", "moe_top_k")])
def test_nor_does_one_whose_configuration_has_other_keys(name: str, key: str):
    config = tiny_models.tiny_config(name)
    assert _check_router(config, "model") == []
    setattr(getattr(config, "ffn_config", config), key, 99)
    assert "99 experts for each token, of " in _check_router(config, "model")[0]


def test_key_heads_divide_the_query_heads(tmp_path: Path):
    """transformers builds the model, and fails in its attention."""
    config = LlamaConfig(**SIZES | {"num_attention_heads": 4}, vocab_size=384, num_key_value_heads=3)
    with pytest.raises(RuntimeError, match="size"):
        LlamaForCausalLM(config)(torch.zeros(1, 5, dtype=torch.long))
    config.save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="has 4 query heads, and 3 key heads do not divide them"):
        load_config(str(tmp_path), 64)


def test_a_weight_without_elements_is_named_before_anything_is_divided_by_it(tmp_path: Path, capsys):
    LlamaConfig(**SIZES, vocab_size=0).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--gpus", "1xH100", "--length", "64"]) == 2
    said = capsys.readouterr().err
    assert "model.embed_tokens.weight is 0 x " in said and "correct its sizes" in said


def mixtral(folder: Path, **keys: int) -> MixtralConfig:
    config = MixtralConfig(**SIZES, vocab_size=384, num_local_experts=4, **keys)
    MixtralForCausalLM(config).save_pretrained(folder)
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("lost", [1, 3])
def test_a_lost_expert_is_named_as_the_files_would_have_it(lost: int, folder: Path):
    assert check_folder(folder, mixtral(folder)).num_embeddings == 384
    names = [name for name in load_file(folder / "model.safetensors") if ".layers.0." in name and ".experts.2." in name]
    assert len(names) == 3, "an expert is three tensors"
    tensors(folder, lambda weights: [weights.pop(name) for name in names[:lost]])
    with pytest.raises(RecipeError) as caught:
        check_folder(folder, AutoConfig.from_pretrained(folder))
    assert (names[0] in str(caught.value)) if lost == 1 else ("down_proj [3, " in str(caught.value))


USUAL = ["single", "ddp", "fsdp2", "zero3"]
SHIPPED = [path.stem for path in sorted((ROOT / "accelerate_configs").glob("*.yaml"))]
BY_TURN = [
    pytest.param(damage, strategy, marks=pytest.mark.thorough)
    for strategy in SHIPPED
    for damage in ("a norm is missing", "tied, and two matrices")
    if strategy not in USUAL or damage == "a norm is missing"
]


@pytest.mark.parametrize(
    ("damage", "strategy"),
    [
        (damage, strategy)
        for damage in ("a tensor is missing", "tied, and two matrices", "a token beyond")
        for strategy in USUAL
    ]
    + BY_TURN,
)
def test_every_strategy_refuses_it_alike(lab: Lab, damage: str, strategy: str, folder: Path, tmp_path: Path):
    """Before any process meets another."""
    if needs_experts(strategy):
        folder = shutil.copytree(experts(lab)["model"].partition(": ")[2].rstrip("}"), tmp_path / "experts")
    if damage in DAMAGES:
        DAMAGES[damage][0](folder)
        words = DAMAGES[damage][1]
    else:
        rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "\x7f"}]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        short(folder, 220)
        words = r"data.train: sample 1 has token \d+ \(\S+\), but the model's embedding has 220 rows"
    settings = {"model": f"{{name_or_path: {folder}}}", "run.output_dir": str(tmp_path / "out")}
    settings |= {"batch.micro_batch_size": "2"}  # two for a pipeline's stages, four processes' share of 16
    if damage == "a token beyond":
        settings |= {"data": f"{{train: {tmp_path / 'rows.jsonl'}, max_length: 64}}", "run.eval_every_steps": "null"}
    done = lab.start(strategy, settings)
    assert done.returncode == 2, done.stdout[-2000:]
    assert re.search(words, done.stdout) and "Traceback" not in done.stdout


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", *others_by_turn(["fsdp1", "zero3", "hsdp"], [])])
def test_a_tied_model_whose_files_hold_both_matrices_has_one_curve(
    lab: Lab, strategy: str, folder: Path, tmp_path: Path
):
    other_head(folder, like_embedding=True)
    settings = {"model": f"{{name_or_path: {folder}}}", "run.max_steps": "2", "batch.micro_batch_size": "2"}
    rows = [{"prompt": "a" * i, "completion": "b" * (16 - i)} for i in range(1, 16)] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings |= {"data": f"{{train: {tmp_path / 'rows.jsonl'}, max_length: 64}}", "run.eval_every_steps": "null"}
    settings |= {"schedule.warmup_steps": "0"}
    alone, several = lab.run("single", settings), lab.run(strategy, settings)
    assert several.losses == pytest.approx(alone.losses, abs=2e-6) and len(alone.losses) == 2
    assert EMBEDDING in several.weights and several.weights.keys() == alone.weights.keys()


class Scaled(LlamaForCausalLM):
    """A model whose forward changes the logits of its head by a key that nobody knows."""

    def forward(self, **inputs: object) -> object:
        outputs = super().forward(**inputs)
        outputs.logits = outputs.logits * self.config.scale_of_the_next_model
        return outputs


class Unseen(LlamaForCausalLM):
    def forward(self, *, inputs_of_its_own: object) -> None: ...


@pytest.mark.parametrize(
    ("kind", "scale", "is_known", "mistake"),
    [
        (Scaled, 0.5, False, "Scaled changes the logits after its head in a way that is not known.*--types llama"),
        (Scaled, 0.5, True, "Scaled changes the logits after its head"),
        (Scaled, 1.0, False, None),
        (Unseen, 1.0, False, "whether Unseen changes the logits after its head could not be seen.*--types llama"),
        (Unseen, 1.0, True, None),  # compared by runs, see docs/architectures.md
    ],
)
def test_logits_that_a_model_changes_in_an_unknown_way_are_found_by_its_own_forward(
    kind: type, scale: float, is_known: bool, mistake: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    write(folder, "config.json", scale_of_the_next_model=scale)
    monkeypatch.setattr(folder_facts, "class_of", lambda config: kind)
    if not is_known:
        monkeypatch.delitem(TYPES, "llama")
    if mistake is None:
        facts(folder)
    else:
        with pytest.raises(RecipeError, match=mistake):
            facts(folder)


@pytest.mark.parametrize(("name", "key"), [("granite", "logits_scaling"), ("gemma2", "final_logit_softcapping")])
def test_so_is_a_known_change_that_is_forgotten(name: str, key: str, monkeypatch: pytest.MonkeyPatch):
    config = small_default(AutoConfig.for_model(name, **{key: 5.0}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert other_logits(model) is None
    monkeypatch.setattr("cookbook.training.models.logits.logit_transform", lambda _: None)
    assert "changes the logits after its head" in str(other_logits(model))


@pytest.mark.parametrize(("name", "what"), [("gemma4", {"cap": 5.0}), ("hyperclovax_vision_v2", {"scale": 5.0})])
def test_of_a_model_with_a_tower_the_language_part_says_what_follows_the_head(name: str, what: dict[str, float]):
    (key,) = TYPES[name].logits
    config = AutoConfig.for_model(name)
    setattr(config.get_text_config(), key, 5.0)
    assert config.get_text_config() is not config and logit_transform(config) == LogitTransform(**what)


@pytest.mark.parametrize("rows_before", [0, 10])
def test_a_stream_ends_at_the_row_whose_token_has_no_embedding(rows_before: int, folder: Path, tmp_path: Path):
    rows = [{"prompt": "a", "completion": "b"}] * rows_before + [{"prompt": "a", "completion": "\x7f"}] * 3
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSection(train=str(tmp_path / "rows.jsonl"), streaming=True, shuffle_rows=2, max_length=8)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stream = Stream(data=data, objective=Objective.of(), tokenizer=tokenizer, num_embeddings=220)
    windows = stream.windows(seed=0, global_batch_size=2, num_samples_consumed=0)
    for _ in range(rows_before // 2):
        next(windows)
    with pytest.raises(RecipeError, match=r"data.train: sample 0 has token \d+ \(\S+\), .* 220 rows"):
        next(windows)


RECIPE = """\
strategy: single
model: {{name_or_path: {model}}}
data: {{train: {rows}, max_length: 64}}
batch: {{global_batch_size: 1, micro_batch_size: 1}}
optim: {{learning_rate: 1.0e-3}}
run: {{max_steps: 1}}
"""


def rows_in(folder: Path) -> Path:
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return folder / "rows.jsonl"


def test_commands_refuse_it_too(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows, recipe = rows_in(tmp_path), tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=folder, rows=rows))
    assert main(["check", str(recipe)]) == 0
    other_head(folder)
    for words in (["check", str(recipe)], ["evaluate", str(folder), str(rows)], ["chat", str(folder), "--prompt", "x"]):
        capsys.readouterr()
        assert main(words) == 2, words
        shown = capsys.readouterr()
        assert f"its files hold {HEAD}, {EMBEDDING} with other values" in shown.err + shown.out


def test_check_refuses_a_head_for_sequences_and_a_folder_of_nothing_as_a_start_does(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=folder, rows=rows_in(tmp_path)))
    write(folder, "config.json", architectures=["LlamaForSequenceClassification"])
    tensors(folder, lambda weights: weights.update({"score.weight": torch.ones(2, 32)}))
    assert main(["check", str(recipe)]) == 2
    assert "whose head scores sequences; name the language model" in capsys.readouterr().err
    shutil.rmtree(folder)
    folder.mkdir()
    assert main(["check", str(recipe)]) == 2
    assert "it has no weights in safetensors; fetch model.safetensors" in capsys.readouterr().err


def test_check_says_where_weights_are_missing_that_a_plan_does_without(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "inner").mkdir()
    (folder / "model.safetensors").rename(folder / "inner/model.safetensors")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=folder, rows=rows_in(tmp_path)))
    assert main(["check", str(recipe)]) == 0
    shown = capsys.readouterr()
    assert "no weights in safetensors; its folder inner has some: name that; until then" in shown.out + shown.err


def test_check_reads_a_model_of_the_hub_once_it_is_in_the_cache(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    commit = "0123456789" * 4
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--someone--llama"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    other_head(folder)
    stored = shutil.copytree(folder, cached / "snapshots" / commit)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model="someone/llama", rows=rows_in(tmp_path)))
    assert main(["check", str(recipe)]) == 2
    said = "model.name_or_path is 'someone/llama': config.json says tie_word_embeddings: true, but its files hold"
    assert said in " ".join(capsys.readouterr().err.split())
    # A download that was stopped.
    (stored / "model.safetensors").rename(stored / "a.safetensors")
    index = {"weight_map": {EMBEDDING: "a.safetensors", HEAD: "b.safetensors"}}
    (stored / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["check", str(recipe)]) == 0


def test_an_adapter_of_another_base_is_refused(folder: Path, tmp_path: Path):
    config, settings = AutoConfig.from_pretrained(folder), AdapterSection(name="lora", rank=2)
    model = LlamaForCausalLM.from_pretrained(folder)
    insertion.add_adapter(model, settings, seed=0)
    trained = {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}
    made = tmp_path / "adapter"
    made.mkdir()
    base = base_model.Base(str(folder), None, weights_digest(folder))
    adapter_files.write_adapter(trained, made, config=config, settings=settings, base=base)
    adapter_files.check_fits(made, config)
    for key, value in {"intermediate_size": 64, "num_hidden_layers": 1}.items():
        other = LlamaConfig(**config.to_dict() | {key: value})
        with pytest.raises(RecipeError, match=r"not an adapter of \S+ \(\S+ is .* in its file, and for the base"):
            adapter_files.check_fits(made, other)


@pytest.mark.parametrize(
    ("base", "revision", "said"),
    [
        ("someone/model", None, None),  # as on the Hub: the folder here has that name
        ("someone/model", "abc", None),
        ("someone/other", None, r"an adapter of someone/other by its adapter_config.json, and the model here is"),
        (None, None, "an adapter of a base without a name"),
    ],
)
def test_an_adapter_of_a_base_of_another_name_is_noted(
    base: str | None, revision: str | None, said: str | None, folder: Path, tmp_path: Path, capsys
):
    """Without a digest, as in peft's own folders, nothing tells whether it is this model."""
    adapter = tmp_path / "adapter"
    model = get_peft_model(LlamaForCausalLM.from_pretrained(folder), LoraConfig(r=4, target_modules=["q_proj"]))
    model.save_pretrained(adapter)
    write(adapter, "adapter_config.json", base_model_name_or_path=base, revision=revision)
    recipe = tmp_path / "recipe.yaml"
    settings = f"adapter: {{name: lora, rank: 4, alpha: 8, targets: [q_proj], path: {adapter}}}\n"
    recipe.write_text(RECIPE.format(model=folder, rows=rows_in(tmp_path)) + settings)
    assert main(["check", str(recipe)]) == 0
    shown = capsys.readouterr()
    assert bool(re.search(said or "an adapter of", shown.out + shown.err)) == (said is not None)


def test_an_adapter_of_another_revision_is_noted(folder: Path, tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a/b", "revision": "one"}))
    settings = AdapterSection(name="lora", path=str(tmp_path))
    noted = {
        of: base_model.base_notes(settings, ModelSection(name_or_path="a/b", revision=of)) for of in ("one", "two")
    }
    assert noted["one"] == [] and "a/b at one" in noted["two"][0] and "a/b at two" in noted["two"][0]


@pytest.mark.parametrize("model_type", others_by_turn(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), FAMILIES))
def test_what_transformers_saves_passes_and_a_tensor_less_does_not(model_type: str, tmp_path: Path):
    try:
        tiny_models.tiny_model(tiny_models.tiny_config(model_type)).save_pretrained(tmp_path)
        config = AutoConfig.from_pretrained(tmp_path)
    except Exception as error:
        if model_type in FAMILIES:  # else a fault of the helper would skip every type
            raise
        pytest.skip(f"no tiny one can be made: {error}")
    if config.get_text_config() is not config:
        pytest.skip("it holds more than a language model: tests/test_towers.py has those that are trained")
    try:
        check_folder(tmp_path, config)
    except RecipeError as error:
        if model_type in FAMILIES or "transformers cannot load it" not in str(error):
            raise
        pytest.skip(f"transformers cannot: {error}")
    names = [name for name in load_file(tmp_path / "model.safetensors") if re.search(r"\.\d+\.", name)]  # of a layer
    tensors(tmp_path, lambda weights: weights.pop(names[0]))
    with pytest.raises(RecipeError, match=r"lack|shapes differ"):
        check_folder(tmp_path, config)
