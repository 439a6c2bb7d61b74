"""What a change of a recipe's key may change: the curve, the last bits, speed and memory, or only what is watched."""

NEVER_THE_CURVE = (
    "strategy",
    "model.gradient_checkpointing",
    "data.packing",
    "batch.micro_batch_size",
    "batch.micro_batch_tokens",
)
"""Keys of speed and memory. Which sums are made together changes the last bits of each; docs/equivalence.md."""
ONLY_ROUNDING = ("model.compile", "model.liger_kernels", "run.deterministic")
"""Other kernels for the same mathematics."""
THE_CURVE_IN_RUN = ("run.num_epochs", "run.max_steps", "run.skip_nonfinite_steps")
ONLY_THE_RUN = ("data.eval", "run")
"""Sections of what is written and measured on the way; of `run` all but the keys above."""
EFFECTS = {
    "curve": "may change the curve",
    "speed": "speed and memory, never the curve",
    "rounding": "speed and the last bits",
    "run": "what is evaluated, saved and watched; never the curve",
    "strategy": "of the strategy: speed and memory, never the curve",
}


def effect_of(key: str) -> str:
    """What a key of a recipe affects: a key of EFFECTS."""
    rules = {"curve": THE_CURVE_IN_RUN, "speed": NEVER_THE_CURVE, "rounding": ONLY_ROUNDING, "run": ONLY_THE_RUN}
    for effect, keys in rules.items():
        if any(key == known or key.startswith(f"{known}.") for known in keys):
            return effect
    return "curve"
