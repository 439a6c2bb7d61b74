"""Parts of the recipe book, a folder for each room. Imports point downwards only:

commands        what users call: a file or folder for each verb
run             what train.py calls: stages, services, samples, shortage of memory, publishing
forecast        memory, time and price of a run, before it is started
training        what train.py is made of; the parts of this room do not import one another
start           the start of a run, without torch: launchers, hosts, the plan of processes, refusals
facts           what is known of models before one is loaded: files, types, meshes, stages
config          what users write, with the mathematics of what has a name
rows            rows of data: kinds, columns, messages, mistakes
system          the machine, its processes and files

A run imports nothing of `commands`, and of `forecast` only what `run/forecasts.py` asks for, when it asks.
"""

import sys
from importlib.util import find_spec

for name in ("filelock", "pydantic", "typer"):
    if find_spec(name) is None:  # another Python than that of .venv
        print(f"{sys.executable} has no {name}; first: source .venv/bin/activate (docs/install.md)", file=sys.stderr)
        sys.exit(2)
