"""`report`: a run as a page, or several laid over one another."""

from pathlib import Path
from typing import Annotated

from typer import Option

from cookbook.commands.report import pages
from cookbook.commands.report import summary as numbers
from cookbook.commands.shared.arguments import AsJson, run_folder
from cookbook.commands.shared.for_programs import answer
from cookbook.commands.shared.history import read_history
from cookbook.commands.shared.named_file import write_named_file
from cookbook.system.console import page, say
from cookbook.system.files import RecipeError
from cookbook.system.masking import mask_secrets

OUT = Option(metavar="FILE", help="default: report.html in the run's folder, compare.html beside the first of several")


def report(
    folders: Annotated[list[Path], run_folder("run.output_dir of a run; of several, to compare them")],
    *,
    out: Annotated[Path | None, OUT] = None,
    as_json: AsJson = False,
) -> int:
    """Show what a run did and write its page; or compare runs."""
    runs = [read_history(folder) for folder in folders]
    rows, best, farthest = [], None, None
    if len(runs) == 1:
        (folder,), (run,) = folders, runs
        summary = numbers.summarize(run)
        say(page(f"SUMMARY of {folder}", *summary.items()))
        path, text = out or folder / "report.html", pages.run_page(run, summary.items())
    else:
        if len(set(map(Path.resolve, folders))) < len(folders):
            raise RecipeError(f"{' '.join(map(str, folders))}: a run is named twice; name each once")
        summaries = list(map(numbers.measure, runs))
        rows, best = pages.differences(runs), numbers.best_run(summaries)
        say(page("WHAT DIFFERS", ("key", *map(str, folders), "affects"), *rows) if rows else "Nothing differs.")
        farthest = numbers.largest_loss_difference(runs)
        apart = None if farthest is None else numbers.difference_in_words(farthest, len(runs))
        if apart is not None:
            say(apart)
        if words := numbers.why_no_best(summaries) if best is None else best.words():
            say(words)
        path, text = out or folders[0].resolve().parent / "compare.html", pages.compare_page(runs, apart)
    write_named_file(path, mask_secrets(text), pages.BEGINNING)
    say(path)
    return answer(numbers.make_report(runs, rows, best and best.run, farthest, str(path))) if as_json else 0
