"""Rehearses a recipe: its own strategy, objective, adapter, precision, data and architecture, scaled down.

Trains three steps in real processes on simulated GPUs, evaluates, exports, and opens the export with plain transformers
and peft, whose own loss on the held-out rows, of sft and cpt, must equal the run's.
"""
