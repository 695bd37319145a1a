"""Makes ``AutoConfig`` and ``AutoModelForCausalLM`` know our model without importing transformers before its user."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def register_when_loaded() -> None:
    """Register with those auto classes that are loaded, and with the others as soon as somebody loads them.

    Importing transformers takes seconds, and most users of the routing and expert layers never need it; so
    ``import moesaic`` only leaves a watcher on the import path, which registers each class once.
    """
    waiting = dict(_ACTIONS)
    for name in [name for name in waiting if name in sys.modules]:
        waiting.pop(name)()
    if waiting and not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(waiting))


def register_config() -> None:
    """Tell ``AutoConfig`` about our configuration; doing it twice is harmless."""
    from transformers import AutoConfig

    from moesaic.models.configuration import MoesaicConfig

    AutoConfig.register(MoesaicConfig.model_type, MoesaicConfig, exist_ok=True)


def register_model() -> None:
    """Tell ``AutoModelForCausalLM`` about our model; doing it twice is harmless."""
    from transformers import AutoModelForCausalLM

    from moesaic.models.configuration import MoesaicConfig
    from moesaic.models.modeling import MoesaicForCausalLM

    register_config()
    AutoModelForCausalLM.register(MoesaicConfig, MoesaicForCausalLM, exist_ok=True)


_ACTIONS: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": register_config,
    "transformers.models.auto.modeling_auto": register_model,
}


class _Watcher(importlib.abc.MetaPathFinder):
    """Waits for the auto classes to be imported, then stands aside."""

    def __init__(self, waiting: dict[str, Callable[[], None]]) -> None:
        self.waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = self.waiting.pop(fullname, None)
        if action is None:
            return None
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader, action)
        return spec


class _ThenRegister(importlib.abc.Loader):
    """Loads a module as its own loader does, then registers ours, which must find that module finished."""

    def __init__(self, loader: importlib.abc.Loader, action: Callable[[], None]) -> None:
        self.loader = loader
        self.action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """The module, as its own loader makes it."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then register."""
        self.loader.exec_module(module)
        self.action()
