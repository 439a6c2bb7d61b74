"""From the sources of a recipe to the batches of one process:

readers   file_rows:      a data file of any format -> raw rows with their places
arrow     row_decoder:    tables of Parquet, Arrow and the Hub -> rows as JSON would have them
sources   raw_rows:       the same of a file, folder, Hub data set or python-stdlib
rows      read_rows:      a source -> checked rows of one kind
encode    Encoder:        rows + tokenizer -> token ids with labels
    chat_template  ChatTemplate:  a chat -> its text, with the characters of each assistant turn
    faithful       Words:         whether the template writes each text of a chat, in order and once
    borders        Pieces:        texts -> ids, none of which spans the end of a prompt
    twin           offer:         the shipped template that renders what a tokenizer's own renders
tokens    cached_tokens:  rows + tokenizer -> flat arrays of ids, labels and offsets, on disk
stream    Stream:         the same without end, read while training
sets      read_data, tokenize_data:  all of this for the sets of a recipe
known     known_rows:     the rows of files that were read before, not read again while their tokens are cached
batches   train_steps:    tokens + seed + position -> the micro-batches of each optimizer step; alone imports torch

Which samples make up a step depends on the seed and on the number of samples consumed, never on the processes.
"""
