"""`chat`: a conversation with a trained model, or its answers to single prompts."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from cookbook.commands.rounds.rounds_folder import Round
from cookbook.commands.shared.arguments import MODEL, positive, run_folder
from cookbook.commands.shared.find_model import find_model, find_run, quiet_without_gpus, recipe_of_run
from cookbook.rows.messages import Chat
from cookbook.rows.row_kinds import kinds
from cookbook.system.console import printable, say
from cookbook.system.files import RecipeError
from cookbook.system.record_files import read_lines

if TYPE_CHECKING:
    from cookbook.commands.shared.generation import Generator


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt without a conversation before it."""

    prompt: str | Chat
    tools: list[dict[str, Any]] | None = None
    reference: str | None = None
    """The answer of the row."""


def chat(
    folder: Annotated[Path, run_folder(MODEL)],
    *,
    prompt: Annotated[list[str] | None, Option(help="answer this and end; may be repeated")] = None,
    from_run: Annotated[
        int | None, Option(metavar="N", callback=positive, help="answer N held-out prompts of the run, and end")
    ] = None,
    system: Annotated[str | None, Option(help="system prompt")] = None,
    temperature: Annotated[float, Option(help="0: always the most probable token")] = 0.0,
    max_new_tokens: Annotated[int, Option(callback=positive)] = 512,
    compare: Annotated[bool, Option("--compare", help="the base model's answers as well")] = False,
) -> int:
    """Chat with a trained model, or let it answer prompts.

    Ctrl-C ends an answer; /reset forgets the conversation; /exit or Ctrl-D ends the chat.
    """
    if not 0 <= temperature <= 100:
        raise RecipeError(f"--temperature is {temperature}; write a number from 0 to 100")
    if from_run is not None and (prompt or system is not None):
        ignored = "--prompt" if prompt else "--system"
        raise RecipeError(f"{ignored} would be ignored beside --from-run; take one of them out")
    model = find_model(folder)
    questions = [] if from_run is None else list(islice(_prompts_of_run(folder), from_run))
    quiet_without_gpus()
    from cookbook.commands.shared import generation

    tuned = generation.open_model(model)
    if system is not None:
        tuned.check_system(system)
    generators: dict[str, Generator] = {"tuned": tuned}
    if compare:
        generators["base"] = generation.open_base(tuned, folder)
    device = tuned.model.device.type
    start: Chat = [] if system is None else [{"role": "system", "content": system}]
    is_chat = bool(tuned.tokenizer.chat_template)
    questions += [
        Question(prompt=[*start, {"role": "user", "content": text}] if is_chat else text) for text in prompt or ()
    ]
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    if questions:
        say(f"CHAT with {model} on {device}", file=sys.stderr)
        for question in questions:
            _answer(question, generators, options)
        return 0
    say(f"CHAT with {model} on {device}: /reset forgets the conversation, /exit ends", file=sys.stderr)
    if not is_chat:
        say("no chat template: each line is a text of its own, which the model continues", file=sys.stderr)
    _converse(start, generators, options)
    return 0


def _answer(question: Question, generators: dict[str, "Generator"], options: dict[str, Any]) -> None:
    from cookbook.commands.shared.generation import Printer

    say(f"--- prompt\n{printable(_as_text(question.prompt))}")
    for name, generator in generators.items():
        say(f"--- answer{f' of the {name} model' if len(generators) > 1 else ''}", flush=True)
        generator.generate(question.prompt, Printer(generator.tokenizer), tools=question.tools, **options)
    if question.reference is not None:
        say(f"--- reference\n{printable(question.reference)}")


def _converse(start: Chat, generators: dict[str, "Generator"], options: dict[str, Any]) -> None:
    """Answer the lines of the user, each model in a conversation of its own that begins with `start`."""
    from cookbook.commands.shared.generation import Printer

    chats: dict[str, Chat] = {name: list(start) for name in generators}
    for line in _lines():
        if line == "/exit":
            break
        if line == "/reset":
            chats = {name: list(start) for name in generators}
            continue
        for name, generator in generators.items():
            if len(generators) > 1:
                say(f"[{name}] ", end="", flush=True)
            messages: Chat = [*chats[name], {"role": "user", "content": line}]
            printer = Printer(generator.tokenizer)
            try:
                generator.generate(messages if generator.tokenizer.chat_template else line, printer, **options)
            except (KeyboardInterrupt, RecipeError) as error:
                if not _on_terminal():
                    raise
                printer.end()
                if isinstance(error, RecipeError):
                    say(error)
                    continue
            # After Ctrl-C too: the user has read the first part of the answer, and may ask about it.
            chats[name] = [*messages, {"role": "assistant", "content": printer.text}]


def _lines() -> Iterator[str]:
    """Lines that the user types, without empty ones."""
    if not _on_terminal():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    import readline  # noqa: F401  arrow keys and history for `input`

    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if line:
            yield line


def _on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _prompts_of_run(folder: Path) -> Iterator[Question]:
    """The prompts of the held-out rows of a run, with their answers (of a preference, the chosen one); of a run of
    rounds, which has none, what its first round asked.
    """
    from cookbook.training.data.sets import read_eval

    run = find_run(folder)
    if run is None:
        raise RecipeError(f"--from-run: {folder} is not a run, and has no rows; name a run.output_dir")
    if asked := read_lines(Round(run, 1).samples, "round"):
        yield from (Question(prompt=line["prompt"]) for line in asked)
        return
    recipe = recipe_of_run(run)
    sets = read_eval(recipe.data, recipe.objective)
    if not sets:
        raise RecipeError(f"--from-run: {run} has no held-out rows (neither data.eval nor data.holdout)")
    for rows in (rows for parts in sets.values() for rows in parts):
        kind = kinds()[rows.kind]
        for row in rows.rows:
            if kind.chats is not None:
                messages, _ = kind.chats(row)[0]
                last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
                # An answer may be nothing but calls of tools.
                reference = messages[last]["content"] or json.dumps(messages[last].get("tool_calls"))
                yield Question(prompt=messages[:last], tools=row.get("tools"), reference=reference)
                continue
            prompt, (answer, *_) = (None, ("",)) if kind.texts is None else kind.texts(row)
            if prompt is None:
                raise RecipeError(f"--from-run: held-out rows of {kind.words} have no prompt; write one with --prompt")
            yield Question(prompt=prompt, reference=answer)


def _as_text(prompt: str | Chat) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
