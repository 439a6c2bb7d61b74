"""Keys of other projects' configuration files, each with ours. No torch.

Names and defaults are facts of those projects; docs/convert.md has their sources. A key without a counterpart has the
advice to print instead, so that nothing in a file is dropped in silence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cookbook.system.shipped import typed


class NoCounterpart(ValueError):
    """A value that we do not have; the message is what to write instead."""


@dataclass(frozen=True)
class Key:
    """A key of another project."""

    ours: str | None = None
    """A key of a recipe; `strategy.X`, a property of a strategy; `~X`, from which several of ours are derived (see
    `cookbook.commands.convert`); None: there is none."""
    values: Mapping[Any, Any] | Callable[[Any], Any] | None = None
    """From their value to ours; ours is None where theirs sets nothing."""
    why: str = ""
    """What to write instead of the key, or of a value that has no counterpart."""

    def translate(self, value: Any) -> Any:
        """Our value.

        Raises:
            NoCounterpart: there is none.
        """
        if callable(self.values):
            return self.values(value)
        if self.ours is None:
            raise NoCounterpart(self.why)
        if self.values is None:
            return value
        value = value.lower() if isinstance(value, str) else value
        if isinstance(value, list | dict) or value not in self.values:
            known = ", ".join(dict.fromkeys(str(one) for one in self.values.values() if one is not None))
            raise NoCounterpart(self.why or f"no counterpart; {self.ours.lstrip('~')} can be {known}")
        return self.values[value]

    @property
    def answer(self) -> str:
        """What to write in a recipe in the place of this key."""
        if self.ours is not None and self.ours.startswith("strategy."):
            return STRATEGY
        if self.ours is None or self.ours[0] == "~":
            return self.why
        return f"write it as {self.ours}"


@dataclass(frozen=True)
class Project:
    """A project whose configuration files are read."""

    name: str
    keys: Mapping[str, Key]
    """By dotted path in its file."""
    base: str | None = None
    """The project whose keys it extends."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What it does where a file is silent, by our keys; only where that differs from our defaults or we have none."""
    is_distribution: bool = False
    """Its files describe how a run is distributed, not what it trains."""


def _number(value: Any) -> float:
    try:
        return value if isinstance(value, int | float) else float(value)
    except (TypeError, ValueError):
        raise NoCounterpart("not a number") from None


def _count(value: Any) -> int:
    number = _number(value)
    if number != int(number) or number <= 0:
        raise NoCounterpart("must be a whole number above 0 here")
    return int(number)


def _limit(value: Any) -> int | None:
    """A count, or None for 0 and -1, which mean that there is no limit."""
    return None if _number(value) in (0, -1) else _count(value)


def _epochs(value: Any) -> int:
    try:
        return _count(value)
    except NoCounterpart:
        raise NoCounterpart("epochs are whole here; write run.max_steps for a part of one") from None


def _names(value: Any) -> list[str]:
    """A list of names, also from `a,b`."""
    return [one.strip() for one in value.split(",")] if isinstance(value, str) else [str(one) for one in value]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise NoCounterpart("a text was expected")
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _section(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NoCounterpart("a section of `key: value` lines was expected")
    return value


def _targets(value: Any) -> list[str]:
    names = _names(value)
    return ["all-linear"] if names in (["all"], ["all-linear"]) else names


def _trackers(value: Any) -> list[str]:
    names = [name for name in ([value] if isinstance(value, str) else value) if name != "none"]
    if unknown := [name for name in names if name not in ("tensorboard", "wandb", "mlflow", "trackio")]:
        raise NoCounterpart(
            f"{', '.join(map(str, unknown))}: write run.trackers with tensorboard, wandb, mlflow, trackio"
        )
    return names


def _fsdp(value: Any) -> dict[str, Any] | None:
    """Properties of a strategy from `full_shard auto_wrap offload`, in one text or in a list."""
    words = value.lower().split() if isinstance(value, str) else [str(one).lower() for one in value or ()]
    if unknown := [one for one in words if one not in ("full_shard", "shard_grad_op", "auto_wrap", "offload")]:
        raise NoCounterpart(f"{', '.join(unknown)}: no counterpart; for hybrid_shard write strategy: hsdp")
    if not words:
        return None
    return {"kind": "fsdp", "reshard": "shard_grad_op" not in words, "offload": "offload" in words}


OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "torch.optim.adamw"), "adamw"),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "bitsandbytes.optim.adamw8bit"), "adamw_8bit"),
    "bitsandbytes.optim.pagedadamw8bit": "adamw_8bit",
    **dict.fromkeys(("sgd", "torch.optim.sgd"), "sgd"),
    "muon": "muon",
}
SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup": "cosine",
}
PRECISIONS = {True: True, False: False, "auto": True, "full": True, "true": True, "false": False}

