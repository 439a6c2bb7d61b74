"""Forms of the answers that commands give a program, from which docs/for_programs.md is written.

A key stays as it is from one release to the next; a new one may come.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from cookbook.system.described import DescribedModel


class Form(DescribedModel, BaseModel):
    model_config = ConfigDict(extra="forbid", defer_build=True)


class Message(Form):
    """A mistake or a warning."""

    text: str
    """All of it, as a person reads it."""
    file: str | None
    """The file that it is about; null: it is about the command line."""
    line: int | None
    """Line in the file."""
    key: str | None
    """The recipe's or strategy's key, as `optim.learning_rate`, or the option, as `--samples`."""
    value: Any
    """The value that the key has now; null: none, or the message is about no one key."""
    problem: str
    """The mistake, without its place."""
    instead: str | None
    """Advice: the value to write, or a thing to do; null: the message has none."""


class Answer(Form):
    """The keys of every answer. With `errors` the others may be missing."""

    errors: list[Message] = []
    """Mistakes, for which the exit code is 2."""
    warnings: list[Message] = []
    """Settings that work, and may not be what you want."""


class ReadRows(Form):
    set: str
    """The recipe's key of the set, as `data.train`."""
    path: str | None
    rows: int
    kind: str
    """The kind of the rows, as `chat`."""
    dropped: dict[str, int] = {}
    """Rows that are left out, by reason."""
    notes: list[str] = []


class CheckedRecipe(Form):
    recipe: str
    strategy: str
    """The strategy's file."""
    processes: int
    batch: str
    """The arithmetic of a step's batch."""
    notes: list[str]
    rows: list[ReadRows] = []
    """With `--data`: the rows of each set."""


class CheckAnswer(Answer):
    """`cookbook check`"""

    recipes: list[CheckedRecipe]
    """The recipes without a mistake."""
    strategies: list[str]
    """The strategy files without a mistake, where no recipe was named."""


class Piece(Form):
    text: str
    is_trained: bool


class SeenSample(Form):
    sample: int
    """Number of the sample in the training set."""
    sequence: str | None
    """Which of a sample's sequences: chosen or rejected, for example."""
    num_tokens: int
    num_trained: int
    """Tokens that the loss is of."""
    pieces: list[Piece]
    """The text as the model sees it, cut where training of tokens begins or ends."""


class TokenFigures(Form):
    set: str
    """The recipe's key of the set, as `data.train`."""
    num_samples: int
    num_tokens: int
    mean_tokens: float
    """Mean of a sequence, as the next two are of one."""
    median_tokens: float
    max_tokens: int
    trained_ratio: float
    """Trained tokens, of all."""


class Forwards(Form):
    forwards_a_step: float
    padding_ratio: float
    """Positions that are padding, of all."""


class LengthRange(Form):
    least: int
    most: int
    rows: int
    is_over: bool
    """True if the range is above `data.max_length`."""


class PreviewAnswer(Answer):
    """`cookbook preview`"""

    recipe: str
    samples: list[SeenSample]
    sets: list[TokenFigures]
    padded: Forwards
    """The first steps on one process, if each sample is a row of its own."""
    packed: Forwards
    """The same, if samples are packed into rows."""
    rows_are: str
    """Which of both a run's rows are, and why."""
    lengths: list[LengthRange]
    """Tokens of the rows as they are in the data."""
    steps_per_epoch: int | None
    """null: not known of a stream."""
    notes: list[str]


class TimeShares(Form):
    data: float
    evaluation: float
    saving: float
    step: float
    """Without its wait for data."""


class AdviceForPrograms(Form):
    what: str
    gain_ratio: float
    """The share of the time that this can save."""
    about: str
    """The word before the gain: "up to" for an upper limit, "about" for an estimate."""


class StepTime(Form):
    part: str
    taken_seconds: float
    forecast_low_seconds: float
    forecast_high_seconds: float


class WhySlow(Answer):
    """`cookbook why-slow`"""

    run: str
    num_steps: int
    """Steps that are counted: the first ones, which compile and allocate, are not."""
    shares: TimeShares
    """Parts of the run's time, which add up to 1."""
    seconds_a_step: float
    """With all pauses."""
    tokens_per_second: float
    """With all pauses."""
    mfu: float | None
    """Model FLOPs utilization of the steps alone; null: not known of this hardware."""
    compiled: dict[str, Any] | None
    """Counts of what torch's compiler made of the layers; null: nothing is compiled."""
    profiles: list[dict[str, Any]]
    """The records of profiled steps, of each profiled rank."""
    forecast: list[StepTime]
    """Times of a step beside what was forecast; empty: see `no_forecast`."""
    no_forecast: str | None
    """Why there is no forecast."""
    advice: list[AdviceForPrograms]
    """Changes to make, the largest gain first."""


