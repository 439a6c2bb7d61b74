"""From a source of rows to the batches of one process:

rows      read_rows:      file, folder, Hub or python-stdlib -> checked rows of one kind           no torch
tokens    cached_tokens:  rows + tokenizer -> flat arrays of ids, labels and offsets, on disk      no torch
batches   train_steps:    arrays + seed + position -> the micro-batches of each optimizer step

Which samples make up a step depends on the seed and on the number of samples consumed, never on the processes.
"""