EVERY_STEP = Key(why="every step is written to metrics.jsonl")
HUB = Key(why="nothing is uploaded; push the folder export/ of a run yourself")
LOADER = Key(why="rows are tokenized once and read ahead; there is nothing to set")
ATTENTION = Key(why="the model's own choice; packed rows stay apart with every kernel")
STRATEGY = "it is part of a strategy; name one, as in strategy: fsdp2 (docs/strategies.md)"
CHAT = Key(why="the tokenizer's own template is used; data.chat_template names a Jinja file")
RESUME = Key(why="write run.resume: auto, or the path of a checkpoint")
PROCESSES = typed("train PROCESSES=...", "launch --processes ...")
LAUNCHER = Key(why=f"owned by the launch command ({PROCESSES}, docs/several_machines.md)")
DOES_SO = Key(why="done here in any case")
REFERENCE = Key(why="the reference is the model before training, computed once before the first step")
WARMUP = "write schedule.warmup_steps, a number of steps or a share of the run, as 0.03"
ACCUMULATION = "it is derived: global_batch_size / (micro_batch_size x data-parallel processes)"
ADAPTER = "write adapter: {name: lora}, or dora, or qlora for weights in 4 bits"
EVALUATION = "write run.eval_every_steps, and data.eval or data.holdout"
SAVING = "write run.save_every_steps"
BETAS = "write optim.betas, as in [0.9, 0.95]"
BOOL = {True: True, False: False}

