"""Facts about a model type that its tiny model shows, for its line in cookbook/facts/model_types.json."""

import ast
import contextlib
import functools
import inspect
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from benchmarks.tiny_models import tiny_config, tiny_model
from cookbook.facts.language_part import CAPS, SCALES, open_options
from cookbook.facts.model_types import TABLE, TYPES, look_up
from cookbook.training.adapters.adapted_layers import LINEAR
from cookbook.training.models.loss import add_loss
from cookbook.training.models.stateful_layers import try_two_samples
from tests.target_grid import from_grid
from tests.towers import FIRST_OF_IMAGES, whole_config, whole_model

ODD = {"cap": 2.0, "times": 0.3, "over": 1.7}
"""A change of the logits, with a value that no model has."""
EQUAL = 1e-4
"""Largest error of a token's loss, of models with large random weights."""
OPERATIONS = 5
"""Operations more for each token more, from which on the code has a loop over tokens. Such code has 12 to 104, other
code 3 at most, for its loops over chunks of 16 tokens."""
FROZEN = "transformers 5.23 loads weights that its code keeps frozen as if they were trained"


@contextlib.contextmanager
def assumed(model_type: str, **facts: Any) -> Iterator[None]:
    """While it is open, these facts are in the table of this process."""
    before = TYPES.get(model_type)
    TYPES[model_type] = replace(look_up(model_type), **facts)
    try:
        yield
    finally:
        TYPES.pop(model_type)
        TYPES.update({} if before is None else {model_type: before})


def of_causal(model_type: str) -> dict[str, Any]:
    """Facts about a causal language model that need no training."""
    model = tiny_model(tiny_config(model_type))
    return {
        "refused": FROZEN if any(not parameter.requires_grad for parameter in model.parameters()) else None,
        "loops_over_tokens": operations_of_a_token(model) > OPERATIONS,
        "has_sinks": "s_aux=" in code_of(model),  # an argument of the attention function
        "shares_layers": shares_layers(model),
        **reads_weights(model),
        "logits": logits(model_type),
        "has_state": bool(try_two_samples(tiny_config(model_type)).layers),
    }


class Operations(TorchDispatchMode):
    """Counts what torch computes."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations_of_a_token(model: PreTrainedModel) -> float:
    """How many operations a forward of more tokens has more, for each of them."""
    counts = []
    for length in (33, 65):
        with torch.no_grad(), Operations() as operations:
            model(input_ids=torch.arange(length)[None] + 3, use_cache=False)
        counts.append(operations.count)
    return (counts[1] - counts[0]) / 32


def code_of(model: PreTrainedModel) -> str:
    """The source of transformers' file for a model."""
    return inspect.getsource(sys.modules[type(model).__module__])


def shares_layers(model: PreTrainedModel) -> bool:
    """True if two of the layers that are gathered as a unit hold one weight."""
    units, owners = set(model._no_split_modules or ()), dict[int, str]()
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module).__name__ in units:
            for parameter in module.parameters():
                owner = owners.setdefault(id(parameter), name)
                if not name.startswith(owner):  # a unit may lie in another
                    return True
    return False


def reads_weights(model: PreTrainedModel) -> dict[str, Any]:
    """Linear layers whose weights the model's code reads past their forward, and whether it calls them in 4 bits."""
    linear = [name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, LINEAR)]
    linear = [name for name in dict.fromkeys(linear) if name != "lm_head"]
    reads = [(name, is_called) for name, is_called in _reads(ast.parse(code_of(model))) if name in linear]
    names = [name for name in linear if name in dict(reads)]
    return {"reads_weights": names, "calls_in_4_bits": bool(reads) and all(is_called for _, is_called in reads)}


def _reads(node: ast.AST, is_called: bool = False) -> Iterator[tuple[str, bool]]:
    """The names before `.weight` in a piece of code, each with whether the code calls that layer in 4 bits. A dtype or
    size is no weight, and a slice is for the pretraining_tp of Bloom, which no run has.
    """
    if isinstance(node, ast.FunctionDef) and node.name in ("_init_weights", "__init__"):
        return
    is_of_weight = isinstance(node, ast.Attribute | ast.Subscript) and _weight_of(node.value) is not None
    if is_of_weight and getattr(node, "attr", "shape") in ("dtype", "device", "shape"):
        return
    if name := _weight_of(node):
        yield name, is_called
    otherwise = node.orelse if isinstance(node, ast.If) and "_is_quantized" in ast.unparse(node.test) else []
    for child in ast.iter_child_nodes(node):
        yield from _reads(child, is_called or child in otherwise)


