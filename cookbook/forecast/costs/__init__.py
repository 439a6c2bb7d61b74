"""The ledger of costs: bytes, messages and FLOPs of a recipe under a strategy. No torch.

    inputs                    costs                                               read by
    ------                    -----                                               -------
    Skeleton     (model)  -+->  states.py   bytes of a process: GPU, host, disk   plan, explain, doctor
    CostInputs   (run)    -+       |  +-->  loading.py        of a machine        plan, doctor
      inputs.py            |       +----->  per_parameter.py  of one parameter    explain, tables, headers
                           |       +----->
    ModelSizes   (model)  -+->  traffic.py  messages; GPU <-> host <-> disk       plan, explain
    Step         (run)    -+->  flops.py    FLOPs of a step                       plan, mfu in metrics.jsonl
      flops.py

Every number of costs in explain, plan, doctor, the logs, docs/strategies.md and the headers of accelerate_configs comes
from here or is compared with it by tests/test_costs.py. A model is given by its weights (`forecast.skeleton`, which
needs torch), by its configuration alone (`sketch`), or not at all (`per_parameter`). Tables of text (`table.py`) say
what lies where, and what offloading moves; code computes the amounts in them.
"""
