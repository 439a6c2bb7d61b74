"""The small files of a model's folder, as transformers reads them. An error has the path and the reason, whatever is
wrong: a library waits for a pipe without end, and raises anything over what it did not expect.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cookbook.facts.model_types import look_up
from cookbook.system.files import RecipeError, first_line, kind_in_words, refuse
from cookbook.system.tensor_files import why_no_file

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files of which a tokenizer has one at least."""
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json")
SMALL = (CONFIG, GENERATION, *SETTINGS, "chat_template.json")
"""Files that hold keys and values."""
NUMBER, TEXT = (int, float), (str, dict)
KINDS: dict[str, dict[str, tuple[type, ...]]] = {
    "tokenizer_config.json": {
        "model_max_length": NUMBER,
        "tokenizer_class": (str,),
        **{f"{kind}_token": TEXT for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")},
    },
    GENERATION: {f"{kind}_token_id": (int, list) for kind in ("bos", "eos", "pad")},
    "adapter_config.json": {
        "peft_type": (str,),
        "r": (int,),
        "lora_alpha": NUMBER,
        "use_rslora": (bool,),
        "use_dora": (bool,),
        "target_modules": (str, list),
        "base_model_name_or_path": (str,),
        "revision": (str,),
    },
    "base_model.json": {
        "name_or_path": (str,),
        "revision": (str,),
        "sha256": (str,),
        "is_new": (bool,),
        "new_tokens": (dict,),
        "head": (dict,),
    },
}
"""Kinds of values that transformers and peft take unseen, and miss later; and those of our own record."""
DTYPES = ("float32", "bfloat16", "float16", "float64", "float", "half", "double")
"""Values for `dtype` of a configuration, which an export follows: torch's names of the dtypes that need no scales."""
MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 10_000),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 100_000),
}
"""Numbers of parts that transformers makes one by one, which takes hours for a mistyped one."""


def read_config(name: str | Path, **options: Any) -> Any:
    """`AutoConfig.from_pretrained`.

    Raises:
        RecipeError: the file is damaged.
        OSError, ValueError: as transformers, if there is none.
    """
    from transformers import AutoConfig

    with _name_file_in_errors(name, [CONFIG]):
        return AutoConfig.from_pretrained(name, trust_remote_code=False, **options)


def read_tokenizer(name: str | Path, **options: Any) -> Any:
    """`AutoTokenizer.from_pretrained`, with the rules of a folder's tokenizer.json; raises as `read_config`."""
    from transformers import AutoTokenizer

    from cookbook.facts.tokenizer_rules import read_alike

    with _name_file_in_errors(name, TOKENIZER, *SETTINGS, *TEMPLATES, CONFIG):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
        return read_alike(tokenizer, Path(name))


def read_generation_config(folder: str | Path) -> Any:
    """`GenerationConfig.from_pretrained`; raises as `read_config`."""
    from transformers import GenerationConfig

    with _name_file_in_errors(folder, [GENERATION]):
        return GenerationConfig.from_pretrained(folder)


def generation_settings(folder: Path) -> Any:
    """The settings that a model's folder proposes for generation, in a file of their own or in its configuration.

    Raises as `read_config`.
    """
    from transformers import GenerationConfig

    if (folder / GENERATION).is_file():
        return read_generation_config(folder)
    is_there = (folder / CONFIG).is_file()
    return GenerationConfig.from_model_config(read_config(folder)) if is_there else GenerationConfig()


def end_tokens(settings: Any, tokenizer: Any) -> list[int]:
    """The tokens that end an answer, by the tokenizer and by `generation_settings`."""
    proposed = settings.eos_token_id
    ends = [tokenizer.eos_token_id, *(proposed if isinstance(proposed, list) else [proposed])]
    return sorted({token for token in ends if token is not None})