def _weight_of(node: ast.AST) -> str | None:
    """The name of the layer whose weight an expression is."""
    if isinstance(node, ast.Attribute) and node.attr == "weight" and isinstance(node.value, ast.Attribute):
        return node.value.attr
    return None


@torch.no_grad()
def error_of_padded_samples(config: PreTrainedConfig) -> float:
    """The largest difference of a token's loss, of models with large random weights, between our loss of padded samples
    and each alone through transformers' own model.
    """
    model, generator = tiny_model(config).eval(), torch.Generator().manual_seed(1)
    samples = [torch.randint(3, 512, (length + 1,), generator=generator) for length in (7, 1, 12, 3, 9, 40)]
    outputs = [model(input_ids=sample[None, :-1]).logits[0].float() for sample in samples]
    alone = [F.cross_entropy(*pair, reduction="none") for pair in zip(outputs, (s[1:] for s in samples), strict=True)]
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    ids, targets = pad([s[:-1] for s in samples]), pad([s[1:] for s in samples], padding_value=-100)
    add_loss(model)
    return float((model(input_ids=ids, **from_grid(targets)) - torch.cat(alone)).abs().max())


def logits(model_type: str) -> dict[str, str]:
    """Keys of the configuration that change the logits after the head, each with what gives transformers' losses."""
    changes: dict[str, str] = {}
    for key in (*CAPS, *SCALES):
        if not hasattr(tiny_config(model_type), key):
            continue
        for how in ["cap"] if key in CAPS else ["times", "over"]:
            config = tiny_config(model_type)
            with contextlib.suppress(AttributeError):  # MiniCPM3's is its width over dim_model_base
                setattr(config, key, ODD[how])
            with assumed(model_type, logits={**changes, key: how}):
                if error_of_padded_samples(config) < EQUAL:
                    changes[key] = how
    return changes


@torch.no_grad()
def of_tower(model_type: str) -> dict[str, Any]:
    """Facts about a model with an image or audio tower."""
    if find_spec(look_up(model_type).needs or "torch") is None:
        return {}
    try:
        far = distance_of_part(model_type, {})
        if far > EQUAL:
            return {"language_part": f"its logits lie {far:.0e} from those of its language part alone"}
        text = look_up(whole_config(model_type).get_text_config().model_type)
        kept = {key: how for key, how in text.logits.items() if distance_of_part(model_type, {key: ODD[how]}) < EQUAL}
        return {"language_part": True, "logits": kept}
    except Exception as error:
        return {"language_part": f"it fails: {type(error).__name__}: {error}"[:200]}


def distance_of_part(model_type: str, changes: dict[str, float]) -> float:
    """The largest difference of a logit between a model with a tower and its language part, each of its own class."""
    config = whole_config(model_type)
    for key, value in changes.items():
        setattr(config.get_text_config(), key, value)
    model, ids = whole_model(config), torch.randint(3, FIRST_OF_IMAGES, (1, 40))
    every = {key: "cap" if key in CAPS else "times" for key in changes}
    with tempfile.TemporaryDirectory() as folder, assumed(model_type, language_part=True, logits=every):
        model.save_pretrained(folder)
        options = open_options(folder)
        options |= {"dtype": torch.float32}
        part = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=False, use_safetensors=True, **options
        ).eval()
    expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return float((part(input_ids=ids).logits - expected).abs().max())


def line_of(old: dict[str, Any], facts: dict[str, Any], version: str) -> dict[str, Any]:
    """A type's line in the table: the new facts in the place of old ones. A text of the old line stays until somebody
    takes it out.
    """
    line = old | facts | {key: value for key, value in old.items() if isinstance(value, str)}
    line |= {} if line.get("packed") is True else {"has_state": False, "has_sinks": False}  # facts about packed rows
    return {key: value for key, value in line.items() if value not in (None, False, [], {})} | {"transformers": version}


def read_lines() -> dict[str, Any]:
    """The lines of the table."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def table(lines: dict[str, Any]) -> str:
    """The text of the table."""
    return (
        "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(line)}" for name, line in sorted(lines.items())) + "\n}"
    )
