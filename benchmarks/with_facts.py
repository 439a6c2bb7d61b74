"""Runs train.py with facts about a model type that the table does not have yet: with_facts.py TYPE FACTS [more]."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import train
from cookbook.facts.model_types import TYPES, ModelType

if __name__ == "__main__":
    model_type, facts = sys.argv[1:3]
    del sys.argv[1:3]
    TYPES[model_type] = ModelType(**json.loads(facts))
    sys.exit(train.main())
