"""The end of a run that no longer gets better on held-out data."""

from __future__ import annotations

import torch

from moesaic.training.config import EarlyStoppingConfig
from moesaic.training.run_state import Position, RunState


class EarlyStopping:
    """Counts evaluations without improvement and keeps the weights of the best one.

    What it knows lies in the run's state, so that a resumed run stops where the uninterrupted one does.

    Args:
        config: patience, and what counts as better.
    """

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self.config = config

    def see(self, loss: float, state: RunState) -> None:
        """Take an evaluation in, while the model has the evaluated weights and ``position.best_eval`` is the old one.

        Args:
            loss: of the evaluation.
            state: of the run.
        """
        best = state.position.best_eval
        if best is None or loss < best - self.config.least:
            state.position.worse = 0
            if self.config.restore:
                state.best = {name: value.detach().clone() for name, value in state.model.state_dict().items()}
        else:
            state.position.worse += 1

    def over(self, position: Position) -> bool:
        """Whether patience has run out."""
        return position.worse >= self.config.patience

    @torch.no_grad()
    def restore(self, state: RunState) -> None:
        """Give the model the weights of the best evaluation."""
        if state.best:
            state.model.load_state_dict(state.best)
