"""Exports a checkpoint as a Hugging Face folder: writes it, reopens it in a fresh process, adds a card, and pushes it.

At its start a run writes `model/`: configuration, tokenizer and the name of the base model, everything but weights. An
export needs only that and a checkpoint of any strategy: no Hub, no cache, no process group.
"""
