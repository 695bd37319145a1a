import pytest
import torch

from moesaic.analysis.routing_embedding import pooled_routing_embedding
from moesaic.models import record_routing, swap_routing
from moesaic.routing import Context, PairChoiceRouter, TopKRouter
from tests.models.families import build, run, token_ids
from tests.routing.helpers import padded, rows


def test_by_hand() -> None:
    x, context = padded([rows(3, seed=1), rows(5, seed=2)], "left", 5, filler=float("nan"))
    routings = [TopKRouter(8, experts, 2)(x, context) for experts in (4, 6)]
    mean = pooled_routing_embedding(routings, context)
    assert mean.shape == (2, 10)
    real = [torch.cat([r.probs_TE for r in routings], 1)[rows_] for rows_ in (slice(2, 5), slice(5, 10))]
    torch.testing.assert_close(mean, torch.stack([part.mean(0) for part in real]))
    last = pooled_routing_embedding(routings, context, "last")
    torch.testing.assert_close(last, torch.stack([part[-1] for part in real]))
    weights = pooled_routing_embedding(routings, context, of="weights")
    torch.testing.assert_close(weights[1, :4], routings[0].weights_TE[5:].mean(0))


def test_padding_on_either_side_and_nothing_but_padding() -> None:
    router = TopKRouter(8, 4, 2)
    found = []
    for side in ("left", "right"):
        x, context = padded([rows(3, seed=1), rows(5, seed=2), rows(0)], side, 6, filler=3.0)
        found.append([pooled_routing_embedding([router(x, context)], context, how) for how in ("mean", "last")])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right)
        assert left[2].abs().sum() == 0


@torch.no_grad()
@pytest.mark.parametrize("how", ["mean", "last"])
def test_of_a_transformers_model_with_and_without_swapped_routing(how: str) -> None:
    model = build("olmoe")
    with record_routing(model) as record:
        run(model, token_ids(3, 7))
    context = record.calls[0].context
    plain = pooled_routing_embedding([call.routing for call in record.calls], context, how)
    assert plain.shape == (3, 3 * 8)
    torch.testing.assert_close(plain.sum(1), torch.full((3,), 3.0))
    with record_routing(model) as record, swap_routing(model, PairChoiceRouter, allow_future=True):
        run(model, token_ids(3, 7))
    swapped = pooled_routing_embedding([call.routing for call in record.calls], context, how, of="weights")
    assert swapped.shape == plain.shape and not torch.equal(swapped, plain)


def test_doors() -> None:
    routing = TopKRouter(8, 4, 2)(rows(3))
    with pytest.raises(ValueError, match="how must be one of"):
        pooled_routing_embedding([routing], Context(), "first")
    with pytest.raises(ValueError, match="routings is empty"):
        pooled_routing_embedding([], Context())
    with pytest.raises(ValueError, match="needs group_T"):
        pooled_routing_embedding([routing], Context())
    with pytest.raises(ValueError, match="3 rows and the context 4"):
        pooled_routing_embedding([routing], Context.from_mask(None, 2, 2))
