"""Opens a trained model and generates answers, which are printed as they come. Imports torch."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.utils import logging

from cookbook.commands.shared.find_model import ADAPTER, check_base, find_run, is_adapter, name_of_base
from cookbook.facts.language_part import open_config, whole_config
from cookbook.facts.model_files import GENERATION, read_generation_config, read_tokenizer, values_of
from cookbook.facts.score_head import is_scored, with_head
from cookbook.rows.messages import Chat
from cookbook.run.publish.model_folder import MODEL_FILES
from cookbook.system.console import printable
from cookbook.system.files import RecipeError, first_line
from cookbook.training.adapters.adapter_files import check_fits
from cookbook.training.adapters.base_model import BASE_RECORD, Base
from cookbook.training.models import folder_facts
from cookbook.training.models.folder_facts import FolderFacts
from cookbook.training.models.language_model import check_finite
from cookbook.training.models.model_source import fetch_model


class Printer(TextStreamer):
    """Prints an answer as it is generated, and keeps its text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[arg-type]
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        print(printable(text), end="\n" if stream_end else "", flush=True)


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A model on its device, and its tokenizer."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    is_adapter: bool
    context: Callable[[], AbstractContextManager] = nullcontext
    """Entered while the model generates."""

    def generate(
        self,
        prompt: str | Chat,
        printer: Printer,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        """Generate an answer into `printer`.

        Args:
            prompt: a chat, for the chat template; or a text, which is continued.
            temperature: 0 takes the most probable token each time.
            tools: the tools that a chat may call.

        Raises:
            RecipeError: a prompt that leaves too few positions, or that the chat template refuses.
        """
        inputs = self._encode(prompt, tools)
        length = inputs["input_ids"].shape[1]
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and length + max_new_tokens > positions:
            raise RecipeError(
                f"the prompt has {length} tokens, and with --max-new-tokens {max_new_tokens} it would exceed the"
                f" model's {positions} positions; write a smaller number, or a shorter prompt (in a chat: /reset)"
            )
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        with self.context():
            self.model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=printer, **sampling)

    def check_system(self, system: str) -> None:
        """Check that the chat template writes a system prompt.

        Raises:
            RecipeError: it refuses the prompt or leaves it out, or there is no template.
        """
        if not self.tokenizer.chat_template:
            raise RecipeError("--system: the model has no chat template, so there is no place for it; take it out")
        chat = [{"role": "system", "content": system}, {"role": "user", "content": "a"}]
        ids = self._encode(chat)["input_ids"][0]
        if system.strip() not in self.tokenizer.decode(ids):
            raise RecipeError("--system: the model's chat template leaves it out; take it out")

    def _encode(self, prompt: str | Chat, tools: list[dict[str, Any]] | None = None) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask`, each (1, T) int64, on the device."""
        if isinstance(prompt, str):
            encoded = self.tokenizer(prompt, return_tensors="pt")
        else:
            options: Any = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            try:
                encoded = self.tokenizer.apply_chat_template(prompt, tools=tools, **options)
            except Exception as error:  # its own, or any of Python's: a template is a program
                raise RecipeError(f"the model's chat template refuses the chat: {first_line(error)}") from None
        rows = self.model.config.get_text_config().vocab_size
        if (most := int(encoded["input_ids"].max())) >= rows:
            raise RecipeError(f"the prompt has token {most}, but the model's embedding has {rows} rows; leave it out")
        # Some tokenizers return token types as well, which a causal model does not take.
        return {name: encoded[name].to(self.model.device) for name in ("input_ids", "attention_mask")}


def check_folder(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[str, FolderFacts]:
    """Compare what a Hugging Face folder says of itself, and if it is an adapter's, with its base.

    Returns:
        The folder with the weights of the whole model, and what it has.

    Raises:
        RecipeError: what does not agree.
    """
    base = str(folder)
    has_adapter = is_adapter(folder)
    if has_adapter:
        check_base(folder)
        base = fetch_model(name_of_base(folder), values_of(folder / ADAPTER).get("revision"))
    try:
        config = open_config(base)
    except RecipeError:
        raise
    except (OSError, ValueError) as error:
        raise RecipeError(f"{folder}: cannot be opened ({first_line(error)})") from None
    record = record_of(folder)
    new_tokens = record.new_tokens if record is not None else ()
    facts = folder_facts.check_folder(Path(base), config, tokenizer, place=base, new_tokens=new_tokens)
    if has_adapter and facts.num_embeddings is not None:
        config.vocab_size = facts.num_embeddings
        if record is not None and record.head is not None:
            config = with_head(config, record.head)
        check_fits(folder, config)
    return base, facts


def record_of(folder: Path) -> Base | None:
    """Read the record of an adapter's run on its base; None for a whole model, or another project's adapter."""
    is_ours = is_adapter(folder) and (folder / BASE_RECORD).is_file()
    return Base.read(folder) if is_ours else None


def open_model(folder: Path) -> Generator:
    """Open a Hugging Face folder, on the GPU if there is one. An adapter's base model comes from where it is recorded.

    Raises:
        RecipeError: weights or tokenizer are missing, or the base model is, or it is another.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # else transformers warns of each sampling setting that a greedy answer ignores
    has_adapter = is_adapter(folder)
    try:
        tokenizer = read_tokenizer(folder)
        base, _ = check_folder(folder, tokenizer)
        record = record_of(folder)
        if is_scored(open_config(base)) or (record is not None and record.head is not None):
            raise RecipeError(f"{folder}: its head scores texts and writes none; see `cookbook evaluate`")
        if record is not None and record.new_tokens:
            from cookbook.run.publish.merged import rebuild_base

            base = rebuild_base(base, folder, record)
        model = _open(base)
        if has_adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(folder))
    except RecipeError:
        raise
    except Exception as error:  # what a library raises over files that it did not expect
        raise RecipeError(f"{folder}: cannot be opened ({type(error).__name__}: {first_line(error)})") from None
    if os.path.lexists(folder / GENERATION):
        model.generation_config = read_generation_config(folder)
    return Generator(model=_to_device(model, folder), tokenizer=tokenizer, is_adapter=has_adapter)


def open_base(tuned: Generator, folder: Path) -> Generator:
    """The model before training: with an adapter the same one with the adapter switched off, else the one that the run
    recorded; with the tokenizer, template and generation settings of the tuned one.

    Raises:
        RecipeError: no record of a base model, or it cannot be opened.
    """
    if tuned.is_adapter:
        return replace(tuned, context=tuned.model.disable_adapter)
    run = find_run(folder)
    try:
        if run is None:
            raise FileNotFoundError("it is in no run's folder")
        base = Base.read(run / MODEL_FILES)
    except (OSError, ValueError, TypeError) as error:
        raise RecipeError(f"--compare: {folder} has no record of its base model ({first_line(error)})") from None
    if base.is_new:
        raise RecipeError(f"--compare: the model of {run} was trained from scratch and has no base; take it out")
    check_base(run / MODEL_FILES)
    try:
        base_folder = fetch_model(base.name_or_path, base.revision)
        folder_facts.check_folder(Path(base_folder), open_config(base_folder), place=base_folder)
        model = _open(base_folder)
    except RecipeError:
        raise
    except Exception as error:  # as above
        raise RecipeError(f"--compare: {base.name_or_path} cannot be opened ({first_line(error)})") from None
    model.generation_config = tuned.model.generation_config
    return replace(tuned, model=_to_device(model, base_folder))


def _open(folder: str) -> Any:
    """The whole model, with its tower if it has one."""
    kind: Any = AutoModelForCausalLM if whole_config(folder) is None else AutoModelForMultimodalLM
    return kind.from_pretrained(folder, dtype="auto", trust_remote_code=False, use_safetensors=True)


def _to_device(model: Any, folder: str | Path) -> Any:
    check_finite(model, folder)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
