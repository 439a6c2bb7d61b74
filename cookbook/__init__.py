"""Parts of the recipe book, a folder for each layer. Imports point downwards only:

commands   what users call, train.py's stages among them
training   what train.py is made of; the parts of this layer do not import one another
planning   what follows from a recipe and a strategy, without torch
config     what users write
system     the machine, its processes and files
"""

import logging

from cookbook.system.imports import hide_torchao

hide_torchao()
# Imported by peft and transformers, it warns in every process without a GPU that a kernel could not be fetched.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
