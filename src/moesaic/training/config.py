"""What a training run is told: dataclasses, read strictly from YAML."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from moesaic.formats.arguments import check_count
from moesaic.routing.parameters import ROLES

SCHEDULES = ("cosine", "wsd", "linear", "constant")
OPTIMIZERS = ("adamw", "muon")
BUNDLED = "shakespeare"  # as data.path: the text that ships with the package
EXPERT_RULES = ("each", "stack", "adamw")


@dataclass
class StageConfig:
    """A stretch of the run with a batch shape of its own.

    Args:
        until: progress in (0, 1] at which the stage ends.
        batch: sequences per micro-batch.
        length: tokens per sequence.
    """

    until: float
    batch: int
    length: int

    def __post_init__(self) -> None:
        _within("until", self.until, 0, 1, open_low=True)
        check_count("batch", self.batch, 1)
        check_count("length", self.length, 1)


@dataclass
class ScheduleConfig:
    """Learning rate over the run, as a factor of each group's own rate.

    Args:
        kind: ``"cosine"``, ``"wsd"`` (warmup, stable, linear decay), ``"linear"`` (decay from the start) or
            ``"constant"``.
        warmup: steps of linear warmup.
        decay: fraction of the run over which ``"wsd"`` decays.
        final: factor at the end.
    """

    kind: str = "cosine"
    warmup: int = 20
    decay: float = 0.3
    final: float = 0.0

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, SCHEDULES)
        check_count("warmup", self.warmup, 0)
        _within("decay", self.decay, 0, 1, open_low=True)
        _within("final", self.final, 0, 1)


@dataclass
class MuonConfig:
    """Orthogonalised momentum for matrices (see :class:`moesaic.training.muon.Muon`).

    Args:
        lr: learning rate of matrices.
        momentum: of the gradient average (Nesterov).
        momentum_warmup: steps over which the momentum rises from 0.85.
        weight_decay: decoupled, of the matrices that Muon moves; None (``null``) for the optimizer's ``weight_decay``.
        iterations: polynomial steps towards the orthogonal factor, 1 to 8.
        every: orthogonalise every n-th step; between, the last direction is reused.
        experts: ``"each"`` orthogonalises every expert's matrix, ``"stack"`` the experts side by side as one matrix
            (cheaper), ``"adamw"`` leaves experts to AdamW.
        expert_lr: learning rate of experts' matrices; ``lr`` by default.
    """

    lr: float = 0.02
    momentum: float = 0.95
    momentum_warmup: int = 200
    weight_decay: float | None = None
    iterations: int = 5
    every: int = 1
    experts: str = "each"
    expert_lr: float | None = None

    def __post_init__(self) -> None:
        _positive("lr", self.lr)
        _within("momentum", self.momentum, 0, 1, open_high=True)
        check_count("momentum_warmup", self.momentum_warmup, 0)
        if self.weight_decay is not None:
            _within("weight_decay", self.weight_decay, 0, math.inf)
        check_count("iterations", self.iterations, 1, 8)
        check_count("every", self.every, 1)
        _one_of("experts", self.experts, EXPERT_RULES)
        if self.expert_lr is not None:
            _positive("expert_lr", self.expert_lr)


@dataclass
class OptimizerConfig:
    """Which rule moves which parameter.

    Routers, norms, biases and scalars never decay.

    Args:
        name: ``"adamw"`` for everything, or ``"muon"`` for matrices (roles dense, expert-in, expert-out) and AdamW
            for the rest.
        lr: AdamW's learning rate.
        role_lr: learning rate of a role where it differs, such as ``{"router": 0.002, "embedding": 0.008}``.
        betas: AdamW's.
        eps: AdamW's.
        weight_decay: decoupled; of every matrix, also of those that Muon moves unless ``muon.weight_decay`` is set.
        fused: one fused kernel; by default where torch has it.
        muon: for ``name="muon"``.
    """

    name: str = "adamw"
    lr: float = 1e-3
    role_lr: dict[str, float] = field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    fused: bool | None = None
    muon: MuonConfig = field(default_factory=MuonConfig)

    def __post_init__(self) -> None:
        _one_of("name", self.name, OPTIMIZERS)
        _positive("lr", self.lr)
        for role, rate in self.role_lr.items():
            if role not in ROLES:
                raise ValueError(f"role_lr names the role {role!r}; allowed are {ROLES}")
            _within(f"role_lr[{role!r}]", rate, 0, math.inf)
        for beta in self.betas:
            _within("betas", beta, 0, 1, open_high=True)
        _positive("eps", self.eps)
        _within("weight_decay", self.weight_decay, 0, math.inf)


@dataclass
class AverageConfig:
    """Exponential moving average of the weights.

    Args:
        decay: kept share a step, in (0, 1); None for no average.
        start: progress at which averaging begins.
        every: average every n-th step (the decay is raised to the n-th power).
        use: evaluate and finally save the averaged weights.
    """

    decay: float | None = None
    start: float = 0.0
    every: int = 1
    use: bool = True

    def __post_init__(self) -> None:
        if self.decay is not None:
            _within("decay", self.decay, 0, 1, open_low=True, open_high=True)
        _within("start", self.start, 0, 1, open_high=True)
        check_count("every", self.every, 1)


@dataclass
class EarlyStoppingConfig:
    """End a run when evaluations stop getting better.

    Args:
        patience: evaluations without improvement after which the run ends; needs ``eval_every``.
        least: by how much the loss must fall below the best one to count as better.
        restore: whether the finished model has the weights of the best evaluation.
    """

    patience: int = 3
    least: float = 0.0
    restore: bool = True

    def __post_init__(self) -> None:
        check_count("patience", self.patience, 1)
        _within("least", self.least, 0, math.inf)


@dataclass
class TrainConfig:
    """A training run.

    Args:
        steps: optimizer steps; whichever of ``steps`` and ``seconds`` is reached first ends the run.
        seconds: wall-clock seconds, everything from the start of training counted (compilation, evaluation,
            checkpoints). Progress is elapsed / seconds then, so such a run resumes but not bit for bit.
        batch: sequences (rows, windows ...) per micro-batch; a task may make batches of its own.
        length: tokens per sequence, where the task has sequences.
        accumulate: micro-batches per optimizer step.
        stages: batch shapes over the run; replaces ``batch`` and ``length``.
        clip: largest gradient norm; None for no clipping.
        seed: of data order and dropout.
        precision: ``"float32"`` or ``"bfloat16"`` (autocast).
        checkpointing: recompute activations in backward.
        compile: torch.compile the model (needs a C++ compiler on the CPU).
        hold_memory: ask the C library to keep freed memory in the process (glibc; about a tenth faster on a CPU at
            small shapes, and the process stays as large as it once was).
        aux: factor on all auxiliary losses; 1 takes them as the model gives them.
        main: factor on the task's own loss.
        log_every: steps between lines of metrics.
        eval_every: steps between evaluations; 0 for one at the end.
        eval_batches: batches an evaluation; 0 for the whole held-out part.
        save_every: steps between checkpoints; 0 for one at the end.
        keep: checkpoints kept.
        schedule, optimizer, average: see their classes.
        early_stopping: None for none.
    """

    steps: int | None = None
    seconds: float | None = None
    batch: int = 16
    length: int = 128
    accumulate: int = 1
    stages: list[StageConfig] = field(default_factory=list)
    clip: float | None = 1.0
    seed: int = 0
    precision: str = "float32"
    checkpointing: bool = False
    compile: bool = False
    hold_memory: bool = False
    aux: float = 1.0
    main: float = 1.0
    log_every: int = 50
    eval_every: int = 0
    eval_batches: int = 0
    save_every: int = 0
    keep: int = 1
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    average: AverageConfig = field(default_factory=AverageConfig)
    early_stopping: EarlyStoppingConfig | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None:
            _positive("seconds", self.seconds)
        elif self.steps is None:
            raise ValueError("steps and seconds are both missing: one of them must end the run")
        if self.steps is not None:
            check_count("steps", self.steps, 1)
        for name in ("batch", "length", "accumulate", "log_every", "keep"):
            check_count(name, getattr(self, name), 1)
        for name in ("eval_every", "eval_batches", "save_every", "seed"):
            check_count(name, getattr(self, name), 0)
        if self.clip is not None:
            _positive("clip", self.clip)
        _one_of("precision", self.precision, ("float32", "bfloat16"))
        for name in ("aux", "main"):
            _within(name, getattr(self, name), 0, math.inf)
        if self.early_stopping is not None and not self.eval_every:
            raise ValueError("early_stopping needs evaluations: set eval_every to the steps between them, got 0")
        ends = [stage.until for stage in self.stages]
        if ends and (ends != sorted(set(ends)) or ends[-1] != 1):
            raise ValueError(f"stages must have rising 'until' that end at 1, got {ends}")

    def all_stages(self) -> list[StageConfig]:
        """The stages, one when none are given."""
        return self.stages or [StageConfig(1.0, self.batch, self.length)]


@dataclass
class DataConfig:
    """The text of a run.

    Args:
        path: file or folder, see :func:`moesaic.data.text.read_documents`, relative to the config file; or
            ``"shakespeare"`` for the bundled text.
        format: ``"text"``, ``"jsonl"`` or ``"datasets"``; by default from the path.
        field: key or column of the text.
        subset: split of a `datasets` folder.
        tokenizer: ``"byte"``, ``"char"``, ``"bpe"`` or the path of a tokenizer.json.
        vocab_size: of ``"bpe"``.
        eval: share held out for evaluation, before the test part.
        test: share at the end that training never sees and evaluation never reads.
    """

    path: str = ""
    format: str | None = None
    field: str = "text"
    subset: str | None = None
    tokenizer: str = "byte"
    vocab_size: int = 4096
    eval: float = 0.1
    test: float = 0.0

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("data.path is missing: name a text file, a .jsonl file or a datasets folder")
        check_count("vocab_size", self.vocab_size)
        for name in ("eval", "test"):
            _within(name, getattr(self, name), 0, 1, open_high=True)
        if self.eval + self.test >= 1:
            raise ValueError(f"eval + test must be below 1, got {self.eval} + {self.test}")


@dataclass
class RunConfig:
    """A config file: ``model``, ``data``, ``train``.

    Args:
        model: arguments of :class:`moesaic.models.MoesaicConfig`; ``vocab_size`` comes from the tokenizer.
        data: see :class:`DataConfig`.
        train: see :class:`TrainConfig`.
        out: folder of the run; relative to the current folder.
    """

    model: dict[str, Any]
    data: DataConfig
    train: TrainConfig
    out: str | None = None


def as_dict(config: Any) -> dict[str, Any]:
    """A config dataclass as plain values."""
    return dataclasses.asdict(config)


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and positive, got {value}")


def _within(
    name: str, value: float, low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> None:
    inside = (value > low if open_low else value >= low) and (value < high if open_high else value <= high)
    if not inside or not math.isfinite(value):
        raise ValueError(
            f"{name} must lie in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}, got {value}"
        )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