TRAINER = {
    "output_dir": Key("run.output_dir"),
    "learning_rate": Key("optim.learning_rate", _number),
    "weight_decay": Key("optim.weight_decay", _number),
    "adam_beta1": Key("~beta1", _number, BETAS),
    "adam_beta2": Key("~beta2", _number, BETAS),
    "adam_epsilon": Key("optim.eps", _number),
    "max_grad_norm": Key("optim.max_grad_norm", _number),
    "optim": Key("optim.name", OPTIMIZERS),
    "lr_scheduler_type": Key("schedule.name", SCHEDULES),
    "warmup_steps": Key("~warmup", _number, WARMUP),
    "warmup_ratio": Key("~warmup_ratio", _number, WARMUP),
    "num_train_epochs": Key("run.num_epochs", _epochs),
    "max_steps": Key("run.max_steps", _limit),
    "per_device_train_batch_size": Key("batch.micro_batch_size", _count),
    "gradient_accumulation_steps": Key("~accumulation", _count, ACCUMULATION),
    "seed": Key("seed"),
    "bf16": Key("~bf16", PRECISIONS, "write mixed_precision: bf16"),
    "fp16": Key("~fp16", PRECISIONS, "write mixed_precision: fp16"),
    "gradient_checkpointing": Key("model.gradient_checkpointing", BOOL),
    "activation_checkpointing": Key("model.gradient_checkpointing", BOOL),
    "torch_compile": Key("model.compile", BOOL),
    "use_liger_kernel": Key("model.liger_kernels", BOOL),
    "eval_strategy": Key("~eval_strategy", why=EVALUATION),
    "evaluation_strategy": Key("~eval_strategy", why=EVALUATION),
    "eval_steps": Key("~eval_steps", _number, EVALUATION),
    "save_strategy": Key("~save_strategy", why=SAVING),
    "save_steps": Key("~save_steps", _number, SAVING),
    "save_total_limit": Key("~keep", _limit, "write run.keep_last"),
    "report_to": Key("run.trackers", _trackers),
    "full_determinism": Key("run.deterministic", BOOL),
    "deepspeed": Key("~deepspeed", why=STRATEGY),
    "fsdp": Key("~fsdp", _fsdp, STRATEGY),
    "fsdp_config.fsdp_version": Key("strategy.fsdp_version", {1: 1, 2: 2}),
    "fsdp_config.version": Key("strategy.fsdp_version", {1: 1, 2: 2}),
    "fsdp_config.reshard_after_forward": Key("strategy.reshard", BOOL),
    "fsdp_config.offload_params": Key("strategy.offload", BOOL),
    "fsdp_config.activation_checkpointing": Key("model.gradient_checkpointing", BOOL),
    **dict.fromkeys(("resume_from_checkpoint", "overwrite_output_dir", "ignore_data_skip"), RESUME),
    **dict.fromkeys(
        ("logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "log_level"), EVERY_STEP
    ),
    **dict.fromkeys(("run_name", "disable_tqdm", "include_num_input_tokens_seen", "project"), EVERY_STEP),
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo"), HUB),
    **dict.fromkeys(("hub_revision", "hub_model_revision", "push_to_hub_revision"), HUB),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"), LOADER),
    **dict.fromkeys(("dataloader_drop_last", "remove_unused_columns", "group_by_length"), LOADER),
    "per_device_eval_batch_size": Key(why="evaluation uses batch.micro_batch_size; its loss does not depend on it"),
    "do_train": DOES_SO,
    "do_eval": Key(why=EVALUATION),
    "gradient_checkpointing_kwargs": Key(why="checkpointing is non-reentrant here; the numbers are the same"),
    "lr_scheduler_kwargs": Key(why="cosine and linear decay to 0; wsd takes schedule.decay_steps"),
    "optim_args": Key(why="the optimizers of optim.name have the keys of docs/recipes.md, no others"),
    "label_smoothing_factor": Key(why="no counterpart; objective.label_smoothing is that of dpo"),
    "neftune_noise_alpha": Key(why="no counterpart: noise on embeddings would differ between strategies"),
    "load_best_model_at_end": Key(why="write run.keep_best, and export the checkpoint that you want"),
    "metric_for_best_model": Key(why="run.keep_best ranks checkpoints by the evaluation loss"),
    "tf32": Key(why="not set here; torch's default holds"),
    "ddp_timeout": Key(why="write run.hang_timeout_minutes"),
    "data_seed": Key(why="seed is also that of the data order"),
    "average_tokens_across_devices": Key(why="always: the loss is the mean over the tokens of the global batch"),
    "auto_find_batch_size": Key(why="`python -m cookbook plan` finds the largest batch.micro_batch_size"),
    "torch_empty_cache_steps": Key(why="no counterpart; the peak of memory is forecast by `plan`"),
    "save_only_model": Key(why="checkpoints have everything that a run resumes from"),
    "save_safetensors": DOES_SO,
    "use_cpu": Key(why="a run uses all visible GPUs, else the CPU"),
}
HF_DEFAULTS = {
    "optim.learning_rate": 5e-5,
    "schedule.name": "linear",
    "run.num_epochs": 3,
    "batch.micro_batch_size": 8,
    "mixed_precision": "no",
}

PEFT = {
    "use_peft": Key("~peft", BOOL, ADAPTER),
    "lora_r": Key("adapter.rank", _count),
    "lora_alpha": Key("adapter.alpha", lambda value: float(_number(value))),
    "lora_dropout": Key("adapter.dropout", lambda value: float(_number(value))),
    "lora_target_modules": Key("adapter.targets", _targets),
    "lora_modules_to_save": Key("adapter.modules_to_save"),
    "use_rslora": Key("adapter.rslora", BOOL),
    "use_dora": Key("~dora", BOOL, "write adapter.name: dora"),
    "load_in_4bit": Key("~4bit", BOOL, "write adapter.name: qlora"),
    "load_in_8bit": Key("~8bit", BOOL, "no weights in 8 bits; write adapter.name: qlora for 4 bits"),
    "bnb_4bit_quant_type": Key("~nf4", {"nf4": True}, "qlora uses nf4"),
    "use_bnb_nested_quant": Key(why="qlora quantizes its scales too"),
}

REMOTE_CODE = "trust_remote_code"

TRL = {
    **TRAINER,
    **PEFT,
    "model_name_or_path": Key("model.name_or_path"),
    "model_revision": Key("model.revision"),
    REMOTE_CODE: Key(why="a model's own code is never run; transformers must know the architecture"),
    "torch_dtype": Key(why="trained weights are float32 beside mixed_precision"),
    "dtype": Key(why="trained weights are float32 beside mixed_precision"),
    "attn_implementation": ATTENTION,
    "use_cache": DOES_SO,
    "dataset_name": Key("~dataset", _text, why="write data.train, with the keys path, name, split"),
    "dataset_config": Key("~dataset_config", why="write data.train.name"),
    "dataset_train_split": Key("~train_split", why="write data.train.split"),
    "dataset_test_split": Key("~test_split", why="write data.eval: {path: ..., split: ...}"),
    "dataset_streaming": Key("data.streaming", BOOL),
    "streaming": Key("data.streaming", BOOL),
    "datasets": Key("~sources", _list, why="write data.train as a list of sources"),
    "dataset_mixture": Key("~mixture", _section, why="write data.train as a list of sources"),
    "test_split_size": Key("data.holdout", _number),
    "dataset_text_field": Key("~text_field", _text, why="write data.columns: {text: COLUMN}"),
    "dataset_num_proc": LOADER,
    "dataset_kwargs": LOADER,
    "max_length": Key("data.max_length", _count),
    "max_seq_length": Key("data.max_length", _count),
    "max_prompt_length": Key(why="only whole samples are limited, by data.max_length"),
    "max_completion_length": Key(why="only whole samples are limited, by data.max_length"),
    "packing": Key("data.packing", BOOL),
    "packing_strategy": Key(why="packed samples stay apart and are never cut to fill a row"),
    "eval_packing": Key(why="data.packing is for training and evaluation"),
    "padding_free": Key("data.packing", BOOL),
    "assistant_only_loss": Key("objective.train_on", {True: "assistant", False: "all"}),
    "completion_only_loss": Key("objective.train_on", {True: "assistant", False: "all"}),
    "chat_template_path": Key("data.chat_template"),
    "eos_token": CHAT,
    "pad_token": CHAT,
    "loss_type": Key("~loss_type", why="write objective.loss: sigmoid or ipo"),
    "beta": Key("objective.beta", _number),
    "label_smoothing": Key("objective.label_smoothing", _number),
    "desirable_weight": Key("objective.desirable_weight", _number),
    "undesirable_weight": Key("objective.undesirable_weight", _number),
    "precompute_ref_log_probs": REFERENCE,
    "reference_free": REFERENCE,
    "activation_offloading": Key(why="no counterpart; model.gradient_checkpointing: true keeps the least"),
}
TRL_DEFAULTS = {
    **HF_DEFAULTS,
    "optim.learning_rate": 2e-5,
    "mixed_precision": "bf16",
    "model.gradient_checkpointing": True,
    "data.max_length": 1024,
    "objective.train_on": "all",
    "adapter.alpha": 32.0,
    "adapter.dropout": 0.05,
}

HANDBOOK = {
    **TRL,
    "dataset_mixer": Key("~mixer", _section, why="write data.train as a list of sources, each with a weight"),
    "dataset_splits": Key("~splits", _names, why="write data.train.split"),
    "dataset_configs": Key("~dataset_config", why="write data.train.name"),
    "preprocessing_num_workers": LOADER,
    "chat_template": CHAT,
    "auto_insert_empty_system_msg": CHAT,
    "use_flash_attention_2": ATTENTION,
    "truncation_side": Key(why="data.too_long: cut truncates at the end"),
    "benchmarks": Key(why="no benchmarks are run after training"),
    "callbacks": Key(why="no counterpart; events.jsonl and metrics.jsonl record a run"),
    "system_prompt": CHAT,
}

LLAMA_FACTORY = {
    **TRAINER,
    "model_name_or_path": Key("model.name_or_path"),
    "model_revision": Key("model.revision"),
    REMOTE_CODE: TRL[REMOTE_CODE],
    "adapter_name_or_path": Key(why="an adapter starts from new weights; merge the old one first (docs/adapters.md)"),
    "stage": Key("objective.name", {"sft": "sft", "pt": "cpt", "dpo": "dpo", "kto": "kto_zero"}),
    "finetuning_type": Key("~adapter", {"lora": "lora", "full": None}, ADAPTER),
    "lora_rank": Key("adapter.rank", _count),
    "lora_alpha": PEFT["lora_alpha"],
    "lora_dropout": PEFT["lora_dropout"],
    "lora_target": Key("adapter.targets", _targets),
    "additional_target": Key("adapter.modules_to_save", _names),
    "use_rslora": PEFT["use_rslora"],
    "use_dora": PEFT["use_dora"],
    "quantization_bit": Key("~4bit", {4: True}, "weights have 4 bits or 16: adapter.name: qlora or lora"),
    "quantization_method": Key(why="qlora is bitsandbytes NF4"),
    "double_quantization": PEFT["use_bnb_nested_quant"],
    "pref_beta": Key("objective.beta", _number),
    "pref_loss": Key("~pref_loss", why="write objective.name: dpo with loss sigmoid or ipo, or orpo"),
    "dpo_label_smoothing": Key("objective.label_smoothing", _number),
    "kto_chosen_weight": Key("objective.desirable_weight", _number),
    "kto_rejected_weight": Key("objective.undesirable_weight", _number),
    "dataset": Key("~registered", _names, why="write data.train with the path of a file, a folder or a Hub data set"),
    "eval_dataset": Key(
        "~registered_eval", _names, why="write data.eval with the path of a file, a folder or a Hub data set"
    ),
    "dataset_dir": Key(why="data.train takes paths from the current folder"),
    "template": CHAT,
    "cutoff_len": Key("data.max_length", _count),
    "max_samples": Key("~max_rows", _limit, "write data.train.max_rows"),
    "val_size": Key("data.holdout", _number),
    "train_on_prompt": Key("objective.train_on", {True: "all", False: None}),
    "mask_history": Key("objective.train_on", {True: "last", False: None}),
    "packing": Key("data.packing", BOOL),
    "neat_packing": Key("data.packing", {True: True, False: None}),
    "streaming": Key("data.streaming", BOOL),
    "buffer_size": Key("data.shuffle_rows", _count),
    "mix_strategy": Key(why="an epoch uses each row of each source once, or as data.train.weight asks"),
    "interleave_probs": Key(why="write data.train.weight for each source"),
    "flash_attn": ATTENTION,
    "enable_liger_kernel": Key("model.liger_kernels", BOOL),
    "disable_gradient_checkpointing": Key("model.gradient_checkpointing", {True: False, False: True}),
    "pure_bf16": Key(why="trained weights are float32 beside mixed_precision"),
    "overwrite_cache": LOADER,
    "preprocessing_num_workers": LOADER,
    "tokenized_path": LOADER,
    "plot_loss": Key(why="`python -m cookbook report` draws the curves of a run"),
}

AXOLOTL = {
    **{key: one for key, one in TRAINER.items() if key not in ("optim", "lr_scheduler_type", "num_train_epochs")},
    **PEFT,
    "base_model": Key("model.name_or_path"),
    **dict.fromkeys(
        ("model_type", "tokenizer_type", "base_model_config", "tokenizer_config"),
        Key(why="read from the model's own files"),
    ),
    REMOTE_CODE: TRL[REMOTE_CODE],
    "datasets": Key("~sources", _list, why="write data.train as a list of sources"),
    "test_datasets": Key("~test_sources", _list, why="write data.eval with a name for each set"),
    "val_set_size": Key("data.holdout", _number),
    "dataset_prepared_path": LOADER,
    "dataset_processes": LOADER,
    "shuffle_merged_datasets": DOES_SO,
    "sequence_len": Key("data.max_length", _count),
    "sample_packing": Key("data.packing", BOOL),
    "eval_sample_packing": TRL["eval_packing"],
    "pad_to_sequence_len": Key(why="rows are padded to the longest of a micro-batch; data.packing leaves no padding"),
    "excess_length_strategy": Key("data.too_long", {"drop": "drop", "truncate": "cut", "raise": "error"}),
    "train_on_inputs": Key("objective.train_on", {True: "all", False: None}),
    "chat_template": CHAT,
    "chat_template_jinja": CHAT,
    "special_tokens": CHAT,
    "rl": Key("~rl", why="write objective.name: dpo, orpo or kto_zero"),
    "rl_beta": Key("objective.beta", _number),
    "dpo_beta": Key("objective.beta", _number),
    "orpo_alpha": Key("objective.beta", _number),
    "adapter": Key("~adapter", {"lora": "lora", "qlora": "qlora"}, ADAPTER),
    "lora_target_linear": Key("adapter.targets", {True: ["all-linear"], False: None}),
    "peft_use_dora": PEFT["use_dora"],
    "peft_use_rslora": PEFT["use_rslora"],
    "lora_model_dir": LLAMA_FACTORY["adapter_name_or_path"],
    "micro_batch_size": Key("batch.micro_batch_size", _count),
    "eval_batch_size": TRAINER["per_device_eval_batch_size"],
    "batch_size": Key("batch.global_batch_size", _count),
    "num_epochs": Key("run.num_epochs", _epochs),
    "optimizer": Key("optim.name", OPTIMIZERS),
    "lr_scheduler": Key("schedule.name", SCHEDULES),
    "evals_per_epoch": Key(why=EVALUATION),
    "saves_per_epoch": Key(why=SAVING),
    "save_first_step": Key("run.save_first_step", BOOL),
    "flash_attention": ATTENTION,
    "sdp_attention": ATTENTION,
    "xformers_attention": ATTENTION,
    "liger_rope": Key("model.liger_kernels", {True: True, False: None}),
    "liger_rms_norm": Key("model.liger_kernels", {True: True, False: None}),
    "liger_glu_activation": Key("model.liger_kernels", {True: True, False: None}),
    "liger_fused_linear_cross_entropy": Key(why="the loss computes its logits in chunks in any case"),
    "plugins": Key(why="our plugins are other files: objectives, optimizers, schedules, rows (docs/recipes.md)"),
    "wandb_project": Key("run.trackers", lambda _: ["wandb"]),
    **dict.fromkeys(
        ("wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model", "wandb_run_id"),
        Key(why="set it in the environment, as WANDB_ENTITY=... (docs/watching.md)"),
    ),
    "strict": Key(why="always: an unknown key is a mistake"),
    "fsdp_version": Key("strategy.fsdp_version", {1: 1, 2: 2}),
    "fsdp_config.fsdp_offload_params": Key("strategy.offload", BOOL),
    "fsdp_config.fsdp_reshard_after_forward": Key("strategy.reshard", BOOL),
    "tensor_parallel_size": Key("strategy.tp_size", _count),
    "context_parallel_size": Key("strategy.sp_size", _count),
    "sequence_parallel_degree": Key("strategy.sp_size", _count),
    "dp_replicate_size": Key("strategy.dp_replicate_size", _count),
    "dp_shard_size": Key(why="all other processes shard; launch as many as you want"),
}

TORCHTUNE = {
    "output_dir": Key("run.output_dir"),
    "seed": Key("seed"),
    "tokenizer._component_": Key(why="read from the model's own files"),
    "tokenizer.path": Key(why="read from the model's own files"),
    "tokenizer.merges_file": Key(why="read from the model's own files"),
    "tokenizer.max_seq_len": Key("data.max_length", _count),
    "tokenizer.prompt_template": CHAT,
    "model._component_": Key("~component", why="write model.name_or_path"),
    "model.lora_attn_modules": Key("~lora_attention", _names, why="write adapter.targets"),
    "model.apply_lora_to_mlp": Key("~lora_mlp", BOOL, "write adapter.targets"),
    "model.apply_lora_to_output": Key(
        "~lora_head", {False: False}, "the head gets no adapter: adapter.modules_to_save"
    ),
    "model.lora_rank": Key("adapter.rank", _count),
    "model.lora_alpha": PEFT["lora_alpha"],
    "model.lora_dropout": PEFT["lora_dropout"],
    "model.use_dora": PEFT["use_dora"],
    "model.quantize_base": PEFT["load_in_4bit"],
    "checkpointer.checkpoint_dir": Key("model.name_or_path"),
    **dict.fromkeys(
        tuple(f"checkpointer.{one}" for one in ("_component_", "checkpoint_files", "model_type", "recipe_checkpoint")),
        Key(why="read from the model's own files"),
    ),
    "checkpointer.output_dir": Key(why="checkpoints go to run.output_dir"),
    "resume_from_checkpoint": RESUME,
    "save_adapter_weights_only": Key(why="checkpoints have everything; the export of an adapter has the adapter only"),
    "dataset._component_": Key("~dataset_component", why="write data.train"),
    "dataset.source": Key("~dataset", _text, why="write data.train"),
    "dataset.data_files": Key("~data_files", _text, why="write data.train"),
    "dataset.name": Key("~dataset_config", why="write data.train.name"),
    "dataset.split": Key("~train_split", why="write data.train.split"),
    "dataset.packed": Key("data.packing", BOOL),
    "dataset.train_on_input": Key("objective.train_on", {True: "all", False: None}),
    "dataset.column_map": Key(why="write data.columns"),
    "dataset.conversation_column": Key("~messages_column", _text, why="write data.columns: {messages: COLUMN}"),
    "dataset.conversation_style": Key(why="the shape of rows is recognized (docs/recipes.md)"),
    "shuffle": DOES_SO,
    "batch_size": Key("batch.micro_batch_size", _count),
    "epochs": Key("run.num_epochs", _epochs),
    "max_steps_per_epoch": Key("~steps_per_epoch", _limit, "write run.max_steps"),
    "gradient_accumulation_steps": TRAINER["gradient_accumulation_steps"],
    "optimizer._component_": Key("optim.name", OPTIMIZERS),
    "optimizer.lr": Key("optim.learning_rate", _number),
    "optimizer.weight_decay": Key("optim.weight_decay", _number),
    "optimizer.betas": Key("optim.betas"),
    "optimizer.eps": Key("optim.eps", _number),
    "optimizer.momentum": Key("optim.momentum", _number),
    "optimizer.fused": DOES_SO,
    "optimizer_in_bwd": Key(why="gradients are clipped over the whole model first, so the optimizer runs after it"),
    "clip_grad_norm": Key("optim.max_grad_norm", _number),
    "lr_scheduler._component_": Key("schedule.name", SCHEDULES),
    "lr_scheduler.num_warmup_steps": Key("schedule.warmup_steps", _limit),
    "loss._component_": Key("~loss", why="write objective.name"),
    "loss.beta": Key("objective.beta", _number),
    "loss.label_smoothing": Key("objective.label_smoothing", _number),
    "compile": Key("model.compile", BOOL),
    "enable_activation_checkpointing": Key("model.gradient_checkpointing", BOOL),
    "enable_activation_offloading": TRL["activation_offloading"],
    "dtype": Key("mixed_precision", {"bf16": "bf16", "fp32": "no", "fp16": "fp16"}),
    "device": TRAINER["use_cpu"],
    "fsdp_cpu_offload": Key("strategy.offload", BOOL),
    "fsdp_reshard_after_forward": Key("strategy.reshard", BOOL),
    "tensor_parallel_dim": Key("strategy.tp_size", _count),
    "data_parallel_replicate_dim": Key("strategy.dp_replicate_size", _count),
    "data_parallel_shard_dim": AXOLOTL["dp_shard_size"],
    "custom_sharded_layers": Key(why="embedding and head are sharded with the rest"),
    "metric_logger._component_": EVERY_STEP,
    "metric_logger.log_dir": EVERY_STEP,
    "metric_logger.project": EVERY_STEP,
    "log_every_n_steps": EVERY_STEP,
    "log_peak_memory_stats": EVERY_STEP,
    "log_level": EVERY_STEP,
    "profiler": Key(why="no profiler is built in; metrics.jsonl has the seconds and the memory of each step"),
}

OFFLOAD = {"none": None, "cpu": "cpu", "nvme": "nvme"}
ACCELERATE = {
    "distributed_type": Key(
        "strategy.kind",
        {"no": "single", False: "single", "multi_gpu": "ddp", "multi_cpu": "ddp", "fsdp": "fsdp", "deepspeed": "zero"},
    ),
    "num_processes": Key("~processes", _count, LAUNCHER.why),
    "mixed_precision": Key("mixed_precision", {False: "no", "no": "no", "bf16": "bf16", "fp16": "fp16"}),
    "gradient_accumulation_steps": TRAINER["gradient_accumulation_steps"],
    "compute_environment": DOES_SO,
    "use_cpu": TRAINER["use_cpu"],
    "downcast_bf16": Key(why="for TPUs only"),
    **dict.fromkeys(("num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend"), LAUNCHER),
    **dict.fromkeys(("same_network", "gpu_ids", "enable_cpu_affinity", "debug", "main_training_function"), LAUNCHER),
    **dict.fromkeys(("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "deepspeed_config.deepspeed_hostfile"), LAUNCHER),
    "deepspeed_config.zero_stage": Key("strategy.zero_stage", {0: 0, 1: 1, 2: 2, 3: 3}),
    "deepspeed_config.offload_optimizer_device": Key("strategy.offload_optimizer", OFFLOAD),
    "deepspeed_config.offload_param_device": Key("strategy.offload_param", OFFLOAD),
    "deepspeed_config.deepspeed_config_file": Key("~deepspeed"),
    "deepspeed_config.gradient_accumulation_steps": TRAINER["gradient_accumulation_steps"],
    "deepspeed_config.gradient_clipping": Key("optim.max_grad_norm", _number),
    "deepspeed_config.zero3_init_flag": Key(why="under ZeRO-3 no process holds the whole model in any case"),
    "deepspeed_config.zero3_save_16bit_model": Key(why="export/ has the whole model under every strategy"),
    "deepspeed_config.deepspeed_multinode_launcher": Key(why="torchrun on every machine (docs/several_machines.md)"),
    "fsdp_config.fsdp_version": Key("strategy.fsdp_version", {1: 1, 2: 2}),
    "fsdp_config.fsdp_sharding_strategy": Key(
        "strategy.reshard",
        {"full_shard": True, 1: True, "shard_grad_op": False, 2: False},
        "for HYBRID_SHARD write strategy: hsdp, for NO_SHARD ddp",
    ),
    "fsdp_config.fsdp_reshard_after_forward": Key(
        "strategy.reshard", {True: True, False: False, "full_shard": True, "shard_grad_op": False}
    ),
    "fsdp_config.fsdp_offload_params": Key("strategy.offload", BOOL),
    "fsdp_config.fsdp_activation_checkpointing": Key("model.gradient_checkpointing", BOOL),
    "fsdp_config.fsdp_auto_wrap_policy": Key(
        "~wrap", {"transformer_based_wrap": True}, "layers are wrapped one by one: TRANSFORMER_BASED_WRAP"
    ),
    **{
        f"fsdp_config.fsdp_{key}": Key(why="set by the shipped strategy; no influence on the curve")
        for key in ("backward_prefetch", "forward_prefetch", "cpu_ram_efficient_loading", "sync_module_states")
    },
    "fsdp_config.fsdp_use_orig_params": Key(why="always true: weight decay must tell norms from matrices"),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": Key(why="read from the model"),
    "fsdp_config.fsdp_state_dict_type": Key(why="checkpoints have one format under every strategy"),
    "parallelism_config.parallelism_config_dp_replicate_size": Key("strategy.dp_replicate_size", _count),
    "parallelism_config.parallelism_config_dp_shard_size": AXOLOTL["dp_shard_size"],
    "parallelism_config.parallelism_config_tp_size": Key("strategy.tp_size", _count),
    "parallelism_config.parallelism_config_sp_size": Key("strategy.sp_size", _count),
    "parallelism_config.parallelism_config_cp_size": Key("strategy.sp_size", _count),
}

DEEPSPEED = {
    "train_batch_size": Key("batch.global_batch_size", _count),
    "train_micro_batch_size_per_gpu": Key("batch.micro_batch_size", _count),
    "gradient_accumulation_steps": TRAINER["gradient_accumulation_steps"],
    "gradient_clipping": Key("optim.max_grad_norm", _number),
    "bf16.enabled": TRAINER["bf16"],
    "fp16.enabled": TRAINER["fp16"],
    "fp16.loss_scale": Key(why="the loss scale of fp16 is dynamic, as with 0 here"),
    "fp16.initial_scale_power": Key(why="under mixed_precision: fp16 write loss_scale.initial, the scale itself"),
    "fp16.loss_scale_window": Key(why="under mixed_precision: fp16 write loss_scale.window"),
    "fp16.hysteresis": Key(why="under mixed_precision: fp16 write loss_scale.hysteresis"),
    "fp16.min_loss_scale": Key(why="under mixed_precision: fp16 write loss_scale.minimum"),
    "optimizer.type": Key("optim.name", OPTIMIZERS),
    "optimizer.params.lr": Key("optim.learning_rate", _number),
    "optimizer.params.betas": Key("optim.betas"),
    "optimizer.params.eps": Key("optim.eps", _number),
    "optimizer.params.weight_decay": Key("optim.weight_decay", _number),
    "scheduler.type": Key(
        why="write schedule.name: linear for WarmupDecayLR, cosine for WarmupCosineLR, constant for WarmupLR; their"
        " warm-up is logarithmic unless warmup_type is linear, and ours is linear"
    ),
    "scheduler.params.warmup_type": Key(why="the warm-up is linear"),
    "scheduler.params.warmup_num_steps": Key("schedule.warmup_steps", _limit),
    "scheduler.params.total_num_steps": Key("run.max_steps", _limit),
    "scheduler.params.warmup_max_lr": Key("optim.learning_rate", _number),
    "scheduler.params.warmup_min_lr": Key(why="the first step of the warm-up has 1/warmup_steps of the peak"),
    "zero_optimization.stage": Key("strategy.zero_stage", {0: 0, 1: 1, 2: 2, 3: 3}),
    "zero_optimization.offload_optimizer.device": Key("strategy.offload_optimizer", OFFLOAD),
    "zero_optimization.offload_param.device": Key("strategy.offload_param", OFFLOAD),
    "zero_optimization.offload_optimizer.nvme_path": Key("strategy.nvme_path"),
    "zero_optimization.offload_param.nvme_path": Key("strategy.nvme_path"),
    "zero_optimization.offload_optimizer.pin_memory": Key(why="true in the shipped files"),
    "zero_optimization.offload_param.pin_memory": Key(why="true in the shipped files"),
    "zero_optimization.zero_hpz_partition_size": Key("strategy.zero_hpz_partition_size", _count),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Key(
        why="export/ has the whole model under every strategy"
    ),
    **{
        f"zero_optimization.{key}": Key(why="the shipped JSON has a value; it changes speed and memory, not the curve")
        for key in (
            "overlap_comm", "contiguous_gradients", "reduce_bucket_size", "reduce_scatter", "allgather_bucket_size",
            "allgather_partitions", "round_robin_gradients", "sub_group_size", "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        )
    },
    "zero_allow_untested_optimizer": DOES_SO,
    "zero_force_ds_cpu_optimizer": Key(why="the optimizer of the recipe is used under every strategy"),
    "steps_per_print": EVERY_STEP,
    "wall_clock_breakdown": EVERY_STEP,
    "activation_checkpointing": Key(why="write model.gradient_checkpointing"),
}  # fmt: skip

PROJECTS = {
    "trainer": Project("Hugging Face TrainingArguments", TRAINER, defaults=HF_DEFAULTS),
    "trl": Project("TRL", TRL, base="trainer", defaults=TRL_DEFAULTS),
    "alignment-handbook": Project("alignment-handbook", HANDBOOK, base="trl", defaults=TRL_DEFAULTS),
    "llama-factory": Project(
        "LLaMA-Factory",
        LLAMA_FACTORY,
        base="trainer",
        defaults={
            **HF_DEFAULTS,
            "~adapter": "lora",
            "adapter.rank": 8,
            "~alpha_over_rank": 2.0,
            "data.max_length": 2048,
            "model.gradient_checkpointing": True,
        },
    ),
    "axolotl": Project(
        "axolotl",
        AXOLOTL,
        base="trainer",
        defaults={
            "batch.micro_batch_size": 1,
            "run.num_epochs": 1,
            "schedule.name": "cosine",
            "data.max_length": 512,
            "mixed_precision": "no",
        },
    ),
    "torchtune": Project(
        "torchtune",
        TORCHTUNE,
        defaults={"schedule.name": "constant", "optim.max_grad_norm": 0.0, "optim.weight_decay": 0.01},
    ),
    "accelerate": Project("accelerate", ACCELERATE, is_distribution=True),
    "deepspeed": Project("DeepSpeed", DEEPSPEED, is_distribution=True),
}


def answers() -> dict[str, str]:
    """What to write in a recipe in the place of each key of another project, by its name there."""
    found: dict[str, list[str]] = {"lr": [PROJECTS["trainer"].keys["learning_rate"].answer]}
    for project in PROJECTS.values():
        for path, key in project.keys.items():
            if "." not in path and key.answer not in found.setdefault(path, []):
                found[path].append(key.answer)
    return {path: "; or, ".join(texts) for path, texts in found.items()}
