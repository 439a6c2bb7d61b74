"""Stand-ins for a rehearsal: a few rows of the recipe's kind, and a tiny model of its architecture with a tokenizer."""

import copy
import json
import random
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count, islice
from pathlib import Path
from typing import Any

from cookbook.config.objectives import Objective
from cookbook.config.recipe import Recipe
from cookbook.config.sections import BUILTIN_SOURCE, Source
from cookbook.facts.attention_layers import attention_layers
from cookbook.facts.meshes import EXPERTS, EXPERTS_OF_A_TOKEN, size_of_experts
from cookbook.facts.model_files import read_tokenizer, why_not
from cookbook.facts.offline import hub_answers, known_kind, known_model
from cookbook.facts.tiny_types import LARGEST, OF_FILES, fixed_sizes, full_rows, small_default
from cookbook.rows.row_columns import MEANT, drop_columns
from cookbook.rows.row_kinds import BadRow, TextGenerator, columns, kinds
from cookbook.system.files import RecipeError, first_line
from cookbook.training.data.rows import Rows, read_rows, texts
from cookbook.training.data.sources import raw_rows

WORDS = "a model learns to write short answers from many rows of text and then stops at the end"


@dataclass(frozen=True)
class Notes:
    """Lines of the final report."""

    covered: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def few_rows(recipe: Recipe, num_rows: int, folder: Path, notes: Notes) -> tuple[list[Source], Rows, bool]:
    """Sources that replace `data.train`, rows of the first one, and whether all rows are the recipe's own.

    Local sources are limited to fewer rows; those of the Hub are read over the network, or made up without it.
    """
    sources, sample, made_up = [], None, []
    for i, source in enumerate(recipe.data.train):
        if source.path == BUILTIN_SOURCE or Path(source.path).exists():
            small = source.model_copy(update={"max_rows": num_rows})
        else:
            path = folder / f"train-{i}.jsonl"
            if hub_answers():
                raw = (row for _, row in islice(raw_rows(source, streaming=True), num_rows))
                read = {*columns(), *MEANT, *(source.columns or {}).values()}
                good = (drop_columns(row, source.ignore or ()) for row in raw if not isinstance(row, BadRow))
                rows = [{key: value for key, value in row.items() if key in read} for row in good]
                small = Source(path=str(path), weight=source.weight, columns=source.columns)
            else:
                made_up.append(source.path)
                small = Source(path=str(path), weight=source.weight)
                rows = synthetic_rows(known_kind(source.path) or recipe.objective.rows[0], num_rows)
                rows = with_names(rows, recipe.objective)
            write_jsonl(path, rows)
        sources.append(small)
        rows_read = read_rows(small, recipe.data.on_bad_row, recipe.objective)
        sample = sample or rows_read
    assert sample is not None
    described = f"rows of {sample.kind}" + (", packed" if recipe.data.is_packed else "")
    notes.covered.append(f"objective {recipe.objective.name} on {described}")
    if made_up:
        notes.missing.append(f"rows of {', '.join(dict.fromkeys(made_up))}: made up, since the Hub was not reached")
    if recipe.data.eval:
        notes.missing.append("the rows of data.eval: training rows stood in")
    return sources, sample, not made_up


def synthetic_rows(kind: str, count: int) -> list[dict[str, Any]]:
    """Made-up rows of a kind, the same at each call."""
    some = TextGenerator(random.Random(0), WORDS.split())
    return [kinds()[kind].made_up(some) for _ in range(count)]


