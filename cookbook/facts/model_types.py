"""Facts about each model type of transformers: model_types.json, a line a type. No torch.

    python benchmarks/architectures.py --types NAME

measures a type and writes its line. What no run can measure is a text in the line, which the command leaves as it is.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Fact = Literal[True] | str | None
"""True where a run showed it, else why it is not so. None where nobody knows, which is refused as a no is."""

TABLE = Path(__file__).with_suffix(".json")
COMMAND = "python benchmarks/architectures.py"


@dataclass(frozen=True)
class ModelType:
    """Facts about a model type, with the code of one version of transformers."""

    transformers: str | None = None
    """The version that it was measured with; None of a type without a line."""
    refused: str | None = None
    """Why it is not trained, where its configuration does not reveal it."""

    packed: Fact = None
    """A packed row gives each sample the loss that it has alone. No attribute of a model reveals where samples would
    mix, and nothing else would notice."""
    tp: Fact = None
    """Tensor parallel has the curve of one process. transformers has plans for more types: some leave matrices of
    experts' routers whole, and a whole weight between sharded ones gets a part of its gradient, as Apertus's
    activations do (the loss was off by 3e-4 after four steps, and nothing failed)."""
    sp: Fact = None
    """Sequence parallel has that curve: tokens meet in the packed attention alone, in all layers."""
    pp: Fact = None
    """A pipeline has it: between embedding and norm the code is the layers and nothing else. Gemma's scales the
    embeddings there, which each stage would repeat."""
    ep: Fact = None
    """Expert parallel has it."""

    has_state: bool = False
    """Layers carry a state along a row: linear attention, state space, convolutions. In a packed row such a layer runs
    on each sample by itself (cookbook/training/models/mixers.py)."""
    loops_over_tokens: bool = False
    """The code without kernels has a loop over the tokens of a row."""
    has_sinks: bool = False
    """The attention of packed rows has sinks, by transformers' code and not by a key of the configuration."""
    shares_layers: bool = False
    """Several layers hold one block of weights. torch refuses that of units of FSDP2."""
    logits: dict[str, Literal["cap", "times", "over"]] = field(default_factory=dict)
    """Keys of the configuration for what happens to the logits after the head, and what the forward does with them."""
    reads_weights: list[str] = field(default_factory=list)
    """Linear layers whose weights the model's code reads or changes by itself, past an adapter: for a kernel on a GPU,
    as a router, to clamp or to scale them. peft 0.21.2 refuses out_proj of some of these types (tuners_utils.py,
    _check_lora_target_modules_mamba)."""
    calls_in_4_bits: bool = False
    """The code calls these layers where the model is quantized."""

    language_part: Fact = None
    """The logits of text, by the type's own class with an image or audio tower, are those of its language part."""
    needs: str | None = None
    """A package with which transformers builds the towers, and which we do not install."""
    computes_as: str | None = None
    """The type that computes the same as this language part, which has no class of its own for text: the three
    positions of a text's token are one."""

    tiny: dict[str, Any] = field(default_factory=dict)
    """Values of a tiny model's configuration, where sizes have to suit one another or would leave a kind of layer out.
    """


TYPES = {name: ModelType(**facts) for name, facts in json.loads(TABLE.read_text(encoding="utf-8")).items()}


def look_up(model_type: str) -> ModelType:
    """The facts about a model type; none of one without a line."""
    return TYPES.get(model_type, ModelType())


def why_not(model_type: str, fact: Fact, unknown: str) -> str | None:
    """Why a fact is not so, or None if it is.

    Args:
        unknown: what to say where nobody knows.
    """
    return unknown + how_to_measure(model_type) if fact is None else None if fact is True else fact


def how_to_measure(model_type: str) -> str:
    """The end of a message that refuses or doubts a model type: how it gets its line, if it has none."""
    return "" if model_type in TYPES else f"; in a clone, `{COMMAND} --types {model_type}` measures it"
