import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moesaic import routing
from moesaic.routing import Context, GHASubspace, PrincipalSubspaceRouter, TopKRouter, end_step
from moesaic.routing.subspace import sanger_step

D, E = 12, 6


def rows(count: int, dim: int = D, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def router(seed: int = 0, **options) -> PrincipalSubspaceRouter:  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    return PrincipalSubspaceRouter(D, E, 2, **{"basis_lr": 0.05, **options})


def explicit_update(basis: Tensor, x: Tensor, lr: float) -> Tensor:
    """Sanger's rule row by row, as it is written in textbooks."""
    y = x @ basis.T
    moved = basis.clone()
    for k in range(basis.shape[0]):
        rest = x - sum(y[:, i, None] * basis[i] for i in range(k + 1))
        moved[k] = basis[k] + lr * (y[:, k, None] * rest).mean(0)
    return moved / moved.norm(dim=1, keepdim=True)


@pytest.mark.spec("star-routing", "6.1")
def test_hand_example() -> None:
    subspace = GHASubspace(2, 2, lr=0.1)
    subspace.basis_KD.copy_(torch.eye(2))
    subspace.update(torch.ones(1, 2))
    expected = torch.tensor([[0.995037, 0.099504], [0.0, 1.0]])
    torch.testing.assert_close(subspace.basis_KD, expected, atol=1e-6, rtol=0)


@pytest.mark.spec("star-routing", "6.2")
def test_the_compact_form_equals_the_cumulative_sum() -> None:
    x, basis = rows(40, dtype=torch.float64), rows(E, seed=1, dtype=torch.float64)
    y = x @ basis.T
    compact = sanger_step(basis, y.T @ x / 40, y.T @ y / 40, 0.3)
    torch.testing.assert_close(compact, explicit_update(basis, x, 0.3), atol=1e-12, rtol=0)


@pytest.mark.spec("star-routing", "6.3")
@pytest.mark.parametrize("iters", [1, 3])
def test_rows_have_length_one_and_eigenvectors_are_a_fixed_point(iters: int) -> None:
    subspace = GHASubspace(D, E, lr=0.5, iters=iters).double()
    x = rows(500, dtype=torch.float64) * torch.linspace(3, 0.5, D, dtype=torch.float64)
    for part in x.split(100):
        subspace.update(part)
        torch.testing.assert_close(subspace.basis_KD.norm(dim=1), torch.ones(E, dtype=torch.float64), atol=1e-6, rtol=0)
    vectors = torch.linalg.eigh(x.T @ x / 500).eigenvectors.flip(1).T[:E]
    subspace.basis_KD.copy_(vectors)
    subspace.update(x)
    assert float((subspace.basis_KD - vectors).abs().max()) < 1e-8


@pytest.mark.spec("star-routing", "6.4")
def test_the_basis_converges_to_the_leading_eigenvectors_in_order() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    rotation = torch.linalg.qr(torch.randn(16, 16, generator=generator)).Q
    scale = 2.0 ** (-torch.arange(16) / 2)
    subspace = GHASubspace(16, 4, lr=0.1)
    for _ in range(2000):
        subspace.update((torch.randn(256, 16, generator=generator) * scale) @ rotation)
    cosines = (subspace.basis_KD * rotation[:4]).sum(1).abs()
    assert bool((cosines > 0.98).all()), cosines
    x = (torch.randn(4096, 16, generator=generator) * scale) @ rotation
    eigenvalues = scale.square()
    assert subspace.captured_energy(x) == pytest.approx(float(eigenvalues[:4].sum() / eigenvalues.sum()), abs=0.02)
    assert subspace.orthogonality_error() < 0.1


@pytest.mark.spec("star-routing", "6.5")
def test_the_mix_reaches_both_gates() -> None:
    one, x = router().eval(), rows(20)
    linear = x @ one.weight_ED.T
    basis = x @ (one.mix_EE @ one.subspace.basis_KD).T
    for alpha, expected in ((40.0, linear), (-40.0, basis), (0.0, (linear + basis) / 2)):
        nn.init.constant_(one.alpha_E, alpha)
        torch.testing.assert_close(one.score(x, Context()), expected, atol=1e-5, rtol=0)
    plain = TopKRouter(D, E, 2, renormalize=False)
    with torch.no_grad():
        plain.weight_ED.copy_(one.weight_ED)
        nn.init.constant_(one.alpha_E, 40.0)
    assert torch.equal(one(x).expert_ids_TK, plain(x).expert_ids_TK)
    torch.testing.assert_close(one(x).weights_TK, plain(x).weights_TK)
    axes = router(mix="identity", basis_only=True).eval()
    axes.subspace.basis_KD.copy_(torch.eye(D)[:E])
    torch.testing.assert_close(axes.score(x, Context()), x[:, :E], atol=1e-6, rtol=0)


@pytest.mark.spec("star-routing", "6.6")
def test_gradients_reach_everything_but_the_basis() -> None:
    one, x = router(update="forward"), rows(20).requires_grad_()
    one(x).weights_TE.square().sum().backward()
    assert not one.subspace.basis_KD.requires_grad
    assert "subspace.basis_KD" in one.state_dict()
    assert all("basis" not in name for name, _ in one.named_parameters())
    for name, value in (*one.named_parameters(), ("x", x)):
        assert value.grad is not None, name
        assert float(value.grad.abs().sum()) > 0, name


@pytest.mark.spec("star-routing", "6.6")
@pytest.mark.parametrize("options", [{}, {"mix": "identity"}, {"basis_only": True}])
def test_gradcheck_of_the_logits(options) -> None:  # type: ignore[no-untyped-def]
    one = router(update="never", **options).double()
    names = [name for name, value in one.named_parameters() if value.requires_grad]

    def logits(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(one, dict(zip(names, values, strict=True)), (x,)).logits_TE

    values = [one.get_parameter(name).detach().clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(logits, (rows(3, dtype=torch.float64).requires_grad_(), *values))


@pytest.mark.spec("star-routing", "6.7")
@pytest.mark.parametrize("update", ["step", "forward"])
def test_evaluation_leaves_the_basis_alone_and_adaptation_moves_and_restores_it(update: str) -> None:
    model = nn.Sequential(router(update=update), nn.Dropout(0.5))
    one = model[0]
    assert isinstance(one, PrincipalSubspaceRouter)
    model.eval()
    before = one.subspace.basis_KD.clone()
    for seed in range(3):
        one(rows(30, seed=seed))
        end_step(model)
    assert torch.equal(one.subspace.basis_KD, before)
    model.train()
    model[1].eval()
    with routing.test_time_adaptation(model) as found:
        assert found == [one]
        assert not one.training
        assert not torch.is_grad_enabled()
        adapted = [one(rows(30, seed=seed)) for seed in range(3)]
        assert not torch.equal(one.subspace.basis_KD, before)
        one.subspace.reset()
        assert torch.equal(one.subspace.basis_KD, before)
        one(rows(30))
    assert len(adapted) == 3
    assert torch.equal(one.subspace.basis_KD, before)
    assert one.training
    assert not model[1].training
    assert torch.is_grad_enabled()
    with routing.test_time_adaptation(model, lr=0.2, iters=2, keep=True):
        one(rows(30))
    assert not torch.equal(one.subspace.basis_KD, before)


@pytest.mark.spec("star-routing", "6.7")
def test_adaptation_restores_after_an_error_and_moves_before_it_routes() -> None:
    one, x = router().train(), rows(30)
    before = one.subspace.basis_KD.clone()
    moved = GHASubspace(D, E, lr=0.05)
    moved.basis_KD.copy_(before)
    moved.update(x)

    def adapt_and_fail() -> None:
        with routing.test_time_adaptation(one):
            expected = 0.5 * x @ one.weight_ED.T + 0.5 * x @ (one.mix_EE @ moved.basis_KD).T
            torch.testing.assert_close(one(x).logits_TE, expected, atol=1e-5, rtol=0)
            raise KeyError

    with pytest.raises(KeyError):
        adapt_and_fail()
    assert torch.equal(one.subspace.basis_KD, before)
    assert one.training


@pytest.mark.spec("star-routing", "6.8")
def test_routing_energy_is_the_eigenvalues_mixed_by_r() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(2)
    eigenvalues = torch.linspace(4, 0.2, D, dtype=torch.float64)
    x = torch.randn(100_000, D, generator=generator, dtype=torch.float64) * eigenvalues.sqrt()
    one = router(basis_only=True).double().eval()
    one.subspace.basis_KD.copy_(torch.eye(D)[:E])
    energy_E = one.score(x, Context()).square().mean(0)
    torch.testing.assert_close(energy_E, one.mix_EE.square() @ eigenvalues[:E], rtol=0.01, atol=0)
    assert float(energy_E.detach().mean()) == pytest.approx(float(eigenvalues[:E].mean()), rel=0.01)


@pytest.mark.spec("star-routing", "6.9")
@pytest.mark.parametrize("update", ["step", "forward"])
def test_a_recomputed_forward_moves_the_basis_once(update: str) -> None:
    x = rows(30).requires_grad_()
    plain, recomputed = router(update=update), router(update=update)
    plain(x).weights_TE.square().sum().backward()
    expected = x.grad
    x.grad = None
    logits = []

    def block(y: Tensor) -> Tensor:
        routing_ = recomputed(y)
        logits.append(routing_.logits_TE)
        return routing_.weights_TE

    checkpoint(block, x, use_reentrant=False).square().sum().backward()  # type: ignore[union-attr]
    assert len(logits) == 2
    assert torch.equal(logits[0], logits[1])
    torch.testing.assert_close(x.grad, expected)
    end_step(plain)
    end_step(recomputed)
    assert torch.equal(plain.subspace.basis_KD, recomputed.subspace.basis_KD)
    assert not torch.equal(plain.subspace.basis_KD, router(update="never").subspace.basis_KD)


@pytest.mark.spec("star-routing", "6.9")
@pytest.mark.parametrize("iters", [1, 2])
def test_micro_batches_move_the_basis_like_their_union(iters: int) -> None:
    whole, parts = router(basis_iters=iters), router(basis_iters=iters)
    x = rows(40)
    whole(x)
    for part in x.split([7, 1, 32]):
        parts(part)
    for one in (whole, parts):
        end_step(one)
    torch.testing.assert_close(whole.subspace.basis_KD, parts.subspace.basis_KD, atol=1e-6, rtol=0)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=2)
    x = rows(40)
    mine = x[:10] if rank == 0 else x[10:]
    found = {}
    for update in ("step", "forward"):
        one = router(update=update)
        one(mine)
        end_step(one)
        if rank == 0:
            one(x)  # the other rank counts nothing in this step, and still takes part
        elif update == "forward":
            one(x[:0])
        end_step(one)
        found[update] = one.subspace.basis_KD
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.spec("star-routing", "6.9")
def test_two_ranks_agree_with_one_process(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for update in ("step", "forward"):
        assert torch.equal(first[update], second[update])
        one = router(update=update)
        for _ in range(2):
            one(rows(40))
            end_step(one)
        torch.testing.assert_close(one.subspace.basis_KD, first[update], atol=1e-6, rtol=0)


@pytest.mark.spec("star-routing", "3")
@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: PrincipalSubspaceRouter(4, 5), "num_experts must be at most dim = 4, got 5"),
        (lambda: PrincipalSubspaceRouter(D, E, 7), "top_k"),
        (lambda: PrincipalSubspaceRouter(D, E, basis_lr=0.0), "lr must be finite and > 0, got 0.0"),
        (lambda: PrincipalSubspaceRouter(D, E, basis_lr=math.nan), "lr"),
        (lambda: PrincipalSubspaceRouter(D, E, basis_iters=0), "iters must be at least 1, got 0"),
        (lambda: PrincipalSubspaceRouter(D, E, mix="random"), "mix must be one of"),
        (lambda: PrincipalSubspaceRouter(D, E, update="always"), "update must be one of"),
        (lambda: GHASubspace(4, 5), "num_components must be between 1 and dim = 4, got 5"),
        (lambda: router()(rows(3, dim=D + 1)), "x_TD must have shape"),
        (lambda: GHASubspace(D, E).update(rows(3, dim=D + 1)), "x must have shape"),
        (lambda: routing.test_time_adaptation(nn.Linear(2, 2)).__enter__(), "no PrincipalSubspaceRouter"),
        (lambda: routing.test_time_adaptation(router(), lr=-1.0).__enter__(), "lr must be"),
        (lambda: routing.test_time_adaptation(router(), iters=0).__enter__(), "iters must be"),
    ],
)
def test_bad_input(build, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=said):
        build()


