"""Trains a recipe as `train.py` does, and forecasts its memory on the main process alone, as a run on GPUs does.

python tests/forecast_within.py RECIPE [--set ...]
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import train
from cookbook.config.recipe import load_recipe
from cookbook.training.engine import Engine

prepare = Engine.prepare


def prepare_and_forecast(engine: Engine, model: Any, optimizer: Any, **options: Any) -> None:
    prepare(engine, model, optimizer, **options)
    if engine.is_main:
        from cookbook.forecast.verdict import of_run

        assignments = [sys.argv[i + 1] for i, word in enumerate(sys.argv) if word == "--set"]
        recipe = load_recipe(Path(sys.argv[1]), assignments)
        print("forecast", of_run(model.config, recipe, engine.strategy, engine.plan, None).allocated, file=sys.stderr)


if __name__ == "__main__":
    Engine.prepare = prepare_and_forecast  # type: ignore[method-assign]
    sys.exit(train.main())
