"""Adapters through peft: a few trained float32 weights beside frozen ones, saved as a peft folder.

peft is imported inside functions: with bitsandbytes it takes two seconds, which a run without an adapter saves.
"""
