"""Which class a checkpoint is opened with: the one that its configuration names, and never code that it brings."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

# What a configuration that does not fit its class ends in, somewhere inside the library.
CONFIGURATION_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
# Asked in this order where the configuration names no architecture.
_HEADS: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForImageTextToText, AutoModel)


def architecture(folder: Path, config: Mapping[str, Any]) -> tuple[type[PreTrainedModel], Any]:
    """The class of a checkpoint of transformers, and its configuration.

    ``architectures`` of config.json decides, so a model with a vision tower, an encoder-decoder, or a classifier opens
    as what it was saved as. Where it names none, the model type decides: a causal language model if there is one,
    else sequence to sequence, image and text to text, or the bare model.

    Args:
        folder: of the checkpoint.
        config: what config.json holds, with a ``model_type``.

    Returns:
        The class, and the configuration to build it from.

    Raises:
        ValueError: a model type or architecture that the installed transformers has not, named; said too where the
            checkpoint brings code for it, which is neither run nor offered.
    """
    kind = str(config["model_type"])
    listed = config.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if kind not in CONFIG_MAPPING:
        raise ValueError(_refusal(folder, config, f"the model type {kind!r}"))
    try:
        built = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except CONFIGURATION_ERRORS as error:
        raise ValueError(refusal_in_one_line(folder, config, error)) from error
    for name in names:
        found = model_class(name, kind)
        if found is not None:
            return found, built
    if names and config.get("auto_map"):
        raise ValueError(_refusal(folder, config, f"the architecture {names[0]!r} of the model type {kind!r}"))
    for head in _HEADS:
        mapped: Any = head._model_mapping.get(type(built), None)
        if mapped is not None:
            return mapped[0] if isinstance(mapped, tuple) else mapped, built
    raise ValueError(f"{folder}: transformers has no model for the model type {kind!r}")


def model_class(name: str, kind: str, module: str = "") -> type[PreTrainedModel] | None:
    """The model class ``name`` of the installed transformers or moesaic; None where there is none.

    Args:
        name: of the class.
        kind: model type, whose module is searched for classes that transformers does not export.
        module: where the class was when the checkpoint was written, asked first.
    """
    found: Any = None
    if module.startswith(("transformers.", "moesaic.")):
        found = getattr(_module(module), name, None)
    found = getattr(transformers, name, None) if found is None else found
    if found is None and kind in CONFIG_MAPPING:
        place = model_type_to_module_name(kind)
        found = getattr(_module(f"transformers.models.{place}.modeling_{place}"), name, None)
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def refusal_in_one_line(folder: Path, config: Mapping[str, Any], error: Exception, most: int = 300) -> str:
    """What a library said about a checkpoint that it cannot open, cut to a line that names the model type."""
    text = " ".join(str(error).split())
    said = text if len(text) <= most else f"{text[:most]} ..."
    return f"{folder} (model type {config['model_type']!r}) cannot be opened: {type(error).__name__}: {said}"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:  # renamed since, or a type without a file of its own
        return None


def _refusal(folder: Path, config: Mapping[str, Any], what: str) -> str:
    if config.get("auto_map"):
        return (
            f"{folder} brings code of its own (auto_map in config.json) for {what}, which the installed transformers"
            " does not know: moesaic does not run code from checkpoints"
        )
    return f"{folder}: the installed transformers {transformers.__version__} does not know {what}"
