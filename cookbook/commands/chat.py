"""A chat with a trained model, and its answers to single prompts."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from cookbook.commands.shared.arguments import MODEL, positive, run_folder
from cookbook.commands.shared.find_model import find_model, quiet_without_gpus
from cookbook.rows.messages import Chat
from cookbook.system.console import say
from cookbook.system.files import RecipeError

if TYPE_CHECKING:
    from cookbook.commands.shared.generation import Generator


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
    quiet_without_gpus()
    from cookbook.commands.shared import generation

    tuned = generation.open_model(found)
    if system is not None:
        tuned.check_system(system)
    generators: dict[str, Generator] = {"tuned": tuned}
    if compare:
        generators["base"] = generation.open_base(tuned, folder)
    device = tuned.model.device.type
    say(f"CHAT with {found} on {device}: /reset forgets the conversation, /exit ends", file=sys.stderr)
    if not tuned.tokenizer.chat_template:
        say("no chat template: each line is a text of its own, which the model continues", file=sys.stderr)
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
                say(f"[{name}] ", end="", flush=True)
            asked: Chat = [*chats[name], {"role": "user", "content": line}]
            printer = generation.Printer(generator.tokenizer)
            prompt = asked if generator.tokenizer.chat_template else line
            try:
                generator.generate(prompt, printer, max_new_tokens=max_new_tokens, temperature=temperature)
            except (KeyboardInterrupt, RecipeError) as error:
                if not _on_terminal():
                    raise
                printer.end()
                if isinstance(error, RecipeError):
                    say(error)
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
