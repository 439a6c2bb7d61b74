"""Rounds of sampling and training from files that ask for GRPO: TRL's, and axolotl's `rl: grpo`."""

import math
from pathlib import Path
from typing import Any, get_args

from cookbook.commands.convert.collected import CollectedKeys
from cookbook.config.foreign import meaning_of, tables
from cookbook.config.objectives import Objective
from cookbook.config.objectives.grpo import GRPO
from cookbook.config.reward_functions import is_model
from cookbook.config.sections import RoundsSection
from cookbook.system.files import show

LOSSES: tuple[str, ...] = get_args(GRPO.model_fields["loss_type"].annotation)
OF_A_MICRO_BATCH = "bnpo"
"""TRL's loss that is dapo with the tokens of a micro-batch in the place of those of the global batch."""
OTHERS_TOO = ("rounds.max_completion_length", "~max_prompt_length")
"""Keys that files of other methods have as well."""
OF_ROUNDS = ("~reward_funcs", "~reward_model", "~num_iterations", "~steps_per_generation", "~answers_per_generation")
VLLM = "~vllm_"
"""Beginning of a sampler's derived keys."""
PLUGIN = "reward_functions.py"
OWN = "trl.rewards"
BY_NAME = "  # or the module of the project that has this name"
MADE = {
    "get_soft_overlong_punishment": (
        "soft_overlong_punishment_reward",
        "(max_completion_len=1280, soft_punish_cache=256)",
    )
}
"""Makers of functions by the names in TRL's script (scripts/grpo.py): a maker's name, and its arguments."""
OF_REWARDS = "GRPOScriptArguments"
"""open-r1's class of the arguments of its reward functions."""
HELD_OUT = ("data.eval", "data.holdout", "run.eval_every_steps", "run.evals_per_epoch", "run.early_stopping_patience")
RANKED = ("run.export", "run.keep_best")
SAVED = ("run.save_every_steps", "run.saves_per_epoch", "run.save_first_step")
OF_ROWS = ("data.too_long", "data.streaming", "data.shuffle_rows", "data.columns")
DERIVED = {
    "run.eval_every_steps": "~eval_steps",
    "run.evals_per_epoch": "~eval_strategy",
    "run.save_every_steps": "~save_steps",
    "run.saves_per_epoch": "~save_strategy",
    "data.eval": "~test_split",
}
"""The keys of a file behind some of ours."""
NOT_IN_ROUNDS = (*OF_ROWS, *SAVED, "data.max_length")
"""Keys whose defaults in other projects are no settings of rounds; a length is TRL's for other objectives."""


def asks_for_rounds(collected: CollectedKeys) -> bool:
    """Return whether the files are those of a GRPO that samples while it trains."""
    if collected.objective is not None:
        return collected.objective == "grpo"
    if "~rl" in collected.given or any(key.startswith("rl.") or key == "rl" for key in collected.keys_of_files):
        return bool(collected.other.get("~rl") == "grpo")
    if any(key.partition(".")[0] == "trl" for key in collected.keys_of_files):  # axolotl's, which `rl` turns on
        return False
    loss = _loss_in(collected)
    keys = {key for key in collected.given if key.startswith(("rounds.", VLLM)) or key in OF_ROUNDS}
    return bool(keys - {*OTHERS_TOO}) or (isinstance(loss, str) and loss in (*LOSSES, OF_A_MICRO_BATCH))