@pytest.mark.spec("star-routing", "3")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_leave_the_basis_untouched(bad: float) -> None:
    subspace, x = GHASubspace(D, E, lr=0.1), rows(5)
    x[3, 2] = bad
    before = subspace.basis_KD.clone()
    for method in (subspace.update, subspace.gather):
        with pytest.raises(ValueError, match="row 3"):
            method(x)
    with routing.checks(False):  # as on an accelerator: no reading back, but no harm either
        subspace.update(x)
        subspace.gather(x)
        subspace.end_step()
    assert torch.equal(subspace.basis_KD, before)


@pytest.mark.spec("star-routing", "3")
def test_empty_batches_change_nothing() -> None:
    subspace = GHASubspace(D, E, lr=0.1)
    before = subspace.basis_KD.clone()
    subspace.update(rows(0))
    subspace.gather(rows(0))
    subspace.end_step()
    subspace.end_step()
    assert torch.equal(subspace.basis_KD, before)
    assert subspace.captured_energy(rows(0)) == 0.0
    with pytest.raises(RuntimeError, match="mark"):
        subspace.reset()
    one = router()
    assert one(rows(0)).num_rows == 0


def test_padded_rows_do_not_move_the_basis() -> None:
    x = rows(20)
    padded = torch.cat([x, torch.full((5, D), torch.nan)])
    mask = torch.arange(25) < 20
    for update in ("step", "forward"):
        bare, masked = router(update=update), router(update=update)
        bare(x)
        masked(padded, Context(token_mask_T=mask))
        end_step(bare)
        end_step(masked)
        assert torch.equal(bare.subspace.basis_KD, masked.subspace.basis_KD)


