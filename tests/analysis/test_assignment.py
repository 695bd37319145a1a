import math

import pytest
import torch

from moesaic.analysis.assignment import load_cv, load_entropy, mutual_information, routing_metrics
from moesaic.routing import Routing


def assign(ids: list[list[int]], experts: int) -> Routing:
    ids_TK = torch.tensor(ids)
    return Routing(ids_TK, (ids_TK < experts).float(), experts)


def test_even_and_collapsed_loads() -> None:
    even, collapsed = torch.tensor([5, 5, 5, 5]), torch.tensor([20, 0, 0, 0])
    assert load_entropy(even) == pytest.approx(1.0)
    assert load_entropy(collapsed) == 0.0
    assert load_cv(even) == 0.0
    assert load_cv(collapsed) == pytest.approx(math.sqrt(3))
    assert load_entropy(torch.tensor([3])) == 0.0
    assert load_cv(torch.zeros(4, dtype=torch.int64)) == 0.0


def test_information_is_the_label_entropy_when_experts_tell_labels_apart() -> None:
    routing = assign([[0], [0], [1], [2]], 4)
    labels = torch.tensor([0, 0, 1, 2])
    entropy = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    assert mutual_information(routing, labels) == pytest.approx(entropy)
    assert mutual_information(routing, torch.zeros(4, dtype=torch.int64)) == 0.0
    assert mutual_information(assign([[0], [1], [0], [1]], 2), torch.tensor([0, 0, 1, 1])) == pytest.approx(
        0, abs=1e-12
    )


def test_empty_slots_count_nowhere() -> None:
    bare, padded = assign([[0], [1]], 2), assign([[0, 2], [2, 1]], 2)
    labels = torch.tensor([0, 1])
    assert routing_metrics(bare, labels) == routing_metrics(padded, labels)
    assert routing_metrics(bare, labels)["mutual_information"] == pytest.approx(math.log(2))
    assert "mutual_information" not in routing_metrics(bare)


@pytest.mark.parametrize("labels", [torch.zeros(3, dtype=torch.int64), torch.zeros(2), torch.tensor([0, -1])])
def test_labels_that_do_not_fit_are_refused(labels: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="label_T"):
        mutual_information(assign([[0], [1]], 2), labels)