def derive_objective(collected: CollectedKeys) -> None:
    """`objective` of GRPO. Keys of other objectives are left out."""
    loss, _, rl = _loss_in(collected), collected.take("loss_type"), collected.take("rl")
    for name in ("pref_loss", "loss"):
        if collected.take(name) is not None:
            collected.note(f"~{name}", "goes with another objective; left out")
    if collected.recipe.get("objective.name") is not None and "objective.name" in collected.places:
        collected.note("objective.name", "goes with another objective; left out")
    collected.recipe["objective.name"] = "grpo"
    if rl is None and collected.objective is None:
        collected.notes.append("taken for GRPO by its keys; RLOO and other methods that sample are not here")
    if loss == OF_A_MICRO_BATCH:
        collected.recipe["objective.loss_type"] = "dapo"
        collected.change("~loss_type", "a mean over the tokens of a micro-batch; dapo has those of the global batch")
    elif isinstance(loss, str) and loss in LOSSES:
        collected.recipe["objective.loss_type"] = loss
    elif loss is not None:
        meaning = meaning_of("objective.loss_type", str(loss)) or f"no loss of grpo; write {', '.join(LOSSES)}"
        collected.add(collected.others, collected.places["~loss_type"], meaning)
    fields = GRPO.model_fields
    for key in [key for key in collected.recipe if key.startswith("objective.")]:
        if key.partition(".")[2] not in fields:
            _drop(collected, key, "goes with another objective; left out")


def leave_out_rounds(collected: CollectedKeys) -> None:
    """Name the keys of rounds in the files of another training."""
    for key in [key for key in collected.recipe if key.startswith("rounds.")]:
        is_of_others = key in OTHERS_TOO
        _drop(collected, key, tables().texts["whole samples"] if is_of_others else "goes with GRPO only; left out")
    for key in [key for key in collected.other if key in (*OF_ROUNDS, *OTHERS_TOO) or key.startswith(VLLM)]:
        del collected.other[key]
        is_of_others = key in OTHERS_TOO
        collected.change(key, tables().texts["whole samples"] if is_of_others else "goes with GRPO only; left out")
    of_others = {key for kind in Objective.kinds() if kind is not GRPO for key in kind.model_fields}
    for key in (key for key in GRPO.model_fields if key not in of_others):
        _drop(collected, f"objective.{key}", "goes with GRPO only; left out")


def derive_rounds(collected: CollectedKeys, accumulation: int) -> None:
    """`rounds`, and what of a run is another thing where rounds repeat it.

    Args:
        accumulation: micro-batches of a step, of one process.
    """
    _defaults_of_trl(collected)
    _rewards(collected)
    _convert_prompt(collected)
    _sampler(collected)
    _numbers(collected, accumulation)
    _length(collected)
    if collected.recipe.get("objective.loss_type") == "dr_grpo":
        collected.recipe["objective.max_completion_length"] = _value(collected, "max_completion_length")
    for key in RoundsSection.SAMPLING:
        if _value(collected, key) != _usual(key):
            collected.change(
                f"rounds.{key}",
                "TRL's loss has the probabilities of this temperature, and does not heed truncation; here it is that of"
                " the model's own, and a token is weighted by the ratio of both (docs/recipes.md#groups-with-rewards)",
            )
    _left_out(collected)


def _loss_in(collected: CollectedKeys) -> Any:
    loss = collected.other.get("~loss_type")
    return loss[0] if isinstance(loss, list) and len(loss) == 1 else loss


def _usual(key: str) -> Any:
    return RoundsSection.model_fields[key].default


def _value(collected: CollectedKeys, key: str) -> Any:
    return collected.recipe.get(f"rounds.{key}", _usual(key))


def _of_trl(name: str) -> Any:
    """Return what holds in TRL's GRPO where a file is silent, by its key there."""
    return tables().projects["trl"].schema_defaults("grpo").get(name)


def _drop(collected: CollectedKeys, key: str, why: str) -> None:
    """Leave a key out of the recipe, and say so at its place unless it asked for nothing."""
    if (value := collected.recipe.pop(key, None)) is None:
        return
    place = next((name for name in (key, DERIVED.get(key)) if name in collected.places), None)
    if place is None:
        collected.notes.append(f"{key}: {why}")
    elif value:
        collected.note(place, why)
    else:
        collected.idle.append(_name_at(collected.places[place]))


def _name_at(place: str) -> str:
    """The key in `file:line: key is value`."""
    return place.partition(" is ")[0].rpartition(": ")[2]


