"""Makes ``AutoConfig`` and ``AutoModelForCausalLM`` know our model, without importing transformers before its user does."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_TRIGGER = "transformers.models.auto.modeling_auto"


def register_when_loaded() -> None:
    """Register now if transformers' auto classes are loaded, else as soon as somebody loads them.

    Importing transformers takes seconds, and most users of the routing and expert layers never need it; so ``import moesaic``
    only leaves a watcher on the import path, which acts once and then stands aside.
    """
    if _TRIGGER in sys.modules:
        register()
    elif not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def register() -> None:
    """Tell transformers' auto classes about our configuration and model; doing it twice is harmless."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from moesaic.models.configuration import MoesaicConfig
    from moesaic.models.modeling import MoesaicForCausalLM

    AutoConfig.register(MoesaicConfig.model_type, MoesaicConfig, exist_ok=True)
    AutoModelForCausalLM.register(MoesaicConfig, MoesaicForCausalLM, exist_ok=True)


class _Watcher(importlib.abc.MetaPathFinder):
    """Waits for the auto classes to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TRIGGER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(importlib.abc.Loader):
    """Loads a module as its own loader does, then registers ours."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        # Registering imports the auto classes again, which must find this module finished.
        register()
