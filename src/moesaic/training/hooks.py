"""What a method adds to training: it may act before and after each step, when the model grows, when a task begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from moesaic.routing import Routing

if TYPE_CHECKING:
    from moesaic.training.trainer import Trainer


class Hook:
    """Base of methods that take part in training; every method does nothing by default.

    A hook may change the model, its gradients, the optimizers. What it carries from step to step it gives out in
    :meth:`state`, so that a resumed run goes on as the uninterrupted one. Those who only listen are
    :class:`~moesaic.training.observers.Observer`.

    Attributes:
        name: under which its state is stored; different for each hook of a run.
    """

    name: str = "hook"

    def on_start(self, trainer: Trainer) -> None:
        """Training begins or goes on; model and optimizers are as the first step will find them."""

    def before_step(self, trainer: Trainer, routings: Sequence[Routing]) -> None:
        """Gradients are there and clipped, nothing has moved.

        Args:
            trainer: whose model and optimizers they are.
            routings: of the step's last micro-batch.
        """

    def after_step(self, trainer: Trainer) -> None:
        """Parameters and step state have moved. May change the model's structure: see :meth:`Trainer.model_changed`."""

    def on_growth(self, trainer: Trainer) -> None:
        """The model's structure has changed and the optimizers were built anew."""

    def on_task(self, trainer: Trainer, index: int) -> None:
        """Task ``index`` of a stream begins; see :func:`moesaic.training.stream.train_stream`."""

    def state(self) -> Mapping[str, Tensor]:
        """What a checkpoint keeps, name -> tensor."""
        return {}

    def load_state(self, trainer: Trainer, tensors: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`state` gave, before the weights are.

        A hook that has grown the model grows it here again, so that the saved weights fit.
        """


def check_hooks(hooks: Sequence[Hook]) -> None:
    """Refuse hooks that would overwrite each other's state.

    Raises:
        ValueError: two of one name, or a name that cannot be part of a tensor's.
    """
    names = [hook.name for hook in hooks]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two hooks are named {name!r}: give each a name of its own")
        if not name or "/" in name:
            raise ValueError(f"a hook is named {name!r}: a name must not be empty or hold '/'")