def _defaults_of_trl(collected: CollectedKeys) -> None:
    """TRL's defaults of GRPO that are not ours, for axolotl's files, which it trains."""
    ours: dict[str, Any] = {f"rounds.{key}": info.default for key, info in RoundsSection.model_fields.items()}
    ours |= {f"objective.{key}": info.default for key, info in GRPO.model_fields.items() if key != "name"}
    own = tables().projects["trl"].own_defaults("grpo", ())
    silent = own.keys() & ours.keys() - {*collected.recipe, *collected.given}
    if added := {key: own[key] for key in own if key in silent and own[key] != ours[key]}:
        collected.recipe |= added
        given = ", ".join(f"{key} {show(value)}" for key, value in added.items())
        collected.notes.append(f"not in the file, so TRL's defaults hold: {given}")


def _rewards(collected: CollectedKeys) -> None:
    """`rounds.reward_funcs`, and what the plugin has to have that registers them."""
    model, written = collected.take("reward_model"), collected.take("reward_funcs", [])
    own = collected.project.fields.get("reward_funcs") if collected.project is not None else None
    if model is None and not written and own is not None and own.default and own.default[0]:
        written = own.default[0]
        collected.places["~reward_funcs"] = f"not in the file: reward_funcs {show(written)}"
    if model is None and not written:
        collected.changes.append(
            "no reward functions in the file: write rounds.reward_funcs, and functions of these names in a file of"
            " plugins (docs/recipes.md#rounds)"
        )
        return
    # TRL's script has the reward model before the functions, and the weights in that order.
    models = [] if model is None else [model if is_model(model) else f"./{model}"]
    functions = [name for name in written if not is_model(name)]
    names = {name: MADE.get(name, (name.rpartition(".")[2],))[0] for name in functions}
    collected.recipe["rounds.reward_funcs"] = models + [names.get(name, name) for name in written]
    if functions:
        collected.recipe["plugins"] = [PLUGIN]
        if odd := [name for name in functions if not all(part.isidentifier() for part in name.split("."))]:
            collected.change("~reward_funcs", f"{show(odd[0])} is no name of a function; write functions in {PLUGIN}")
        else:
            plugin = _plugin_of_open_r1(collected, functions) if _is_open_r1(collected) else _plugin(functions)
            lines = "".join(f"\n    {line}" for line in plugin)
            collected.note(
                "~reward_funcs",
                f"write {PLUGIN} beside the recipe, which makes these functions known; they are called as TRL calls"
                f" them, and must return a number where TRL takes None:{lines}",
            )
    collected.notes.append(
        "each row has a prompt, a text or messages, and what the reward functions ask for; one with another name is"
        " data.columns: {prompt: COLUMN}"
    )


def _is_open_r1(collected: CollectedKeys) -> bool:
    return collected.project is not None and collected.project is tables().projects["open-r1"]


def _plugin_of_open_r1(collected: CollectedKeys, functions: list[str]) -> list[str]:
    """The lines of a plugin that asks open-r1 itself for its functions, with the arguments that the file has."""
    own = collected.project.fields if collected.project is not None else {}
    given = {
        key: value
        for key, value in collected.values.items()
        if key in own and own[key].of_class == OF_REWARDS and key not in ("reward_funcs", "dataset_prompt_column")
    }
    arguments = "".join(f", {key}={value!r}" for key, value in given.items())
    return [
        "from cookbook.config.reward_functions import reward",
        "from open_r1.configs import GRPOScriptArguments",
        "from open_r1.rewards import get_reward_funcs",
        f'script = GRPOScriptArguments(dataset_name="", reward_funcs={functions!r}{arguments})',
        "for name, function in zip(script.reward_funcs, get_reward_funcs(script)):",
        "    function.__name__ = name",
        "    reward(function)",
    ]


def _convert_prompt(collected: CollectedKeys) -> None:
    """A prompt that is a text is a user's message in open-r1, behind its system_prompt."""
    if not collected.take("asks_user"):
        return
    if collected.values.get("system_prompt"):
        collected.notes.append(
            "a prompt is a chat there: write each as messages, of the system_prompt and of the user with the text"
        )
    else:
        collected.recipe["rounds.user_message"] = "{prompt}"
        collected.notes.append("a prompt is a user's message there: rounds.user_message '{prompt}'")


