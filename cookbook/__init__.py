"""Parts of the recipe book. Imports point downwards only:

compose   cli  preview  rehearse  merge  publish  doctor  forecast  stages  shortage       (and train.py)
parts     engine  data  models  adapters  checkpoint  metrics      do not import one another
plan      plan  launch  combinations  library  child  explain  costs  ds_config  simulated_gpus   no torch
words     recipe  objectives  optim  schedule  row_kinds  registry  plugins                no torch
words     strategy  mesh  machine  gpus  hardware  files  digests  signals  status  lock  watch  faults no torch
"""

import logging

# Imported by peft and transformers, it tells every process without a GPU that a kernel could not be fetched.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