class ShownAnswer(Form):
    prompt: str
    answer: str
    """With several messages: each with its role, and whether it is trained."""
    reward: float | None


class WatchedRound(Form):
    round: int
    """The round that trains, or the newest that did; 0 before the first."""
    num_rounds: int
    is_training: bool
    """False while the next round is sampled, or after the last."""
    reward: float | None
    """The mean of the round's answers."""
    completion_tokens: float | None
    ended: float | None
    """Share of the answers that ended by themselves."""
    turns: float | None
    staleness: int | None
    """Rounds by which the weights that sampled were behind."""
    kl_sampler_trainer: float | None
    num_answers: int | None
    answers: list[ShownAnswer]
    """Three: of the highest, the median and the lowest reward."""


class WatchedRun(Form):
    run: str
    state: str
    """starting, running, exporting, stopped, finished, failed, killed or unknown."""
    reason: str | None
    has_ended: bool
    step: int
    max_steps: int | None
    loss: float | None
    """The mean of the last steps, at most ten."""
    eval_loss: float | None
    """The last evaluation's."""
    tokens_per_second: float | None
    """The median of the last steps, at most ten."""
    seconds_left: float | None
    """In rounds by the median of those that are over, with their sampling."""
    price: float | None
    """The cost of all starts so far; null: they had no run.price_per_gpu_hour."""
    round: WatchedRound | None
    """The newest of `cookbook rounds`."""


class WatchAnswer(Answer):
    """`cookbook watch`: one look, after which the command ends"""

    runs: list[WatchedRun]


class HeldOut(Form):
    set: str
    """The name of the evaluation set; empty: it has none."""
    first_loss: float
    last_loss: float
    first_step: int
    """Step of the first evaluation."""
    step: int
    """Step of the last one."""
    metrics: dict[str, float]
    """All means of the last evaluation, as in metrics.jsonl."""
    rows: str | None
    """A digest of its tokens, without which losses do not compare; null: the run did not record it."""


class BestBy(Form):
    metric: str
    greater_is_better: bool


class RunSummary(Form):
    run: str
    state: str
    reason: str | None
    first_step: int
    last_step: int
    first_loss: float
    last_loss: float
    """The mean of the last steps, at most ten."""
    epochs: float
    held_out: list[HeldOut]
    objective: dict[str, Any]
    """Settings of the objective by their keys: a loss under others is another loss."""
    rows: str | None
    """A digest of the training rows; null: the run did not record it."""
    best_by: BestBy | None
    """The metric that compares evaluations, of run.metric_for_best_model; null: the held-out loss."""
    training_seconds: float | None
    """null: not measured, as on simulated GPUs."""
    tokens_per_second: float | None
    """The median step's, of all processes."""
    peak_memory_gib: float | None
    """The largest process's."""
    price: float | None
    """The cost of all starts; null: they had no run.price_per_gpu_hour."""
    strategy: str | None
    processes: int | None
    model: str | None
    """The exported model; null: the run was not finished."""


class SettingThatDiffers(Form):
    key: str
    values: list[str]
    """Each run's, in their order."""
    affects: str


class LossDifference(Form):
    """The largest difference between the losses of two runs at one step."""

    runs: list[str]
    step: int
    difference: float


class ReportAnswer(Answer):
    """`cookbook report`"""

    runs: list[RunSummary]
    differences: list[SettingThatDiffers]
    """Settings in which the runs differ; of one run, none."""
    best: str | None
    """Among several runs, the one whose last held-out loss is least; null: they have no held-out set in common, or
    their objectives or these rows differ."""
    loss_difference: LossDifference | None
    """From the first of several runs; null: no other has a step in common with it."""
    page: str
    """The HTML page that was written."""


class EvaluateAnswer(Answer):
    """`cookbook evaluate`"""

    model: str
    sets: list[dict[str, Any]]
    """For each set its means, as the lines of metrics.jsonl have them, and `perplexity`."""


class ConvertAnswer(Answer):
    """`cookbook convert`"""

    source: str
    """The files, and whose they are."""
    recipe: str | None
    """The recipe that was written; null: the files have no training."""
    strategy: str
    """The name of the recipe's strategy."""
    files: list[str]
    """All files that were written."""
    settings: dict[str, Any]
    """The recipe's keys and values, by section."""
    changes: list[str]
    """Settings that are not in the recipe, and train otherwise, or may."""
    notes: list[str]
    """Things to know, or to decide."""
    idle: list[str]
    """Settings that need nothing."""
    to_correct: list[Message]
    """Mistakes of the recipe, to be corrected before it runs."""


