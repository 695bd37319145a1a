"""Sequences from a mixture of hidden Markov models, a source that a router can discover."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class HMMMixture:
    """A mixture of hidden Markov models over one alphabet, in the manner of GINC (arXiv:2111.02080).

    Each model draws its transition rows from Dirichlet(``transition``) and its emission rows from
    Dirichlet(``emission``); a sequence draws one model, starts in a uniform state and stays with the model.

    Args:
        models: number of models.
        states: hidden states of each.
        symbols: size of the alphabet.
        transition: concentration of the transition rows; small means nearly deterministic.
        emission: concentration of the emission rows.
        seed: of the models themselves.

    Raises:
        ValueError: values that are not positive.
    """

    def __init__(
        self,
        models: int = 10,
        states: int = 10,
        symbols: int = 50,
        transition: float = 0.2,
        emission: float = 0.05,
        seed: int = 0,
    ) -> None:
        for name, size in (("models", models), ("states", states), ("symbols", symbols)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        for name, value in (("transition", transition), ("emission", emission)):
            if not value > 0:
                raise ValueError(f"{name} must be > 0, got {value}")
        random = np.random.default_rng(seed)
        self.models = models
        self.states = states
        self.symbols = symbols
        # Cumulative rows, so that a draw is a comparison with one uniform number.
        self._transition = random.dirichlet(np.full(states, transition), (models, states)).cumsum(-1)
        self._emission = random.dirichlet(np.full(symbols, emission), (models, states)).cumsum(-1)

    def sample(
        self, count: int, length: int, random: np.random.Generator, among: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw sequences.

        Args:
            count: B.
            length: S.
            random: where the draws come from.
            among: draw the model among the first so many only: a shift of the mixture.

        Returns:
            symbols (B, S) int64, and the model of each sequence (B,) int64.

        Raises:
            ValueError: ``among`` outside [1, models].
        """
        among = self.models if among is None else among
        if not 1 <= among <= self.models:
            raise ValueError(f"among must be between 1 and models = {self.models}, got {among}")
        model_B = random.integers(among, size=count)
        state_B = random.integers(self.states, size=count)
        uniform = random.random((2, length, count, 1))
        symbols = np.empty((count, length), dtype=np.int64)
        for step in range(length):
            symbols[:, step] = _draw(self._emission[model_B, state_B], uniform[0, step])
            state_B = _draw(self._transition[model_B, state_B], uniform[1, step])
        return torch.from_numpy(symbols), torch.from_numpy(model_B)


def _draw(cumulative: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    # The last entry may be 1 - 1e-16: no draw may fall behind it.
    drawn: np.ndarray = (cumulative[:, :-1] < uniform).sum(1)
    return drawn
