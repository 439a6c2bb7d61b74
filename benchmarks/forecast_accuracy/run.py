"""How far the forecast is from what was measured, by others and on simulated GPUs.

    python benchmarks/forecast_accuracy/run.py published     memory, of published runs: docs/plan_accuracy.md
    python benchmarks/forecast_accuracy/run.py frameworks    speed and memory, of frameworks in 2026, on the same page
    python benchmarks/forecast_accuracy/run.py reports       verdict and speed, of single runs that people reported, and
                                                             of those that failed, on the same page
    python benchmarks/forecast_accuracy/run.py sampling      seconds of sampling, on the same page
    python benchmarks/forecast_accuracy/run.py at-scale      speed, as machines double and of published runs of several:
                                                             docs/at_scale.md
    python benchmarks/forecast_accuracy/run.py simulated     memory, of every strategy on simulated GPUs: the table of
                                                             docs/simulated_gpus.md

In two minutes, eight, two, six, one, and half an hour and more on two cores. Each writes its figures into the folder
`results`, and then its page; with `--page` the page alone, from the figures that are there.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.forecast_accuracy import at_scale, frameworks, published, reports, sampling, simulated

MODULES = {
    "published": published,
    "frameworks": frameworks,
    "reports": reports,
    "sampling": sampling,
    "at-scale": at_scale,
    "simulated": simulated,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in MODULES.items():
        command = commands.add_parser(name, help=str(module.__doc__).partition("\n")[0])
        command.add_argument("--page", action="store_true", help="write the page again from the results")
        if module is simulated:
            simulated.add_arguments(command)
    arguments = parser.parse_args()
    if arguments.command == "simulated":
        simulated.main(arguments)
    else:
        MODULES[arguments.command].main(only_page=arguments.page)


if __name__ == "__main__":
    main()