@contextmanager
def _name_file_in_errors(folder: str | Path, needed: Sequence[str], *others: str) -> Iterator[None]:
    """Name the file in the errors of a library that reads files of a folder, or of a model on the Hub.

    Args:
        needed: files of which one at least is there.
    """
    there = [path for name in (*needed, *others) if os.path.lexists(path := Path(folder, name))]
    for path in there:
        _check(path)
    try:
        yield
    except BaseException as error:
        # Of those that are no Exception, others are a library's: a panic of Rust in tokenizers.
        if isinstance(error, RecipeError | KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        if isinstance(error, OSError | ValueError) and not any(path.name in needed for path in there):
            raise
        files = " with ".join(path.name for path in there[:2]) or needed[0]
        raise RecipeError(f"{Path(folder, files)}: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    """Why transformers did not read a file, and what to do where that follows."""
    from transformers import __version__

    if "trust_remote_code" in str(error):
        return "it contains custom code, which is not run here; take a model that transformers reads by its own code"
    if "does not recognize this architecture" in str(error):
        named = re.search(r"model type `(.+?)`", str(error))
        if named and (measured := look_up(named[1]).transformers):
            what = f"transformers {__version__} has no model_type {named[1]!r}, and {measured} has"
            return f"{what}; install that, or take a model of another type"
        return f"transformers {__version__} has no such model_type; correct it, or take a model of one that it has"
    return f"transformers cannot read it ({type(error).__name__}: {first_line(error)})"


def values_of(path: Path) -> dict[str, Any]:
    """The keys and values of a small file.

    Raises:
        RecipeError: what lies there is no file that can be read, or no JSON, or no keys and values, or has a value of
            another kind.
    """
    try:
        why = why_no_file(path)
        if why is None:
            values = json.loads(path.read_text(encoding="utf-8-sig"))
            if isinstance(values, dict):
                refuse([f"{path}: {odd}; fetch it again, or correct it" for odd in _odd_values(path.name, values)])
                return values
            why = f"holds {kind_in_words(values)}, and should hold keys and values"
    except RecipeError:
        raise
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        why = f"is no JSON ({first_line(error)})" if path.stat().st_size else "is empty"
    raise RecipeError(f"{path}: {why}; fetch it again, or correct it")


def _check(path: Path) -> None:
    """
    Raises:
        RecipeError: what lies there is no file that can be read, or its values are of another kind.
    """
    if path.name in SMALL:
        values_of(path)
        return
    try:
        why = why_no_file(path)
        if why is None and path.suffix == ".jinja":
            path.read_text(encoding="utf-8")
        elif why is None:
            path.open("rb").close()
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read ({first_line(error) if isinstance(error, ValueError) else error.strerror})"
    if why is not None:
        raise RecipeError(f"{path}: {why}; fetch it again, or correct it")


def why_not(what: str, error: Exception) -> str:
    """Why a model's configuration or tokenizer was not opened, after the place that names the model."""
    if isinstance(error, RecipeError):
        return str(error)
    way = f"; lay {TOKENIZER[0]} and {SETTINGS[0]} of the model there" if what == "tokenizer" else ""
    return f"no {what} there ({first_line(error)}){way}"


def _odd_values(name: str, values: dict[str, Any]) -> list[str]:
    mistakes = [
        f"{key} is {kind_in_words(value)}, which it cannot be"
        for key, kinds in KINDS.get(name, {}).items()
        if (value := values.get(key)) is not None
        and not (isinstance(value, kinds) and isinstance(value, bool) <= (bool in kinds) and _is_finite(value))
    ]
    if name == CONFIG:
        # Those of a model with towers. How weights are quantized says nothing of the model's sizes.
        parts = (part for key, part in values.items() if isinstance(part, dict) and key != "quantization_config")
        for part in (values, *parts):
            mistakes += [
                f"{key} is {part[key]:,}, more than any model has"
                for key, most in MOST.items()
                if isinstance(part.get(key), int) and part[key] > most
            ]
            mistakes += [
                f"{key} is {part[key]!r:.40}, and should be float32, bfloat16 or float16"
                for key in ("dtype", "torch_dtype")
                if part.get(key) not in (None, *DTYPES)
            ]
            mistakes += [
                f"{key} is {value}, and should be at least 0 and less than 1"
                for key, value in part.items()
                if key.endswith(("dropout", "pdrop")) and isinstance(value, float) and not 0 <= value < 1
            ]
    return mistakes


def _is_finite(value: Any) -> bool:
    """False of the NaN and Infinity that Python reads in JSON."""
    return not isinstance(value, float) or math.isfinite(value)
