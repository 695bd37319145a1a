"""Banks of feed-forward experts: both backends against the definition, their gradients, and the edges."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.experts import ACTIVATIONS, Experts, FFNExperts, backend, dense_reference
from moesaic.experts.backends import BACKENDS
from moesaic.routing import Context, Routing, checks, parameter_specs

WIDTHS = (3, 5, 1, 4)


def bank_of(activation="swiglu", bias=False, widths=None, dtype=torch.float64, seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    bank = FFNExperts(6, 5, 4, activation=activation, bias=bias, widths=widths, **kwargs).to(dtype)
    bank.reset_parameters(generator)
    with torch.no_grad():
        for name, parameter in bank.named_parameters():
            if "bias" in name:
                parameter.normal_(0, 0.5, generator=generator)
    return bank


def routing_of(rows, experts=4, dtype=torch.float64, seed=0, fill=0.5):
    generator = torch.Generator().manual_seed(seed)
    weights_TE = torch.rand(rows, experts, dtype=dtype, generator=generator)
    mask_TE = torch.rand(rows, experts, generator=generator) < fill
    return weights_TE, mask_TE


def rows_of(rows, dim=6, dtype=torch.float64, seed=1):
    return torch.randn(rows, dim, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def gradients(bank, x_TD, weights_TE, mask_TE):
    x_TD, weights_TE = x_TD.clone().requires_grad_(), weights_TE.clone().requires_grad_()
    y_TO = bank(x_TD, Routing.from_dense(weights_TE, mask_TE))
    leaves = [x_TD, weights_TE, *bank.parameters()]
    return [y_TO, *torch.autograd.grad(y_TO.double().square().sum(), leaves)]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("activation", "bias", "widths", "out_dim"),
    list(itertools.product(sorted(ACTIVATIONS), [False, True], [None, WIDTHS], [None, 3])),
)
def test_equals_the_dense_sum(activation, bias, widths, out_dim, name):
    weights_TE, mask_TE = routing_of(9)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        bank = bank_of(activation, bias, widths, dtype, out_dim=out_dim)
        x_TD, routing = rows_of(9, dtype=dtype), Routing.from_dense(weights_TE.to(dtype), mask_TE)
        expected = dense_reference(bank, x_TD, routing)
        with backend(name):
            y_TO = bank(x_TD, routing)
        assert y_TO.shape == (9, out_dim or 6)
        assert (y_TO - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(
    ("activation", "bias", "widths", "recompute"),
    list(itertools.product(sorted(ACTIVATIONS), [False, True], [None, WIDTHS], [False, True])),
)
def test_gradcheck(activation, bias, widths, recompute):
    bank = bank_of(activation, bias, widths, recompute=recompute)
    weights_TE, mask_TE = routing_of(5)
    # Here the clamp of gpt_oss is far; the test below reaches it.
    x_TD = rows_of(5).requires_grad_()
    weights_TE.requires_grad_()

    def compute(x_TD, weights_TE, *parameters):
        return bank(x_TD, Routing.from_dense(weights_TE, mask_TE))

    assert torch.autograd.gradcheck(compute, (x_TD, weights_TE, *bank.parameters()), fast_mode=True)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("activation", "bias", "widths"), list(itertools.product(sorted(ACTIVATIONS), [False, True], [None, WIDTHS]))
)
def test_fused_gradients_equal_autograds_through_the_reference(activation, bias, widths, recompute):
    bank = bank_of(activation, bias, widths, recompute=recompute, init_scale=6.0)  # the gpt_oss clamp binds
    case = (rows_of(12), *routing_of(12))
    with backend("reference"):
        expected = gradients(bank, *case)
    with backend("fused"):
        got = gradients(bank, *case)
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


def test_blocks_of_several_experts_equal_one(monkeypatch):
    bank, case = bank_of(), (rows_of(40), *routing_of(40))
    expected = gradients(bank, *case)
    for elements in (1, 5 * 25, 5 * 50):
        monkeypatch.setattr("moesaic.experts.fused.BLOCK_ELEMENTS", elements)
        for a, b in zip(gradients(bank, *case), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    rows=st.integers(0, 9),
    slots=st.integers(0, 5),
    experts=st.integers(1, 6),
    name=st.sampled_from(BACKENDS),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    data=st.data(),
)
def test_any_routing_equals_the_dense_sum(rows, slots, experts, name, activation, data):
    ids = data.draw(st.lists(st.integers(0, experts), min_size=rows * slots, max_size=rows * slots))
    ids_TK = torch.tensor(ids, dtype=torch.int64).reshape(rows, slots)  # repeated experts in a row included
    weights_TK = torch.linspace(-1, 1, rows * slots, dtype=torch.float64).reshape(rows, slots)
    routing = Routing(ids_TK, weights_TK * (ids_TK < experts), experts)
    bank = FFNExperts(3, 2, experts, activation=activation, bias=True).double()
    x_TD = rows_of(rows, 3)
    with backend(name):
        y_TO = bank(x_TD, routing)
        outputs_TKO = bank.outputs(x_TD, routing, Context())
    torch.testing.assert_close(y_TO, dense_reference(bank, x_TD, routing), rtol=1e-12, atol=1e-12)
    assert outputs_TKO.shape == (rows, slots, 3)
    torch.testing.assert_close((outputs_TKO * routing.weights_TK[..., None]).sum(1), y_TO, rtol=1e-12, atol=1e-12)


@pytest.mark.case("C14")
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("rows", "slots"), [(0, 2), (0, 0), (1, 2), (3, 0), (1, 1)])
def test_few_rows_and_no_slots(rows, slots, name):
    bank = bank_of(bias=True)
    x_TD = rows_of(rows).requires_grad_()
    ids_TK = torch.zeros(rows, slots, dtype=torch.int64)
    weights_TK = torch.full((rows, slots), 0.5, dtype=torch.float64, requires_grad=True)
    with backend(name):
        y_TO = bank(x_TD, Routing(ids_TK, weights_TK, 4))
    assert y_TO.shape == (rows, 6)
    y_TO.sum().backward()
    assert x_TD.grad is not None
    if rows * slots == 0:
        assert not y_TO.any()
        assert all(p.grad is not None and not p.grad.any() for p in bank.parameters())


@pytest.mark.case("C14")
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("widths", [None, WIDTHS])
def test_unused_experts_and_padding_have_exactly_zero_gradient(name, widths):
    bank = bank_of(bias=True, widths=widths)
    ids_TK = torch.full((300, 1), 2)  # all rows on one expert
    with backend(name):
        bank(rows_of(300), Routing(ids_TK, torch.ones(300, 1, dtype=torch.float64), 4)).square().sum().backward()
    for parameter in bank.parameters():
        assert parameter.grad[2].any()
        assert not parameter.grad[[0, 1, 3]].any()
    if widths:
        assert not bank.up_EFD.grad[2, widths[2] :].any()
        assert not bank.down_EDF.grad[2, :, widths[2] :].any()


@pytest.mark.parametrize("name", BACKENDS)
def test_padding_beyond_an_experts_width_is_never_read(name):
    bank, case = bank_of(bias=True, widths=WIDTHS), (rows_of(12), *routing_of(12))
    with backend(name):
        expected = gradients(bank, *case)
        with torch.no_grad():
            for expert, width in enumerate(WIDTHS):
                for parameter in (bank.up_EFD, bank.gate_EFD, bank.up_bias_EF, bank.gate_bias_EF):
                    parameter[expert, width:] = float("nan")
                bank.down_EDF[expert, :, width:] = float("nan")
        for a, b in zip(gradients(bank, *case), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.case("C13")
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_empty_slots_touch_no_expert(name, poison):
    bank = bank_of(bias=True)
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter[3] = poison  # the last expert: what a clamped or wrapped id would reach
    ids_TK = torch.tensor([[4, 4], [0, 4], [4, 1], [4, 4]])
    weights_TK = torch.tensor([[0, 0], [0.5, 0], [0, 2.0], [0, 0]], dtype=torch.float64)
    x_TD = rows_of(4)
    x_TD[0] = poison  # a padded row may hold anything
    x_TD.requires_grad_()
    with backend(name):
        y_TO = bank(x_TD, Routing(ids_TK, weights_TK, 4))
    assert torch.isfinite(y_TO).all()
    assert not y_TO[[0, 3]].any()
    y_TO.sum().backward()
    assert not x_TD.grad[[0, 3]].any()
    assert all(not p.grad[2:].any() for p in bank.parameters())


@pytest.mark.case("C13")
@pytest.mark.parametrize(("ids", "weight"), [(-1, 0.5), (5, 0.5), (4, 0.5)])
def test_other_markers_and_weighted_empty_slots_are_refused(ids, weight):
    with pytest.raises(ValueError, match=r"expert_ids_TK|weights_TK"):
        Routing(torch.tensor([[0, ids]]), torch.tensor([[0.5, weight]]), 4)


def test_a_bad_id_raises_even_where_the_contents_were_not_checked():
    bank = bank_of()
    with checks(False):
        routing = Routing(torch.tensor([[7]]), torch.ones(1, 1, dtype=torch.float64), 4)
    with pytest.raises(ValueError, match="holds 7"):
        bank(rows_of(1), routing)


@pytest.mark.case("C16")
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_expert_that_received_rows_moves(activation, name):
    torch.manual_seed(0)
    bank = FFNExperts(6, 5, 4, activation=activation, bias=True, zero_down=True)
    start = {key: value.detach().clone() for key, value in bank.named_parameters()}
    weights_TE, mask_TE = routing_of(64, dtype=torch.float32)
    mask_TE[:, 3] = False
    x_TD, target_TD = rows_of(64, dtype=torch.float32), rows_of(64, dtype=torch.float32, seed=5)
    optimizer, losses = torch.optim.AdamW(bank.parameters(), lr=3e-2, weight_decay=0.0), []
    for _ in range(20):
        with backend(name):
            loss = (bank(x_TD, Routing.from_dense(weights_TE, mask_TE)) - target_TD).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for key, parameter in bank.named_parameters():
        moved = (parameter != start[key]).flatten(1).any(1)
        assert moved.tolist() == [True, True, True, False], key


@pytest.mark.parametrize(
    "frozen", ["x", "weights", "up_EFD", "gate_EFD", "down_EDF", "down_bias_ED", "bank", "all but x"]
)
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen):
    bank, (weights_TE, mask_TE), x_TD = bank_of(bias=True), routing_of(7), rows_of(7)
    leaves = {"x": x_TD, "weights": weights_TE, **dict(bank.named_parameters())}
    for leaf in leaves.values():
        leaf.requires_grad_()
    bank(x_TD, Routing.from_dense(weights_TE, mask_TE)).square().sum().backward()
    expected = {key: leaf.grad for key, leaf in leaves.items()}
    off = {"bank": set(leaves) - {"x", "weights"}, "all but x": set(leaves) - {"x"}}.get(frozen, {frozen})
    for key, leaf in leaves.items():
        leaf.grad = None
        leaf.requires_grad_(key not in off)
    bank(x_TD, Routing.from_dense(weights_TE, mask_TE)).square().sum().backward()
    for key, leaf in leaves.items():
        if key in off:
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad, expected[key], rtol=1e-12, atol=0)


def test_strided_inputs_and_expanded_gradients():
    bank, (weights_TE, mask_TE) = bank_of(), routing_of(8)
    wide = rows_of(6, 8).t()  # (8, 6) with columns apart
    routing = Routing.from_dense(weights_TE, mask_TE)
    x_TD = wide.clone(memory_format=torch.contiguous_format).requires_grad_()
    bank(x_TD, routing).sum().backward()  # the gradient of a sum is an expanded scalar
    strided = wide.detach().requires_grad_()
    assert not strided.is_contiguous()
    bank(strided, routing).sum().backward()
    torch.testing.assert_close(strided.grad, x_TD.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", BACKENDS)
def test_autocast_with_any_mix_of_types(name):
    # Under autocast neither the weights' nor the rows' type may matter (transformers#43828).
    weights_TE, mask_TE = routing_of(16, dtype=torch.float32)
    exact = bank_of(bias=True, dtype=torch.float32)
    expected = exact(rows_of(16, dtype=torch.float32), Routing.from_dense(weights_TE, mask_TE))
    for of_bank, of_rows in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        bank = bank_of(bias=True, dtype=torch.float32).to(of_bank)
        x_TD = rows_of(16, dtype=torch.float32).to(of_rows).requires_grad_()
        with backend(name), torch.autocast("cpu", dtype=torch.bfloat16):
            y_TO = bank(x_TD, Routing.from_dense(weights_TE, mask_TE))
            y_TO.float().square().sum().backward()  # inside autocast too
        assert y_TO.dtype == torch.bfloat16
        assert (y_TO - expected).abs().max() < 0.03 * expected.abs().max()
        assert x_TD.grad.dtype == of_rows
        assert all(p.grad.dtype == of_bank and torch.isfinite(p.grad).all() for p in bank.parameters())


def test_bf16_gradients_are_close_to_float32s():
    weights_TE, mask_TE = routing_of(64, dtype=torch.float32)
    x_TD = rows_of(64, dtype=torch.float32).bfloat16()
    low = bank_of(bias=True, dtype=torch.bfloat16)
    exact = bank_of(bias=True, dtype=torch.float32)
    exact.load_state_dict({key: value.float() for key, value in low.state_dict().items()})
    got, expected = gradients(low, x_TD, weights_TE, mask_TE), gradients(exact, x_TD.float(), weights_TE, mask_TE)
    for a, b in zip(got, expected, strict=True):
        assert (a.float() - b).abs().max() < 0.03 * b.abs().max()


def test_types_that_do_not_fit_are_refused():
    bank, (weights_TE, mask_TE) = bank_of(dtype=torch.bfloat16), routing_of(2, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"float32.*bfloat16.*autocast"):
        bank(rows_of(2, dtype=torch.float32), Routing.from_dense(weights_TE, mask_TE))


def test_second_derivative_is_refused_by_the_fused_path_and_given_by_the_reference():
    bank, (weights_TE, mask_TE) = bank_of(), routing_of(3)
    routing, x_TD = Routing.from_dense(weights_TE, mask_TE), rows_of(3).requires_grad_()

    def second():
        (first,) = torch.autograd.grad(bank(x_TD, routing).square().sum(), x_TD, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x_TD)[0]

    with backend("reference"):
        assert second().any()
    with backend("fused"), pytest.raises(RuntimeError, match=r"create_graph.*reference"):
        second()


def test_a_replaced_step_is_not_skipped_by_the_fast_path():
    class Doubled(FFNExperts):
        def combine(self, outputs_TKO, routing):
            return 2 * super().combine(outputs_TKO, routing)

    class Constant(FFNExperts):
        def rows(self, x_ND, counts, context):
            return torch.ones(x_ND.shape[0], self.out_dim, dtype=x_ND.dtype)

    plain, doubled, x_TD = bank_of(), Doubled(6, 5, 4).double(), rows_of(5)
    doubled.load_state_dict(plain.state_dict())
    routing = Routing.from_dense(*routing_of(5))
    torch.testing.assert_close(doubled(x_TD, routing), 2 * plain(x_TD, routing), rtol=1e-12, atol=1e-12)
    constant = Constant(6, 5, 4).double()(x_TD, routing)
    torch.testing.assert_close(constant, routing.weights_TE.sum(1, keepdim=True).expand(5, 6))


def test_hidden_is_what_enters_the_down_projection():
    bank = bank_of(widths=WIDTHS)
    x_TD, routing = rows_of(9), Routing.from_dense(*routing_of(9))
    dispatch = routing.dispatch
    x_ND = x_TD[dispatch.row_N]
    hidden_NF = bank.hidden(x_ND, dispatch.counts, Context())
    expert_N = torch.repeat_interleave(torch.arange(4), torch.tensor(dispatch.counts))
    y_NO = torch.einsum("nf,nof->no", hidden_NF, bank.weights()["down"][expert_N])
    torch.testing.assert_close(y_NO, bank.rows(x_ND, dispatch.counts, Context()), rtol=1e-12, atol=1e-12)
    for expert, width in enumerate(WIDTHS):
        assert not hidden_NF[expert_N == expert, width:].any()


def test_compiled_equals_eager():
    bank, x_TD, routing = bank_of(), rows_of(5), Routing.from_dense(*routing_of(5))
    compiled = torch.compile(bank, backend="eager")
    torch.testing.assert_close(compiled(x_TD, routing), bank(x_TD, routing), rtol=1e-12, atol=1e-12)


def test_weights_of_some_experts():
    bank = bank_of(bias=True)
    some = bank.weights([2, 0])
    assert list(some) == ["gate", "up", "down", "gate_bias", "up_bias", "down_bias"]
    assert torch.equal(some["up"], bank.up_EFD[[2, 0]])
    assert bank.weights()["down"] is bank.down_EDF
    assert bank.weights([])["up"].shape == (0, 5, 6)
    with pytest.raises(ValueError, match="ids holds 4"):
        bank.weights([4])


def test_starts_as_asked():
    zero = FFNExperts(64, 48, 3, zero_down=True, widths=(16, 48, 32))
    assert not zero.down_EDF.any()
    assert not zero.up_EFD[0, 16:].any()
    scaled = FFNExperts(64, 48, 3, init_scale=0.5)
    assert abs(scaled.up_EFD.std().item() * 64**0.5 - 0.5) < 0.05
    assert abs(scaled.down_EDF.std().item() * 48**0.5 - 0.5) < 0.05


def test_every_parameter_has_axes_of_its_shape():
    bank = bank_of(bias=True, out_dim=3)
    sizes = {"expert": 4, "width": 5, "model": 6, "out": 3}
    found = list(parameter_specs(bank))
    assert len(found) == 6
    for _, parameter, spec in found:
        assert spec.role.startswith("expert")
        assert tuple(sizes[axis] for axis in spec.axes) == tuple(parameter.shape)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "swish"}, "activation must be one of.*'swish'"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"dim": -1}, "dim must be at least 1"),
        ({"num_experts": 0}, "num_experts must be at least 1"),
        ({"out_dim": 0}, "out_dim must be at least 1"),
        ({"widths": (3, 3)}, r"widths must have one entry per expert \(4\), got 2"),
        ({"widths": (3, 3, 0, 3)}, r"widths must be between 1 and width = 5"),
        ({"widths": (3, 3, 6, 3)}, r"widths must be between 1 and width = 5"),
        ({"init_scale": float("nan")}, "init_scale must be finite"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        FFNExperts(**{"dim": 6, "width": 5, "num_experts": 4, **arguments})


def test_bad_calls():
    bank, routing = bank_of(), Routing.from_dense(*routing_of(3))
    with pytest.raises(ValueError, match=r"\(T, 6\)"):
        bank(rows_of(3, 7), routing)
    with pytest.raises(ValueError, match="4 rows and the routing 3"):
        bank(rows_of(4), routing)
    with pytest.raises(ValueError, match="4 experts and the routing names 5"):
        bank(rows_of(3), Routing.from_dense(*routing_of(3, 5)))
    with pytest.raises(ValueError, match="3 rows and a context for 2"):
        bank(rows_of(3), routing, Context(token_mask_T=torch.ones(2, dtype=torch.bool)))
    with pytest.raises(ValueError, match="backend must be one of"), backend("magic"):
        pass


def test_the_base_says_what_is_missing():
    with pytest.raises(NotImplementedError, match="Experts does not define rows"):
        Experts(2, 2).rows(torch.zeros(0, 2), [0, 0], Context())