def test_leading_axes_are_flattened_and_projected() -> None:
    one, two = GHASubspace(D, E, lr=0.1), GHASubspace(D, E, lr=0.1)
    two.load_state_dict(one.state_dict())
    x = rows(24)
    one.update(x)
    two.update(x.view(2, 3, 4, D))
    assert torch.equal(one.basis_KD, two.basis_KD)
    assert one.project(x.view(2, 3, 4, D)).shape == (2, 3, 4, E)


@pytest.mark.case("C12")
def test_the_basis_stays_in_float32_and_moves_in_a_bf16_model() -> None:
    one = router(basis_lr=5e-5).to(torch.bfloat16)
    assert one.subspace.basis_KD.dtype == torch.float32
    before = one.subspace.basis_KD.clone()
    one(rows(64).bfloat16())
    end_step(one)
    moved = float((one.subspace.basis_KD - before).abs().max())
    assert 0 < moved < 1e-2


def test_variants_freeze_what_they_do_not_use() -> None:
    trained = lambda one: {name for name, value in one.named_parameters() if value.requires_grad}  # noqa: E731
    assert trained(router()) == {"weight_ED", "alpha_E", "mix_EE"}
    assert trained(router(mix="frozen")) == {"weight_ED", "alpha_E"}
    assert trained(router(mix="identity")) == {"weight_ED", "alpha_E"}
    assert trained(router(interpolate=False)) == {"weight_ED", "mix_EE"}
    assert trained(router(basis_only=True)) == {"mix_EE"}
    one = router(basis_only=True).eval()
    torch.testing.assert_close(one.score(rows(4), Context()), rows(4) @ one.expert_vectors().T)
    still = router(update="never")
    before = still.subspace.basis_KD.clone()
    still(rows(30))
    end_step(still)
    assert torch.equal(still.subspace.basis_KD, before)