def with_names(rows: list[dict[str, Any]], objective: Objective) -> list[dict[str, Any]]:
    """Rows to be read again, whose label is the name of a class: its number may be the name of another."""
    names = objective.class_names
    return [row | {"label": names[row["label"]]} for row in rows] if names else rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tiny_model(recipe: Recipe, rows: Rows, folder: Path, notes: Notes, *, least_layers: int = 2) -> bool:
    """Write a model of the recipe's architecture with two layers, or as many as a pipeline needs, and random weights.
    Returns whether its tokenizer is the recipe's own. A new model (from_scratch) is left to the run, which builds one
    from these few rows.
    """
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if recipe.model.from_scratch is not None:
        notes.covered.append("a new model of the recipe's own sizes")
        return False
    config, tokenizer, origin = _describe_model(recipe, rows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = small_model(config, tokenizer, least_layers)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    small = model.config
    tied = getattr(small, "tie_word_embeddings", False)
    notes.covered.append(
        f"{small.model_type} with {small.num_hidden_layers} layers, {_heads_in_words(small)},"
        f" {'tied' if tied else 'untied'} embeddings (after {origin})"
    )
    is_own = "offline_facts" not in origin
    if not is_own:
        notes.missing.append(f"the tokenizer of {recipe.model.name_or_path}: a small one stood in")
    return is_own


def write_tiny_teacher(model: Path, folder: Path, notes: Notes, *, seed: int) -> int:
    """Write a teacher for a tiny model: the same with other weights. Returns how many tokens it scores."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    read_tokenizer(model).save_pretrained(folder)
    notes.missing.append("the teacher: the small model stood in, with other weights")
    return config.vocab_size


def _describe_model(recipe: Recipe, rows: Rows) -> tuple[Any, Any, str]:
    """Configuration, tokenizer, and their origin."""
    from cookbook.training.models.structure import OFFLINE_FACTS, find_config, hub_options
    from cookbook.training.models.tokenizer_files import stand_in_tokenizer

    config, origin = find_config(recipe.model)
    name = recipe.model.name_or_path
    assert name is not None
    facts = known_model(name)
    try:
        tokenizer = read_tokenizer(name, **hub_options(recipe.model))
    except (OSError, ValueError) as error:
        if facts is None:
            raise RecipeError(f"model.name_or_path is {name!r}: {why_not('tokenizer', error)}") from None
        return config, stand_in_tokenizer(facts, texts(rows)), OFFLINE_FACTS.rpartition("/")[2]
    return config, tokenizer, f"{origin}, with its own tokenizer"


def small_model(config: Any, tokenizer: Any, least_layers: int) -> Any:
    """A model of random weights with the structure of a large one; where its sizes cannot be divided as most models'
    can, with fixed ones, and else with what transformers gives its type.

    Raises:
        RecipeError: transformers makes none of these.
    """
    import torch
    from transformers import AutoModelForCausalLM

    why = ""
    for make in (shrink, fixed_sizes, small_default):
        try:
            small = make(config, len(tokenizer), least_layers)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(small, name, getattr(tokenizer, name))
            with torch.device("meta"):
                size = AutoModelForCausalLM.from_config(copy.deepcopy(small)).num_parameters()
            if size > LARGEST:
                raise ValueError(f"{size:,} parameters are left")
            model = AutoModelForCausalLM.from_config(small)
            model(torch.arange(8)[None])  # what does not suit shows up in a product, in some models
            return model
        except Exception as error:  # any of a configuration's checks or a model's own code
            why = first_line(error)
    raise RecipeError(
        f"model of type {config.model_type}: a rehearsal makes a small one, and cannot: {why}\n"
        "Run three steps of the model itself: cookbook launch RECIPE --set run.max_steps=3"
    )


def _heads_in_words(config: Any) -> str:
    layers = attention_layers(config)
    if not layers:
        return "no attention"
    queries, keys = ({getattr(layer, name) for layer in layers} for name in ("num_heads", "num_key_heads"))
    return " and ".join(
        f"{' or '.join(map(str, sorted(sizes)))} {what}" for sizes, what in ((queries, "query"), (keys, "key heads"))
    )


INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "hidden_size_per_layer_input")
"""Keys for the widths of multilayer perceptrons, and of what Gemma adds in each layer."""


def shrink(config: Any, vocab_size: int, least_layers: int = 2) -> Any:
    """A small configuration of the same structure: what is shared, tied, biased or scaled stays so."""
    full = config.to_dict()
    heads = config.num_attention_heads
    kv_heads = full.get("num_key_value_heads") or heads
    head_dim = full.get("head_dim") or config.hidden_size // heads
    wide = Fraction(config.hidden_size, heads * head_dim)  # not 1 for some: Qwen3 has more heads than width
    small_kv_heads = min(kv_heads, 2)
    small_heads = small_kv_heads * (heads // kv_heads)
    # Widths of 16 bytes in bf16, as the product of many experts' matrices needs them.
    small_dim = next(dim for dim in count(16, 16) if (small_heads * dim * wide) % 8 == 0)
    hidden = int(small_heads * small_dim * wide)

    def narrow(size: int) -> int:
        return max(64, round(hidden * size / config.hidden_size / 64) * 64)

    kinds = full.get("layer_types")
    layers = max(2, least_layers, len(set(kinds or ())))
    values = dict(full)
    if kinds:
        values["layer_types"] = (list(dict.fromkeys(kinds)) * layers)[:layers]
    if "max_window_layers" in values:
        values["max_window_layers"] = layers
    values |= {
        "vocab_size": full_rows(vocab_size),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": small_heads,
        "num_key_value_heads": small_kv_heads,
        "dtype": "bfloat16",
    }
    if "head_dim" in values:
        values["head_dim"] = small_dim
    values |= {key: narrow(size) for key in INNER if isinstance(size := values.get(key), int) and size}
    if values.get("vocab_size_per_layer_input"):
        values["vocab_size_per_layer_input"] = values["vocab_size"]
    if by_layer := values.get("per_layer_config"):  # Gemma 4's heads are others in every sixth layer
        of_kind = {kinds[int(layer)]: sizes for layer, sizes in by_layer.items()}
        values["per_layer_config"] = {
            layer: {key: max(1, size * values[key] // full[key]) for key, size in of_kind[kind].items()}
            for layer, kind in enumerate(values["layer_types"])
            if kind in of_kind
        }
    # Twice as many as a token chooses are enough to choose from; any ep_size up to 8 divides the 16 of most.
    least = max(8, 2 * (size_of_experts(config, EXPERTS_OF_A_TOKEN) or 1))
    values |= {key: min(values[key], least) for key in EXPERTS if isinstance(values.get(key), int)}
    return type(config).from_dict({key: value for key, value in values.items() if key not in OF_FILES})
