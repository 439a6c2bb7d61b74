"""`sample`: a trained model's answers to single prompts."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from cookbook.commands.rounds.rounds_folder import Round
from cookbook.commands.shared.arguments import MODEL, positive, run_folder
from cookbook.commands.shared.find_model import find_model, find_run, quiet_without_gpus
from cookbook.config.recipe import load_recipe
from cookbook.rows.messages import Chat
from cookbook.rows.row_kinds import kinds
from cookbook.system.console import say, shown
from cookbook.system.files import RecipeError
from cookbook.system.record_files import read_lines

PROMPT = "Write `def get_name(self)`: Return the name."  # as cookbook/training/data/stdlib.py words it


def sample(
    folder: Annotated[Path, run_folder(MODEL)],
    *,
    prompt: Annotated[str | None, Option(help=f"default: {PROMPT}, of rounds their first one")] = None,
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
    quiet_without_gpus()
    from cookbook.commands.shared import generation

    generator = generation.open_model(found)
    say(f"SAMPLE from {found}")
    for asked, tools, reference in rows:
        say(f"\n--- prompt\n{shown(_as_text(asked))}\n--- answer")
        generator.generate(asked, generation.Printer(generator.tokenizer), max_new_tokens=max_new_tokens, tools=tools)
        say(f"--- reference\n{shown(reference)}")
    if from_eval is None:
        chat = _prompt_of_rounds(folder) if prompt is None else None
        if chat is None:
            text = PROMPT if prompt is None else prompt
            chat = [{"role": "user", "content": text}] if generator.tokenizer.chat_template else text
            say(f"\n{shown(text)}\n")
        else:
            say(f"\n{shown(_as_text(chat))}\n")
        generator.generate(chat, generation.Printer(generator.tokenizer), max_new_tokens=max_new_tokens)
    return 0


def _prompt_of_rounds(folder: Path) -> str | Chat | None:
    """What the first round of a run asked first, as it was asked; None of a run without rounds."""
    run = find_run(folder)
    lines = [] if run is None else read_lines(Round(run, 1).samples, "round")
    return lines[0]["prompt"] if lines else None


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
        prompt, (answer, *_) = (None, ("",)) if kind.texts is None else kind.texts(row)
        if prompt is None:
            raise RecipeError(f"--from-eval: held-out rows of {kind.words} have no prompt; write one with --prompt")
        yield prompt, None, answer


def _as_text(prompt: str | Chat) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