def test_a_saved_and_loaded_router_goes_on_bit_for_bit() -> None:
    one, two = router(seed=0), router(seed=1)
    one(rows(30))
    end_step(one)
    two.load_state_dict(one.state_dict())
    for each in (one, two):
        each(rows(30, seed=5))
        end_step(each)
    assert torch.equal(one.subspace.basis_KD, two.subspace.basis_KD)
    assert torch.equal(one.eval()(rows(9)).logits_TE, two.eval()(rows(9)).logits_TE)


@pytest.mark.parametrize("update", ["step", "forward"])
def test_autocast_leaves_basis_and_logits_in_float32(update: str) -> None:
    plain, cast = router(update=update), router(update=update)
    x = rows(30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = cast(x)
    expected = plain(x)
    for one in (plain, cast):
        end_step(one)
    assert torch.equal(found.logits_TE, expected.logits_TE)
    assert torch.equal(cast.subspace.basis_KD, plain.subspace.basis_KD)


def test_scores_that_are_not_finite_name_the_layer_and_feed_nothing() -> None:
    one, x = router(), rows(5)
    one.layer_name = "model.layers.3.mlp"
    before = one.subspace.basis_KD.clone()
    x[2, 1] = math.nan
    with pytest.raises(ValueError, match=r"model\.layers\.3\.mlp, row 2"):
        one(x)
    end_step(one)
    assert torch.equal(one.subspace.basis_KD, before)
