"""Words of a recipe that become an argument or an address of another program, and what each of them may be. No torch.

The imports that a recipe names are those of `plugins` alone. All other texts of a recipe are paths that this package
opens, or values that it compares or trains on.
"""

import re
import shlex
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator

TRANSFORMERS, VLLM = "transformers", "vllm"
OWN_OPTIONS = {"--host", "--port", "--uds", "--model", "--served-model-name", "--max-model-len", "--api-key"}
"""Options of `vllm serve` for where it is, what it serves and how long; a key comes from VLLM_API_KEY."""
VLLM_OPTIONS = {
    "--async-scheduling",
    "--attention-backend",
    "--block-size",
    "--cpu-offload-gb",
    "--data-parallel-size",
    "--disable-custom-all-reduce",
    "--disable-log-stats",
    "--dtype",
    "--enable-chunked-prefill",
    "--enable-expert-parallel",
    "--enable-lora",
    "--enable-prefix-caching",
    "--enforce-eager",
    "--gpu-memory-utilization",
    "--kv-cache-dtype",
    "--kv-cache-memory-bytes",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--num-gpu-blocks-override",
    "--pipeline-parallel-size",
    "--quantization",
    "--swap-space",
    "--tensor-parallel-size",
}
"""Options of `vllm serve` that load no code, no file and no settings: of memory, speed and how GPUs share the model.
vLLM 0.32.0; with one that is not here it might import a module, as by --middleware. `--no-NAME` turns NAME off."""
PLAIN_VALUE = re.compile(r"[\w-]+|\d+\.\d+")
"""A number or a word, and so no path, no module, no address and no JSON."""
REVISION = re.compile(r"\w[\w./+-]*")
NAME_IN_DATASET = re.compile(r"[^/\\:.-][^/\\:]*")
SPLIT = re.compile(r"[^\\.-][^\\]*")


def is_address(sampler: str) -> bool:
    """Return whether `rounds.sampler` is the address of a server, or several."""
    return sampler.startswith(("http://", "https://", "unix:"))


def addresses(sampler: str) -> list[str]:
    """The addresses of servers that `rounds.sampler` has."""
    return sampler.split(" ") if is_address(sampler) else []


def has_adapters(sampler: str) -> bool:
    """Return whether `rounds.sampler` is a vLLM that is started once, and gets the adapter of each round."""
    return not is_address(sampler) and "--enable-lora" in shlex.split(sampler.replace("_", "-"))


def _join_addresses(sampler: Any) -> Any:
    if isinstance(sampler, list) and all(isinstance(word, str) for word in sampler):
        for address in sampler:
            _check_address(address)
        return " ".join(sampler)
    return sampler


def _check_sampler(sampler: str) -> str:
    if is_address(sampler):
        for address in (words := addresses(sampler)):
            _check_address(address)
            if words.count(address) > 1:
                raise ValueError(f"has {address} twice; name each server once")
        return sampler
    try:
        first, *options = shlex.split(sampler) or [""]
    except ValueError as error:
        raise ValueError(f"is {sampler!r}: {error}") from None
    if first != VLLM and sampler != TRANSFORMERS:
        raise ValueError(
            f"is {sampler!r}; write transformers, vllm (with options of `vllm serve` after it), or the address of a"
            " server, as http://localhost:8000 or unix:/run/vllm"
        )
    _check_options(options)
    return sampler


def _check_address(sampler: str) -> None:
    try:
        address = urlsplit(sampler)
        is_whole = bool(address.hostname) and (address.port is None or address.port > 0)
        if address.scheme == "unix":
            is_whole = not address.netloc and address.path.startswith("/") and not address.query + address.fragment
    except ValueError:
        address, is_whole = urlsplit(""), False
    if not is_whole or not is_address(sampler) or not sampler.isprintable() or " " in sampler:
        raise ValueError(f"is {sampler!r}; write the address of a server, as http://localhost:8000 or unix:/run/vllm")
    if address.username is not None:
        raise ValueError("has a name or a password in its address; take it out, and give the server's VLLM_API_KEY")


def _check_options(words: list[str]) -> None:
    if words and not words[0].startswith("-"):
        raise ValueError(f"has {words[0]!r} after vllm; only options come there: the model is each round's")
    for word in words:
        option, equals, value = word.partition("=")
        if not option.startswith("-"):
            option, value = "", word
        name = option.replace("_", "-")
        if name in OWN_OPTIONS:
            raise ValueError(f"has {option}, which rounds give to `vllm serve` themselves; take it out")
        if name and name not in VLLM_OPTIONS and name.replace("--no-", "--", 1) not in VLLM_OPTIONS:
            raise ValueError(
                f"has {option}, and with an option that is not known here vLLM might load code or a file; start the"
                " server yourself, and write its address"
            )
        if (equals or not option) and not PLAIN_VALUE.fullmatch(value):
            raise ValueError(f"has {value!r}; a value of its options is a number or one plain word")


def _check_revision(text: str) -> str:
    if not REVISION.fullmatch(text) or ".." in text:
        raise ValueError(f"is {text!r}; write a commit, tag or branch, as main or refs/pr/1")
    return text


def _check_name_in_dataset(text: str) -> str:
    if not NAME_IN_DATASET.fullmatch(text) or not text.isprintable():
        raise ValueError(f"is {text!r}; write the name of a configuration, as wikitext-2-raw-v1")
    return text


def _check_split(text: str) -> str:
    if not SPLIT.fullmatch(text) or ".." in text or "//" in text or not text.isprintable() or text.startswith("/"):
        raise ValueError(f"is {text!r}; write the name of a split, as train")
    return text


Sampler = Annotated[
    str, AfterValidator(_check_sampler), BeforeValidator(_join_addresses, json_schema_input_type=str | list[str])
]
"""`transformers`, `vllm` with arguments of `vllm serve`, or addresses, with a blank between them if not a list."""
Revision = Annotated[str, AfterValidator(_check_revision)]
"""A part of an address of the Hub."""
NameInDataset = Annotated[str, AfterValidator(_check_name_in_dataset)]
"""An argument of the library `datasets`, which has folders of this name in its cache."""
Split = Annotated[str, AfterValidator(_check_split)]
"""An argument of `datasets`, and a folder's or file's name."""