class PlanAnswer(Answer):
    """`cookbook plan` for some machines, or for any GPU; in bytes and seconds"""

    recipe: str
    """The recipe, or the model."""
    model: dict[str, Any]
    steps: int | None
    machines: dict[str, Any] = {}
    a_step: dict[str, Any] = {}
    forecasts: list[dict[str, Any]] = []
    """A strategy each, the best first: `strategy`, `verdict`, `why`, `memory`, `step_seconds` and more.
    `tokens_per_second_a_gpu_if_fused` are those of programs that fuse kernels."""
    scaling_reference: dict[str, Any] | None = None
    """The fewest GPUs that fit, with their best strategy and its speed: each strategy's `scaling_efficiency` is its
    tokens/s of a GPU over those, between the slow ends and the fast ends of both."""
    sizes: list[dict[str, Any]] = []
    """Other sizes of meshes that were tried."""
    by_auto: list[dict[str, Any]] = []
    """Settings that `auto` would take in the place of the recipe's numbers."""
    next_rung: str | None = None
    """The first change that makes the recipe fit, where it does not."""
    sampler: dict[str, Any] | None = None
    """The sampler of a recipe with rounds: `fits`, `total`, `weights`, `cache` and more; `seconds` are those of a
    round's sampling."""
    no_time: str | None = None
    """The reason why there are no times."""
    time_caveat: str | None = None
    cards: list[dict[str, Any]] = []
    """A kind of GPU each, for any GPU; the next keys are for any GPU too."""
    refused: Any = None
    """Kinds that cannot, with the reason."""
    notes: list[str] = []
    tokens: int | None = None
    """Tokens that times and prices are of, where the number of steps is not known."""
    a_sample: dict[str, Any] = {}
    prices_from: str | None = None
    page: str | None = None
    """The page that was written with `--html`."""


class ExplainAnswer(Answer):
    """`cookbook explain` of one recipe, or of two things that are compared"""

    files: dict[str, Any] = {}
    quantities: dict[str, Any] = {}
    """Each number of the run with its value and where it is from."""
    bytes_a_parameter: Any = None
    learning_rate: dict[str, Any] = {}
    deepspeed: Any = None
    command: list[str] = []
    """The line that launches the run, word by word."""
    names: list[str] = []
    """The two things that are compared; the next keys are of a comparison too."""
    differences: list[dict[str, Any]] = []
    precision: list[dict[str, Any]] = []
    same_curve: bool | None = None


class FindingForPrograms(Form):
    check: str
    status: Literal["ok", "warning", "failure"]
    text: str
    remedy: str
    """A command, or what to write where; empty for ok alone."""


class DoctorAnswer(Answer):
    """`cookbook doctor`"""

    ready: bool
    seconds: float
    findings: list[FindingForPrograms]


class CheckpointAnswer(Answer):
    """`cookbook checkpoint`"""

    checkpoints: list[dict[str, Any]]
    """The newest first: `path`, `step`, `broken` (why, or null), `strategies` that can resume it, `marks` and more."""


Verdict = Literal[
    "never started",
    "starting",
    "running",
    "exporting",
    "killed",
    "stopped",
    "finished",
    "failed",
    "diverged",
    "out of memory",
    "hung",
    "damaged",
]


class NextStep(Answer):
    """`cookbook next`"""

    run: str
    verdict: Verdict
    why: str
    step: int
    max_steps: int | None
    checkpoint: str | None
    """The newest checkpoint, from which the run can resume."""
    price: float | None
    """The cost of all starts so far; null: they had no run.price_per_gpu_hour."""
    command: str | None
    """The command to type now; null: wait, or see `advice`."""
    advice: str | None
    """Things to do first, where a command alone does not mend it."""


ANSWERS: dict[str, type[Answer]] = {
    "check": CheckAnswer,
    "explain": ExplainAnswer,
    "preview": PreviewAnswer,
    "plan": PlanAnswer,
    "doctor": DoctorAnswer,
    "convert": ConvertAnswer,
    "watch": WatchAnswer,
    "next": NextStep,
    "report": ReportAnswer,
    "why-slow": WhySlow,
    "evaluate": EvaluateAnswer,
    "checkpoint": CheckpointAnswer,
}
