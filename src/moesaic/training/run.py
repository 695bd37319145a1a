"""A run from its config file: text, tokenizer, model, trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from moesaic.data.tokenize import Tokenizer
from moesaic.formats.checkpoint import latest_checkpoint
from moesaic.models.configuration import MoesaicConfig
from moesaic.models.modeling import MoesaicForCausalLM
from moesaic.training.config import RunConfig
from moesaic.training.observers import Observer
from moesaic.training.report import TrainReport
from moesaic.training.run_files import checkpoints_of
from moesaic.training.text_data import TextData, load_text_data
from moesaic.training.trainer import Trainer


def train_from_config(
    config: RunConfig, *, resume: bool = False, device: str = "cpu", observers: Sequence[Observer] = ()
) -> TrainReport:
    """Do what a config file says.

    Args:
        config: see :class:`RunConfig`.
        resume: go on from the latest checkpoint in ``config.out``, with its tokenizer.
        device: where to train, as torch names it.
        observers: who listens.

    Raises:
        ValueError: no ``out``; a model argument that is unknown, or ``vocab_size``, which the tokenizer gives; see
            :class:`Trainer` and :func:`load_text_data`.
    """
    if config.out is None:
        raise ValueError("out is missing: name the folder of the run in the config or with --out")
    out = Path(config.out)
    tokenizer = Tokenizer.load(latest_checkpoint(checkpoints_of(out)).path) if resume else None
    data = load_text_data(config.data, seed=config.train.seed, tokenizer=tokenizer)
    model = build_model(config, data)
    nn.Module.to(model, _device(device))
    return Trainer(model, data, config.train, out=out, observers=observers).train(resume=resume)


def build_model(config: RunConfig, data: TextData) -> MoesaicForCausalLM:
    """The model of a run, its weights drawn from the run's seed.

    Raises:
        ValueError: an argument that the configuration does not know, or ``vocab_size``.
    """
    assert data.tokenizer is not None
    arguments = dict(config.model)
    if "vocab_size" in arguments:
        raise ValueError(f"model.vocab_size is given; the tokenizer decides it ({data.tokenizer.vocab_size})")
    allowed = sorted(name for name in MoesaicConfig.__annotations__ if name not in ("vocab_size", "moesaic_format"))
    unknown = sorted(set(arguments) - set(allowed))
    if unknown:
        raise ValueError(f"unknown key 'model.{unknown[0]}'; allowed are {allowed}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model_config = MoesaicConfig(
            vocab_size=data.tokenizer.vocab_size, eos_token_id=data.tokenizer.end_id, **arguments
        )
        model = MoesaicForCausalLM(model_config)
    if model.model.ngram is not None and model.model.ngram.min_count is not None:
        model.model.ngram.fit(data.train.tokens)
    return model


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}, which torch does not know: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r} and torch sees no CUDA device here: use cpu")
    return device
