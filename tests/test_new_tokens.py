"""New tokens: every strategy trains the same grown model, and what comes out is what transformers and peft open.

python -m pytest -q tests/test_new_tokens.py
"""

import copy
import json
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils import TrainableTokensWrapper
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, Gemma4TextConfig, LlamaConfig, PhiConfig

from benchmarks.tiny_models import tiny_config, tiny_model
from cookbook.commands.evaluate import evaluate_model
from cookbook.commands.export import merge_adapter
from cookbook.commands.shared.generation import open_model
from cookbook.config.recipe import load_recipe
from cookbook.config.sections import AdapterSection
from cookbook.forecast.skeleton import skeleton
from cookbook.system.files import RecipeError
from cookbook.training.adapters import insertion
from cookbook.training.adapters.token_rows import fill
from cookbook.training.checkpoint.resume import changes
from cookbook.training.models import new_tokens
from cookbook.training.models.folder_facts import check_folder
from cookbook.training.models.grown import first_rows, grown_folder
from cookbook.training.models.language_model import load_config
from cookbook.training.models.loss import add_loss
from cookbook.training.models.structure import scratch_config
from cookbook.training.models.tokenizer_files import load_tokenizer, train_tokenizer
from tests.curves import ROOT, WORDS, Curve, Lab, distance, processes_of
from tests.experts import experts
from tests.target_grid import from_grid
from tests.test_resume import chain
from tests.turns import TRAINED, others_by_turn

NEW = ["<|tool|>", "<|think|>"]
LORA = {"adapter": "{name: lora, rank: 4}", "optim.learning_rate": "0.05"}
UNTIED = {"model.from_scratch.tie_word_embeddings": "false"}
KINDS = {
    "full": (UNTIED, ("ddp", "zero3", "fsdp2", "tp", "pp")),
    "tied": ({}, ("zero3", "fsdp2_tp")),
    "lora": (UNTIED | LORA, ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "tp", "pp", "fsdp2_tp")),
    "lora-dropout": (UNTIED | LORA | {"adapter": "{name: lora, rank: 4, dropout: 0.1}"}, ("zero3", "tp")),
    "tied-lora": (LORA, ("ddp", "zero3", "fsdp1", "fsdp2", "tp", "pp", "pp_tp_fsdp2")),
}
CASES: list[Any] = [(strategy, kind) for kind, (_, strategies) in KINDS.items() for strategy in strategies]
SELDOM = {"lora": ("ddp_tp", "hsdp_tp", "pp_fsdp2", "pp_tp_fsdp2"), "tied-lora": ("ddp_tp", "fsdp2_tp", "pp_tp")}
CASES += [pytest.param(name, kind, marks=pytest.mark.thorough) for kind, names in SELDOM.items() for name in names]


def write_rows(path: Path) -> list[dict[str, Any]]:
    """Chats in whose questions and answers the new tokens stand."""
    chance = random.Random(5)

    def words(most: int) -> str:
        return " ".join(chance.choice([*WORDS, *NEW]) for _ in range(chance.randint(1, most)))

    rows = [[("user", words(12)), ("assistant", words(40))] for _ in range(53)]
    chats = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return chats


def settings(lab: Lab, more: dict[str, str]) -> dict[str, str]:
    path = lab.folder / "new_tokens.jsonl"
    if not path.exists():
        write_rows(path)
    data = {"data.train": str(path), "data.eval": f"{{path: {path}, max_rows: 9}}", "data.special_tokens": "tokens"}
    return data | {"model.new_tokens": json.dumps(NEW)} | more


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kind"), CASES)
def test_every_strategy_trains_the_same_grown_model(lab: Lab, strategy: str, kind: str):
    asked = settings(lab, KINDS[kind][0])
    apart = distance(lab.run(strategy, asked, processes=processes_of(strategy)), lab.run("single", asked))
    assert apart.loss < 2e-5 and apart.norm < 1e-3 and apart.weight < 2e-5, apart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mistake", "kind"),
    [("tp", "rows_of_a_shard", "lora"), ("pp", "tied_gradients_not_added", "tied-lora")],
)
def test_rows_that_a_process_trains_by_itself_leave_the_curve(lab: Lab, strategy: str, mistake: str, kind: str):
    asked = settings(lab, KINDS[kind][0])
    run = lab.run(strategy, asked, processes=processes_of(strategy), sabotage=mistake)
    apart = distance(run, lab.run("single", asked))
    assert apart.loss > 1e-3, apart


