"""Memory, time and price of a run, before it is started.

ranking            all strategies on given machines, best first
fitting            what `auto` takes for one: micro-batch and checkpointing
  changes          what to change so that a run fits, the cheapest first
  verdict          one strategy: its memory and time, and whether it fits
    trace, units   activations, from the model's own code on meta tensors
    memory         what a GPU holds at each moment
    step_time      seconds of a step, by its parts
    costs/         the ledger: bytes, messages, FLOPs; without torch
show               the table of `plan`
"""