def _plugin(functions: list[str]) -> list[str]:
    """The lines of a plugin that registers these functions, whose names may have a module before them."""
    parts = [name.rpartition(".") for name in functions]
    is_of_user = any(module for module, _, _ in parts)
    return [
        *(["import sys", 'sys.path.insert(0, "")  # TRL looks in the current folder too'] if is_of_user else []),
        "from cookbook.config.reward_functions import reward",
        *(f"from {module or OWN} import {name}{'' if module else BY_NAME}" for module, _, name in parts),
        *(f"reward({name}{MADE.get(name, ('', ''))[1]})" for _, _, name in parts),
    ]


def _sampler(collected: CollectedKeys) -> None:
    """`rounds.sampler`."""
    is_on = collected.take("vllm_use")
    settings = {key.removeprefix(VLLM): key for key in [*collected.other] if key.startswith(VLLM)}
    values = {name: collected.take(key.removeprefix("~")) for name, key in settings.items()}
    if not is_on:
        collected.idle += [_name_at(collected.places[key]) for key in settings.values()]
        return
    mode = values.get("mode")
    if mode is None and {"url", "host", "port"} & values.keys():
        mode = "server"
    if (mode or _of_trl("vllm_mode")) == "server":
        host = values.get("host")
        host = "localhost" if host in (None, _of_trl("vllm_server_host")) else host  # which is any of this machine
        port = values.get("port") or _of_trl("vllm_server_port")
        collected.recipe["rounds.sampler"] = str(values.get("url") or f"http://{host}:{port}").rstrip("/")
        collected.notes.append(
            "rounds.sampler: at this address `vllm serve` itself is started, with the folder that `cookbook rounds`"
            " names (docs/recipes.md#sampling-with-vllm), and not TRL's server"
        )
        for name in {"memory", "tensor_parallel_size"} & values.keys():
            collected.note(f"{VLLM}{name}", "an option of the server, which you start yourself: left out")
    else:
        parallel = values.get("tensor_parallel_size") or 1
        options = f" --tensor-parallel-size {parallel}" if parallel != 1 else ""
        collected.recipe["rounds.sampler"] = f"vllm{options}"
        if "memory" in values:
            collected.note(
                f"{VLLM}memory",
                "of a vLLM beside the trainer; here it has ended before a run begins: left out. rounds.sampler takes"
                " --gpu-memory-utilization",
            )
        for name in {"url", "host", "port"} & values.keys():
            collected.idle.append(_name_at(collected.places[f"{VLLM}{name}"]))
    if "length" in values:
        collected.settle("data.max_length", values["length"], f"{VLLM}length")
    corrects = values.get("correction", _of_trl("vllm_importance_sampling_correction"))
    how = values.get("correction_mode", _of_trl("vllm_importance_sampling_mode"))
    most = values.get("clip_max", _of_trl("vllm_importance_sampling_clip_max"))
    collected.changes.append(
        "with vLLM a ratio begins from the probability by which vLLM sampled; TRL's from the trainer's own, "
        + (f"weighted by that over vLLM's ({how}, at most {show(most)})" if corrects else "without a weight")
    )


