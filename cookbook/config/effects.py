"""The effect of a change of a recipe's key: the curve, the last bits, speed and memory, or only what is watched."""

NEVER_THE_CURVE = (
    "strategy",
    "model.gradient_checkpointing",
    "data.packing",
    "batch.micro_batch_size",
    "batch.micro_batch_tokens",
)
"""Keys of speed and memory. Which sums are made together changes the last bits of each; docs/equivalence.md."""
ONLY_ROUNDING = ("model.compile", "model.kernels", "model.liger_kernels", "run.deterministic")
"""Other kernels for the same mathematics."""
ONLY_THE_RUN = (
    "data.eval",
    "run.allow_changes",
    "run.callbacks",
    "run.check_export",
    "run.check_ranks_every_steps",
    "run.eval_every_steps",
    "run.evals_per_epoch",
    "run.export",
    "run.hang_timeout_minutes",
    "run.keep_best",
    "run.keep_last",
    "run.log_every_steps",
    "run.metrics",
    "run.monitor",
    "run.on_out_of_memory",
    "run.output_dir",
    "run.price_per_gpu_hour",
    "run.profile",
    "run.resume",
    "run.sample_every_steps",
    "run.sample_tokens",
    "run.save_every_minutes",
    "run.save_every_steps",
    "run.save_first_step",
    "run.save_in_background",
    "run.saves_per_epoch",
    "run.stop_after_steps",
    "run.strict_versions",
    "run.trackers",
)
"""Keys of all that is written and measured on the way. A key in no list, as a new one is, may change the curve."""
EFFECTS = {
    "curve": "may change the curve",
    "speed": "speed and memory, never the curve",
    "rounding": "speed and the last bits",
    "run": "what is evaluated, saved and watched; never the curve",
    "strategy": "of the strategy: speed and memory, never the curve",
}


def effect_of(key: str) -> str:
    """Name what a key of a recipe affects: a key of EFFECTS."""
    rules = {"speed": NEVER_THE_CURVE, "rounding": ONLY_ROUNDING, "run": ONLY_THE_RUN}
    for effect, keys in rules.items():
        if any(key == known or key.startswith(f"{known}.") for known in keys):
            return effect
    return "curve"
