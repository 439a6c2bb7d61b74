"""One ledger of what training costs: bytes, messages and FLOPs of a recipe under a strategy. Every number that explain,
plan, doctor, the logs, docs/strategies.md and the headers of accelerate_configs give is from here, or is held against
it by tests/test_costs.py. No torch.

    a model's weights        recipe x strategy x processes
    Skeleton                 CostInputs                        inputs.py
       |        |                |
       |        +-------+--------+--> memory.py   bytes of a process: GPU, host, disk; of a checkpoint
       |                         |      +-------> loading.py   of a machine, and while a run starts
    flops.py                     |      |
    Sizes x Step -------+--------+--> traffic.py  messages between processes; GPU <-> host <-> disk
       |                                +-------> per_parameter.py   memory and traffic of one more parameter, in words
    FLOPs of a step

A model is known by its real weights (`forecast.skeleton`, which needs torch), by its configuration alone (`sketch`), or
not at all (`per_parameter`).
"""