def _numbers(collected: CollectedKeys, accumulation: int) -> None:
    """`rounds.num_rounds` and `rounds.prompts_per_round`, from the steps of the whole run."""
    recipe = collected.recipe
    per_process, given = collected.take("steps_per_generation"), collected.take("answers_per_generation")
    iterations = collected.take("num_iterations") or 1
    max_steps, epochs = recipe.pop("run.max_steps", None), recipe.pop("run.num_epochs", None)
    recipe["run.num_epochs"] = iterations
    micro, size = recipe.get("batch.micro_batch_size"), recipe.get("batch.global_batch_size")
    if micro is None or size is None:
        collected.changes.append(
            "no batch in the file: write batch.global_batch_size, in answers, rounds.prompts_per_round and num_rounds"
        )
        if max_steps is not None and "run.max_steps" in collected.places:
            collected.change("run.max_steps", "without a batch it says nothing of rounds; left out")
        return
    answers = given or (size if per_process is None else size * per_process // accumulation)
    if answers < size and size % answers == 0:
        answers = size  # which the same weights sample, in several parts
    generations = _value(collected, "num_generations")
    prompts = math.ceil(answers / generations)
    recipe["rounds.prompts_per_round"] = prompts
    if prompts * generations != answers:
        multiple = generations // math.gcd(answers, generations)
        is_open = collected.processes is None and given is None
        asks = f", which TRL refuses: it ran on a multiple of {multiple} processes, so give --processes" * is_open
        collected.changes.append(
            f"{answers} answers are sampled at a time there, no multiple of num_generations {generations}{asks}: a"
            f" round has {prompts * generations}"
        )
    if (prompts * generations) % size:
        collected.changes.append(
            f"the last step of a round may be smaller: its {prompts * generations} answers are no multiple of"
            f" batch.global_batch_size {size}"
        )
    steps = math.ceil(prompts * generations / size) * iterations
    collected.notes.append(
        f"a round samples {prompts * generations} answers to {prompts} prompts, and trains on them for"
        f" {_steps(steps)}; sampling and training take turns as often as there: more of rounds.prompts_per_round make"
        " fewer, longer rounds, with older samples"
    )
    if recipe.get("optim.name") != "sgd" or recipe.get("optim.momentum"):
        collected.changes.append(
            f"the optimizer's moments begin at zero in each round, after {_steps(steps)}; in TRL they go on"
        )
    rows = _count_rows(recipe.get("data.train"))
    for dotted, ours in collected.carried.items():
        if ours == "run.max_steps":
            collected.carried[dotted] = "rounds.num_rounds"
    if max_steps is not None:
        recipe["rounds.num_rounds"] = math.ceil(max_steps / steps)
        if max_steps % steps:
            collected.changes.append(
                f"the last round is trained to its end: {recipe['rounds.num_rounds'] * steps} steps, not {max_steps}"
            )
    elif rows is not None and rows >= prompts:
        recipe["rounds.num_rounds"] = math.ceil((epochs or 1) * (rows // prompts))
    else:
        collected.changes.append(
            f"how many rows there are is not known: write rounds.num_rounds, {epochs or 1} x the rows of data.train /"
            f" {prompts}, the prompts of a round"
        )


def _steps(count: int) -> str:
    return f"{count} step" + "s" * (count != 1)


def _count_rows(train: Any) -> int | None:
    """The rows of one JSONL file that is there."""
    if not isinstance(train, str) or not train.endswith(".jsonl") or not Path(train).is_file():
        return None
    with Path(train).open("rb") as lines:
        return sum(bool(line.strip()) for line in lines)


def _length(collected: CollectedKeys) -> None:
    """`data.max_length`, of a prompt with an answer."""
    prompt, answer = collected.take("max_prompt_length"), _value(collected, "max_completion_length")
    if prompt is not None:
        collected.change("~max_prompt_length", "a longer prompt is cut there, and here a mistake that is shown first")
        collected.recipe.setdefault("data.max_length", prompt + answer)
    elif "data.max_length" not in collected.recipe:
        collected.recipe["data.max_length"] = answer + PROMPT
        collected.notes.append(
            f"TRL has no limit of a prompt: data.max_length {answer + PROMPT} leaves it {PROMPT} tokens, and a longer"
            " one is a mistake that is shown first; raise it"
        )


PROMPT = 1024
"""Tokens of a prompt where the file does not limit it."""


def _left_out(collected: CollectedKeys) -> None:
    """Leave out what rounds do not know."""
    for key in HELD_OUT:
        _drop(collected, key, "held-out rows are not evaluated in rounds: left out")
    for key in RANKED:
        _drop(collected, key, "no checkpoint is evaluated in rounds: left out")
    for key in SAVED:
        _drop(collected, key, tables().texts["saved rounds"])
    columns = collected.recipe.get("data.columns")
    if isinstance(columns, dict) and columns.keys() == {"prompt"}:
        return
    for key in OF_ROWS:
        _drop(collected, key, "rounds read prompts, whole and all of them: left out")
