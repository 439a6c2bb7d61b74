"""A chat with a trained model, and its answers to single prompts."""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from cookbook.commands.arguments import MODEL, positive, run_folder
from cookbook.commands.exported import find_model, find_run
from cookbook.config.messages import Chat
from cookbook.config.recipe import load_recipe
from cookbook.config.row_kinds import kinds
from cookbook.system.files import RecipeError
from cookbook.system.imports import quiet_deepspeed
from cookbook.system.machine import num_gpus

if TYPE_CHECKING:
    from cookbook.commands.generate import Generator

PROMPT = "Write `def get_name(self)`: Return the name."  # as cookbook/training/data/stdlib.py words it


def chat(
    folder: Annotated[Path, run_folder(MODEL)],
    *,
    system: Annotated[str | None, Option(help="system prompt")] = None,
    temperature: Annotated[float, Option(help="0: always the most probable token")] = 0.0,
    max_new_tokens: Annotated[int, Option(callback=positive)] = 512,
    compare: Annotated[bool, Option("--compare", help="the base model's answers as well")] = False,
) -> int:
    """Chat with a trained model; without a terminal, by lines.

    Ctrl-C ends an answer; /reset forgets the conversation; /exit or Ctrl-D ends the chat.
    """
    if not 0 <= temperature <= 100:
        raise RecipeError(f"--temperature is {temperature}; write a number from 0 to 100")
    found = find_model(folder)
    generate = load_machinery()
    tuned = generate.open_model(found)
    if system is not None:
        tuned.check_system(system)
    generators: dict[str, Generator] = {"tuned": tuned}
    if compare:
        generators["base"] = generate.open_base(tuned, folder)
    device = tuned.model.device.type
    print(f"CHAT with {found} on {device}: /reset forgets the conversation, /exit ends", file=sys.stderr)
    if not tuned.tokenizer.chat_template:
        print("no chat template: each line is a text of its own, which the model continues", file=sys.stderr)
    start: Chat = [] if system is None else [{"role": "system", "content": system}]
    chats: dict[str, Chat] = {name: list(start) for name in generators}
    for line in _lines():
        if line == "/exit":
            break
        if line == "/reset":
            chats = {name: list(start) for name in generators}
            continue
        for name, generator in generators.items():
            if compare:
                print(f"[{name}] ", end="", flush=True)
            asked: Chat = [*chats[name], {"role": "user", "content": line}]
            printer = generate.Printer(generator.tokenizer)
            prompt = asked if generator.tokenizer.chat_template else line
            try:
                generator.generate(prompt, printer, max_new_tokens=max_new_tokens, temperature=temperature)
            except (KeyboardInterrupt, RecipeError) as error:
                if not _on_terminal():
                    raise
                printer.end()
                if isinstance(error, RecipeError):
                    print(error)
                    continue
            chats[name] = [*asked, {"role": "assistant", "content": printer.text}]
    return 0


def _lines() -> Iterator[str]:
    """What the user types, less empty lines."""
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


def sample(
    folder: Annotated[Path, run_folder(MODEL)],
    *,
    prompt: Annotated[str | None, Option(help=f"default: {PROMPT}")] = None,
    from_eval: Annotated[
        int | None, Option(callback=positive, help="the run's first N held-out rows, with their reference answers")
    ] = None,
    max_new_tokens: Annotated[int, Option(callback=positive)] = 100,
) -> int:
    """Let a trained model answer prompts, without sampling."""
    if prompt is not None and from_eval is not None:
        raise RecipeError("--prompt would be ignored beside --from-eval; take one of them out")
    found = find_model(folder)
    rows = [] if from_eval is None else list(_held_out_prompts(folder, from_eval))
    generate = load_machinery()
    generator = generate.open_model(found)
    print(f"SAMPLE from {found}")
    for asked, tools, reference in rows:
        print(f"\n--- prompt\n{_as_text(asked)}\n--- answer")
        generator.generate(asked, generate.Printer(generator.tokenizer), max_new_tokens=max_new_tokens, tools=tools)
        print(f"--- reference\n{reference}")
    if from_eval is None:
        prompt = PROMPT if prompt is None else prompt
        print(f"\n{prompt}\n")
        chat = [{"role": "user", "content": prompt}] if generator.tokenizer.chat_template else prompt
        generator.generate(chat, generate.Printer(generator.tokenizer), max_new_tokens=max_new_tokens)
    return 0


def load_machinery() -> Any:
    """`cookbook.commands.generate`, which imports torch."""
    if not num_gpus():
        quiet_deepspeed()
    from cookbook.commands import generate

    return generate


def _held_out_prompts(folder: Path, count: int) -> Iterator[tuple[str | Chat, Any, str]]:
    """Prompt, tools and reference answer of the first held-out rows of a run; of a preference, its chosen answer."""
    from cookbook.training.data.sets import read_eval

    run = find_run(folder)
    if run is None:
        raise RecipeError(f"--from-eval: {folder} is no run's, which alone has held-out rows; name a run.output_dir")
    recipe = load_recipe(run / "recipe.yaml")
    sets = read_eval(recipe.data, recipe.objective)
    if not sets:
        raise RecipeError(f"--from-eval: {run} has no held-out rows (neither data.eval nor data.holdout)")
    rows = ((kinds()[part.kind], row) for parts in sets.values() for part in parts for row in part.rows)
    for kind, row in islice(rows, count):
        if kind.chats is not None:
            chat, _ = kind.chats(row)[0]
            last = max(i for i, message in enumerate(chat) if message["role"] == "assistant")
            reference = chat[last]["content"] or json.dumps(chat[last].get("tool_calls"))
            yield chat[:last], row.get("tools"), reference
            continue
        assert kind.texts is not None
        prompt, (answer, *_) = kind.texts(row)
        if prompt is None:
            raise RecipeError(f"--from-eval: held-out rows of {kind.words} have no prompt; write one with --prompt")
        yield prompt, None, answer


def _as_text(prompt: str | Chat) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
