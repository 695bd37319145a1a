"""Makes ``AutoConfig`` and ``AutoModelForCausalLM`` know our model without importing transformers before its user."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # importing the abstract classes takes longer than all the rest of `import moesaic`
    Loader = MetaPathFinder = object

CONFIG_CLASSES = "transformers.models.auto.configuration_auto"
MODEL_CLASSES = "transformers.models.auto.modeling_auto"
MODEL_LAYERS = "transformers.modeling_layers"  # needed by our model, and itself an importer of the auto classes


def register_when_loaded() -> None:
    """Register with those auto classes that are loaded, and with the others as soon as somebody loads them.

    Importing transformers takes seconds, and most users of the routing and expert layers never need it; so
    ``import moesaic`` only leaves a watcher on the import path, which registers each class once. Our own modules may be
    half loaded when that happens; they therefore call this again on their last line.
    """
    waiting = {name: action for name, action in _ACTIONS.items() if name not in sys.modules}
    for name, action in _ACTIONS.items():
        if _is_loaded(name):
            action()
    if waiting and not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(waiting))


def register_config() -> None:
    """Tell ``AutoConfig`` about our configuration; doing it twice is harmless."""
    import moesaic.models.configuration as ours

    if hasattr(ours, "MoesaicConfig"):
        auto = sys.modules[CONFIG_CLASSES].AutoConfig
        auto.register(ours.MoesaicConfig.model_type, ours.MoesaicConfig, exist_ok=True)


def register_model() -> None:
    """Tell ``AutoModelForCausalLM`` about our model; doing it twice is harmless."""
    if MODEL_LAYERS in sys.modules and not hasattr(sys.modules[MODEL_LAYERS], "GradientCheckpointingLayer"):
        return  # somebody imports a model file first: done when the layers are loaded
    import moesaic.models.modeling as ours

    if hasattr(ours, "MoesaicForCausalLM"):
        register_config()
        model = ours.MoesaicForCausalLM
        sys.modules[MODEL_CLASSES].AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)


def _register_model_after_layers() -> None:
    if MODEL_CLASSES in sys.modules:
        register_model()


def _is_loaded(name: str) -> bool:
    """Whether a module was imported to its end; one that is being imported registers us itself when it is done."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


_ACTIONS: dict[str, Callable[[], None]] = {
    CONFIG_CLASSES: register_config,
    MODEL_CLASSES: register_model,
    MODEL_LAYERS: _register_model_after_layers,
}


class _Watcher(MetaPathFinder):
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


class _ThenRegister(Loader):
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