def test_the_forecast_divides_embedding_and_head_under_trained_rows():
    words = ["model.new_tokens=[<a>, <b>]", "model.from_scratch.tie_word_embeddings=false", "adapter.name=lora"]
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", words)
    config = scratch_config(recipe.model.from_scratch)
    ends = [
        weight
        for weight in skeleton(config, recipe).weights
        if "embed_tokens" in weight.name or "lm_head" in weight.name
    ]
    size, width = config.vocab_size, config.hidden_size
    shapes = sorted((end.shape, end.is_trained, end.shard_dim) for end in ends)
    assert shapes == [((2, width), True, None)] * 2 + [((size, width), False, 0)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_expert_parallel_trains_the_rows_of_new_tokens(lab: Lab, tied: bool):
    asked = settings(lab, LORA) | experts(lab, tie_word_embeddings=tied)
    asked["model"] = asked["model"].replace("}", f", new_tokens: {json.dumps(NEW)}}}")
    del asked["model.new_tokens"]
    apart = distance(lab.run("fsdp2_ep", asked, processes=4), lab.run("single", asked))
    assert apart.loss < 2e-5 and apart.norm < 1e-3 and apart.weight < 2e-5, apart


@pytest.mark.slow
def test_a_run_with_trained_rows_goes_on_under_strategies_that_cut_them_otherwise(lab: Lab, tmp_path: Path):
    asked = settings(lab, UNTIED | LORA | {"optim.name": "adamw", "optim.learning_rate": "3e-3", "optim.eps": "1e-4"})
    curve = chain(lab, tmp_path, ["tp:2", "pp:2", "fsdp2_tp:4", "zero3:2", "tp:2", "single"], asked, num_steps=3)
    apart = distance(curve, lab.run("single", asked))
    assert apart.loss < 2e-5 and apart.norm < 1e-3, apart


def write_base(folder: Path, *, spare: int = 0, kind: type = LlamaConfig, **sizes: Any) -> Path:
    """A model of random weights, with rows beyond the tokens of its tokenizer."""
    tokenizer = train_tokenizer([" ".join(WORDS)] * 9, 400)
    own = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = kind(vocab_size=len(tokenizer) + spare, **shape, **own, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        if model.lm_head.bias is not None:
            torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(folder, max_shard_size="30KB")
    tokenizer.save_pretrained(folder)
    return folder


def by_hand(base: Path, *, multiple: int | None = 64) -> tuple[Any, Any]:
    """Model and tokenizer, grown by transformers, with each new row set to the mean."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    known = len(tokenizer)
    tokenizer.add_tokens(NEW, special_tokens=True)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    old = model.config.vocab_size
    if len(tokenizer) > old:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=multiple, mean_resizing=False)
    new = [*range(known, len(tokenizer)), *range(old, model.config.vocab_size)]
    ends = {id(p): p for end in (model.get_input_embeddings(), model.lm_head) for p in end.parameters()}
    for matrix in ends.values():
        matrix.data[new] = matrix.data[:known].mean(0)
    return model, tokenizer


SHAPES = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "with a biased head": {"kind": PhiConfig},
    "with spare rows": {"spare": 30},
    "with one spare row": {"spare": 1},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_grown_folder_is_what_transformers_resizes_with_each_new_row_the_mean(shape: str, tmp_path: Path):
    base = write_base(tmp_path / "base", **SHAPES[shape])
    expected, plain = by_hand(base)
    tokenizer = load_tokenizer(str(base), None, NEW)
    assert tokenizer.get_vocab() == plain.get_vocab()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in NEW}
    folder = Path(grown_folder(str(base), tokenizer, ids, cache=tmp_path / "cache"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == expected.config.vocab_size
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-7)
    links = [path for path in folder.iterdir() if path.is_symlink()]
    assert len(list(folder.glob("*.safetensors"))) > len(links) > 0  # only what has rows by token is written again
    assert grown_folder(str(base), tokenizer, ids, cache=tmp_path / "cache") == str(folder)


def test_a_folder_that_was_grown_for_other_tokens_or_weights_is_not_taken(tmp_path: Path):
    base = write_base(tmp_path / "base")

    def grown(new: list[str]) -> tuple[str, torch.Tensor]:
        tokenizer = load_tokenizer(str(base), None, new)
        ids = {token: tokenizer.convert_tokens_to_ids(token) for token in new}
        folder = grown_folder(str(base), tokenizer, ids, cache=tmp_path / "cache")
        return folder, AutoModelForCausalLM.from_pretrained(folder).lm_head.weight.detach()

    first, head = grown(NEW)
    many, larger = grown([*NEW, *(f"<|{number}|>" for number in range(64))])
    assert many != first and len(larger) == len(head) + 64
    (path,) = (path for path in base.glob("*.safetensors") if "lm_head.weight" in load_file(path))
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, path, metadata={"format": "pt"})
    again, other = grown(NEW)
    assert again != first
    torch.testing.assert_close(other, head + 1)


@pytest.mark.parametrize("kind", [LlamaConfig, Gemma3TextConfig])
def test_trained_rows_are_embedded_as_the_model_embeds_its_own(kind: type, tmp_path: Path):
    """Gemma multiplies what it looks up."""
    base = write_base(tmp_path / "base", kind=kind, tie_word_embeddings=True, head_dim=8)
    plain, ours = (AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval() for _ in range(2))
    new, ids = range(40, 42), torch.tensor([[41, 5, 6, 40, 39, 42]])
    row = torch.linspace(-1, 1, 32)
    with torch.no_grad():
        plain.get_input_embeddings().weight[new.start : new.stop] = row
        expected = plain(input_ids=ids).logits
        insertion.add_adapter(
            ours,
            AdapterSection(name="lora", rank=4, targets=["q_proj"]),
            seed=7,
            new_rows=new,
            first={"model.embed_tokens.weight": row},
        )
        logits = ours(input_ids=ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def losses_of(model: Any, tokenizer: Any, chats: list[dict[str, Any]], num_steps: int, rate: float) -> list[float]:
    """The curve of plain gradient descent over all rows at once, the loss a mean over the assistants' tokens."""
    losses = []
    for _ in range(num_steps):
        sums, count = [], 0
        for chat in chats:
            row = tokenizer.apply_chat_template(
                chat["messages"], return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
            )
            mask = torch.as_tensor(row["assistant_masks"]).view(-1)[1:].bool()
            logits = model(input_ids=row["input_ids"]).logits[0, :-1]
            sums.append(torch.nn.functional.cross_entropy(logits[mask], row["input_ids"][0, 1:][mask], reduction="sum"))
            count += int(mask.sum())
        loss = torch.stack(sums).sum() / count
        losses.append(loss.item())
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
                    parameter.grad = None
    return losses


def run_on(lab: Lab, base: Path, rate: float, more: dict[str, str]) -> tuple[Curve, list[dict[str, Any]]]:
    asked = settings(lab, more) | {
        "model": json.dumps({"name_or_path": str(base), "new_tokens": NEW}),
        "data.max_length": "200",
        "batch": "{global_batch_size: 53, micro_batch_size: 53}",
        "optim": f"{{name: sgd, learning_rate: {rate}, weight_decay: 0, momentum: 0, max_grad_norm: 0}}",
        "schedule": "{name: constant}",
        "run.max_steps": "4",
    }
    del asked["model.new_tokens"]
    chats = [json.loads(line) for line in Path(asked["data.train"]).read_text().splitlines()]
    return lab.run("single", asked), chats


@pytest.mark.slow
def test_the_curve_and_the_export_are_those_of_a_model_that_was_resized_by_hand(lab: Lab):
    base = write_base(lab.folder / "base_full")
    run, chats = run_on(lab, base, 0.5, {})
    model, tokenizer = by_hand(base)
    assert run.losses == pytest.approx(losses_of(model, tokenizer, chats, 4, 0.5), abs=1e-5)
    exported = AutoModelForCausalLM.from_pretrained(run.folder / "export")
    ids = AutoTokenizer.from_pretrained(run.folder / "export")("<|think|> the fox<|tool|>", return_tensors="pt")
    assert ids["input_ids"][0, 0] == tokenizer.convert_tokens_to_ids("<|think|>")
    torch.testing.assert_close(exported(**ids).logits, model(**ids).logits, rtol=0, atol=1e-4)
    for start in ("zero", "drawn"):  # negative control: the curve knows where the rows began
        other, _ = by_hand(base)
        rows = other.get_input_embeddings().weight.data[-64:]
        rows.zero_() if start == "zero" else rows.normal_(0, 0.02)
        assert losses_of(other, tokenizer, chats, 1, 0)[0] != pytest.approx(run.losses[0], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_trains_the_new_rows_as_peft_does_and_peft_opens_it_on_the_base(lab: Lab, tied: bool):
    from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model

    base = write_base(lab.folder / f"base_lora_{tied}", tie_word_embeddings=tied)
    run, chats = run_on(lab, base, 1.0, {"adapter": "{name: lora, rank: 4, targets: [q_proj, v_proj]}"})
    model, tokenizer = by_hand(base)
    rows = [tokenizer.convert_tokens_to_ids(token) for token in NEW]
    config = LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules=["q_proj", "v_proj"],
        trainable_token_indices=rows if tied else {"embed_tokens": rows, "lm_head": rows},
        task_type="CAUSAL_LM",
    )
    ours = AutoModelForCausalLM.from_pretrained(base)
    insertion.add_adapter(ours, AdapterSection(name="lora", rank=4, targets=["q_proj", "v_proj"]), seed=7)
    wrapped = get_peft_model(model, config)
    for name, parameter in ours.named_parameters():  # the first A, which the seed draws
        if "lora_A" in name:
            wrapped.get_parameter(f"base_model.model.{name}").data.copy_(parameter.data)
    assert run.losses == pytest.approx(losses_of(wrapped, tokenizer, chats, 4, 1.0), abs=2e-5)

    export, ids = run.folder / "export", torch.tensor([[rows[1], 5, 6, rows[0]]])
    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.resize_token_embeddings(len(tokenizer))
    opened = [PeftModel.from_pretrained(plain, export), AutoPeftModelForCausalLM.from_pretrained(export)]
    expected = wrapped(input_ids=ids).logits[..., : len(tokenizer)]
    for reread in opened:
        torch.testing.assert_close(reread(input_ids=ids).logits, expected, rtol=0, atol=1e-4)
    merge_adapter(run.folder, run.folder / "merged", "as-is")
    merged = AutoModelForCausalLM.from_pretrained(run.folder / "merged")(input_ids=ids).logits
    torch.testing.assert_close(merged[..., : len(tokenizer)], expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        open_model(export).model.cpu()(input_ids=ids).logits[..., : len(tokenizer)], expected, rtol=0, atol=1e-4
    )
    (line,) = evaluate_model(export, load_recipe(run.folder / "recipe.yaml", []))
    assert line["eval_loss"] == pytest.approx(run.evaluations[-1][1], abs=1e-5)


def test_tokens_that_cannot_be_new_are_refused(tmp_path: Path):
    base = write_base(tmp_path / "base")
    with pytest.raises(RecipeError) as refused:
        load_tokenizer(str(base), None, ["<|im_end|>", "<|new|>", "fox"])
    assert refused.value.mistakes == [
        "model.new_tokens has '<|im_end|>', which the tokenizer has already (id 2); take it out",
    ]
    wrong = {"[]": "is empty", "[a, a]": "twice", "['']": "an empty token", "[' a']": "white space"}
    for written, words in wrong.items():
        with pytest.raises(RecipeError, match=words):
            load_recipe(ROOT / "recipes/quickstart.yaml", [f"model.new_tokens={written}"])


def test_the_embedding_of_the_layers_has_a_row_for_each_new_token(tmp_path: Path):
    sizes = {"hidden_size_per_layer_input": 4, "num_kv_shared_layers": 0, "head_dim": 8, "global_head_dim": 8}
    base = write_base(tmp_path / "base", kind=Gemma4TextConfig, vocab_size_per_layer_input=500, **sizes)
    known, config = len(AutoTokenizer.from_pretrained(base)), load_config(str(base), 64)
    for count, expected in (
        (500 - known, nullcontext()),
        (501 - known, pytest.raises(RecipeError, match="for id 500")),
    ):
        new = [f"<{number}>" for number in range(count)]
        with expected:
            check_folder(base, config, load_tokenizer(str(base), None, new), new_tokens=new)


def test_a_head_with_a_bias_trains_no_rows_beside_an_adapter(tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(write_base(tmp_path / "base", kind=PhiConfig))
    with pytest.raises(RecipeError, match="the head of PhiForCausalLM has a bias"):
        insertion.add_adapter(model, AdapterSection(name="lora", targets=["q_proj"]), seed=7, new_rows=range(40, 42))


def test_a_run_is_not_resumed_with_other_tokens():
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", ["model.new_tokens=[<a>]"])
    was = load_recipe(ROOT / "recipes/quickstart.yaml", []).model_dump(mode="json", exclude_none=True)
    made = {"data": "d", "model": "m"}
    (mistake, *_), _ = changes({"recipe": was, "made_from": made}, recipe, made)
    assert mistake.startswith("model.new_tokens was not set when the checkpoint was made, and is ['<a>']")


REFUSED = {
    **dict.fromkeys(("codegen", "ctrl", "gptj", "phi"), "has a bias"),
    "inkling_text": "does more than look rows up",
}


@pytest.mark.parametrize("model_type", others_by_turn(TRAINED, ["gemma3n_text", "inkling_text", "xglm"]))
def test_rows_beside_an_adapter_have_the_gradients_that_they_have_without_one(model_type: str):
    config = tiny_config(model_type)
    whole = tiny_model(config)
    adapted = copy.deepcopy(whole)
    for model in (whole, adapted):
        add_loss(model)
    rows = range(config.vocab_size - 2, config.vocab_size)
    refused = REFUSED.get(model_type)
    with pytest.raises(RecipeError, match=refused) if refused else nullcontext():
        insertion.add_adapter(adapted, AdapterSection(name="lora", rank=2), seed=1, new_rows=rows)
    if refused:
        return
    wrapped = {name: module for name, module in adapted.named_modules() if isinstance(module, TrainableTokensWrapper)}
    first = {f"{name}.weight": whole.get_parameter(f"{name}.weight")[rows].detach() for name in wrapped}
    fill(adapted, first)
    ids = torch.randint(5, rows.stop, (2, 24), generator=torch.Generator().manual_seed(1))
    ids[:, ::3] = rows[1]
    losses = []
    for model in (whole, adapted):
        losses.append(model(input_ids=ids[:, :-1], **from_grid(ids[:, 1:])).sum())
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    is_tied = whole.get_input_embeddings().weight is whole.get_output_embeddings().weight
    assert len(wrapped) == 2 or is_tied
    for name, module in wrapped.items():
        if not (is_tied and name.endswith("head")):
            (delta,) = module.token_adapter.trainable_tokens_delta.values()
            torch.testing.assert_close(
                delta.grad, whole.get_parameter(f"{name}.weight").grad[rows], rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("model_type", ["deepseek_v4", "inkling_text", "moshi"])
def test_matrices_of_tokens_are_embedding_and_head_or_the_model_is_refused(model_type: str, tmp_path: Path):
    config = tiny_config(model_type)
    tiny_model(config).save_pretrained(tmp_path)
    if model_type == "inkling_text":
        assert first_rows(str(tmp_path), config, 3).keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    else:
        with pytest.raises(RecipeError, match="has a size by the vocabulary too"):
            first_rows(str(tmp_path), config, 3)


@pytest.mark.parametrize(
    ("grown", "told"), [(1024, "grow from 1,000 to 1,024 rows"), (1000, "have rows left for them")]
)
def test_a_note_says_whether_a_model_grows(grown: int, told: str):
    assert told in new_tokens.rows_note({"<a>": 998}, rows=1000, grown=grown)
