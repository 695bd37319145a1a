"""The reference language model: causality, caching, padding, precision, checkpointing, masks and losses."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from moesaic.models.parts import ROUTERS
from moesaic.routing import Routing, end_step, parameter_specs
from tests.models.small import BATCH_DEPENDENT, padded, small_model, tokens

EVERY_ROUTER = sorted(ROUTERS)
# Options that keep state between the calls of a generation.
WITH_STATE = {"ngram": {"orders": [2, 3], "rows": 97}, "shift": 2}


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((a - b).abs().max() <= tolerance * max(float(b.abs().max()), 1.0))


@pytest.mark.case("C04")
@pytest.mark.parametrize("router", EVERY_ROUTER)
def test_no_logit_depends_on_a_later_token(router: str) -> None:
    model, ids = small_model(router, **WITH_STATE), tokens(2, 24)
    changed = ids.clone()
    changed[:, 10:] = tokens(2, 14, seed=9)
    assert not torch.equal(changed, ids)
    before, after = model(ids).logits, model(changed).logits
    assert close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.case("C04")
@pytest.mark.parametrize("grouping", ["sequence", "batch"])
def test_a_router_that_looks_ahead_is_refused(grouping: str) -> None:
    with pytest.raises(ValueError, match="see its future"):
        small_model({"name": "expert_choice", "grouping": grouping})


@pytest.mark.case("C04")
@pytest.mark.parametrize("state", [{}, WITH_STATE], ids=["plain", "ngram-shift"])
@pytest.mark.parametrize("router", EVERY_ROUTER)
def test_decoding_with_a_cache_equals_the_full_forward(router: str, state: dict[str, object]) -> None:
    model, ids = small_model(router, **state), tokens(1, 14)
    full = model(ids, use_cache=False).logits
    cache, parts = None, []
    for start, end in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 14)):
        out = model(ids[:, start:end], cache=cache, use_cache=True)
        cache = out.cache
        parts.append(out.logits)
    assert close(torch.cat(parts, 1), full)


@pytest.mark.case("C03")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("router", sorted(set(ROUTERS) - BATCH_DEPENDENT))
def test_padded_batches_equal_single_sequences(router: str, side: str) -> None:
    model = small_model(router, **WITH_STATE)
    rows = [tokens(1, length, seed=length)[0] for length in (3, 9, 30)]
    ids, mask = padded(rows, side)
    out = model(ids, attention_mask=mask, output_routings=True)
    for index, row in enumerate(rows):
        single = model(row[None], output_routings=True)
        assert close(out.logits[index][mask[index].bool()], single.logits[0])
        for batch_routing, routing in zip(out.routings, single.routings):
            own = batch_routing.weights_TE.view(*ids.shape, -1)[index][mask[index].bool()]
            assert close(own, routing.weights_TE)
    for routing in out.routings:
        pads = ~mask.bool().flatten()
        assert bool((routing.expert_ids_TK[pads] == routing.num_experts).all())


@pytest.mark.parametrize("state", [{}, WITH_STATE], ids=["plain", "ngram-shift"])
def test_generation_of_a_padded_batch_equals_single_generations(state: dict[str, object]) -> None:
    model = small_model(**state)
    rows = [tokens(1, length, seed=length)[0] for length in (3, 5, 11)]
    ids, mask = padded(rows, "left")
    options = {"max_new_tokens": 8, "do_sample": False}
    together = model.generate(ids, attention_mask=mask, **options)
    for index, row in enumerate(rows):
        for use_cache in (True, False):
            alone = model.generate(row[None], attention_mask=torch.ones(1, len(row)), use_cache=use_cache, **options)
            assert torch.equal(together[index, ids.shape[1] :], alone[0, len(row) :])


@pytest.mark.parametrize("state", [{}, WITH_STATE], ids=["plain", "ngram-shift"])
def test_beam_search_and_a_cache_of_fixed_size_change_nothing(state: dict[str, object]) -> None:
    model, ids = small_model(**state), tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False}
    beams = [model.generate(ids, num_beams=3, use_cache=use, **options) for use in (True, False)]
    assert torch.equal(*beams)
    if not state:
        fixed = model.generate(ids, cache_implementation="static", disable_compile=True, **options)
        assert torch.equal(fixed, model.generate(ids, **options))


@pytest.mark.case("C07")
def test_two_dimensional_masks_of_any_integer_kind_mean_the_same() -> None:
    model = small_model()
    ids, mask = padded([tokens(1, 4)[0], tokens(1, 7)[0]], "left")
    logits = [model(ids, attention_mask=kind).logits for kind in (mask, mask.bool(), mask.int())]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.mark.case("C07")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_four_dimensional_masks_say_who_attends_to_whom(attention: str) -> None:
    model = small_model(attn_implementation=attention)
    first, second = tokens(1, 5), tokens(1, 6, seed=2)
    ids = torch.cat([first, second], 1)
    position = torch.cat([torch.arange(5), torch.arange(6)])[None]
    blocks = torch.block_diag(torch.ones(5, 5), torch.ones(6, 6)).bool().tril()[None, None]
    additive = torch.zeros(blocks.shape).masked_fill(~blocks, torch.finfo(torch.float32).min)
    alone = torch.cat([model(first).logits, model(second).logits], 1)
    for mask in (blocks, additive, None):
        assert close(model(ids, attention_mask=mask, position_ids=position).logits, alone)


@pytest.mark.case("C07")
@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 5), torch.ones(2, 7), torch.ones(2, 4).long(), torch.ones(6).long(), torch.ones(2, 1, 6, 6).long()],
)
def test_a_mask_of_another_shape_or_kind_is_refused_with_what_is_allowed(mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"mask must"):
        small_model()(tokens(2, 6), attention_mask=mask)


@pytest.mark.case("C07")
def test_decoding_with_losses_and_routings_asked_for_works() -> None:
    model = small_model(losses=[{"name": "balance", "coefficient": 0.1}, {"name": "z", "coefficient": 0.1}])
    ids, mask = padded([tokens(1, 4)[0], tokens(1, 7)[0]], "left")
    first = model(ids, attention_mask=mask, use_cache=True, output_routings=True)
    mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
    step = model(tokens(2, 1), attention_mask=mask, cache=first.cache, output_routings=True)
    assert step.routings[0].num_rows == 2
    assert bool(torch.isfinite(step.aux_loss))
    with pytest.raises(ValueError, match="cached tokens"):
        model(tokens(2, 1), attention_mask=torch.ones(2, 1).long(), cache=first.cache)


def test_packed_sequences_are_groups_of_their_own() -> None:
    position = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])
    seen = []
    model = small_model()
    model.model.layers[0].mlp.router.register_forward_pre_hook(lambda _, args: seen.append(args[1].group_T))
    model(tokens(2, 5), position_ids=position)
    assert seen[0].tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 3]
    with pytest.raises(ValueError, match="look across"):
        small_model(shift=1)(tokens(2, 5), position_ids=position)


@pytest.mark.case("C02")
@pytest.mark.parametrize("router", EVERY_ROUTER)
def test_gradient_checkpointing_changes_no_choice_and_no_gradient(router: str) -> None:
    ids = tokens(1, 257)
    losses = [{"name": "balance", "coefficient": 0.5}]
    grads = []
    for checkpointing in (False, True):
        model = small_model(router, losses=losses, qk_norm=False).train()
        with torch.no_grad():
            for layer in model.model.layers:
                for parameter in layer.mlp.router.parameters():
                    parameter.zero_() if router == "top_k" else None  # exact ties everywhere
        if checkpointing:
            model.activation_checkpointing_enable()
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
        end_step(model)
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        grads.append(({name: p.grad for name, p in model.named_parameters()}, buffers))
    for name, grad in grads[0][0].items():
        other = grads[1][0][name]
        assert (grad is None) == (other is None), name
        assert grad is None or close(other, grad, 1e-6), name
    for name, value in grads[0][1].items():
        assert torch.equal(value, grads[1][1][name]), name


def test_reentrant_checkpointing_is_refused() -> None:
    with pytest.raises(ValueError, match="use_reentrant"):
        small_model().activation_checkpointing_enable({"use_reentrant": True})


@pytest.mark.case("C01")
def test_routers_choose_in_float32_in_a_bf16_model() -> None:
    model = small_model()
    low = copy.deepcopy(model).bfloat16()
    layer, router = low.model.layers[0].mlp, model.model.layers[0].mlp.router
    assert layer.router.weight_ED.dtype == torch.float32
    assert layer.experts.up_EFD.dtype == torch.bfloat16
    x_TD = torch.randn(200, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, routing = layer(x_TD)
    wanted = router(x_TD.float())
    assert torch.equal(routing.expert_ids_TK, wanted.expert_ids_TK)
    assert torch.equal(routing.weights_TK, wanted.weights_TK)
    assert low(tokens(1, 5)).logits.dtype == torch.bfloat16


def test_double_precision_works_throughout() -> None:
    model, ids = small_model(**WITH_STATE), tokens(2, 9)
    assert close(copy.deepcopy(model).double()(ids).logits, model(ids).logits.double(), 1e-5)


def test_the_loss_of_evaluation_leaves_auxiliary_losses_out() -> None:
    ids, values = tokens(2, 12), []
    for coefficient in (0.0, 10.0):
        model = small_model(losses=[{"name": "balance", "coefficient": coefficient}])
        out = model(ids, labels=ids)
        assert torch.equal(out.loss, out.lm_loss)
        trained = model.train()(ids, labels=ids)
        assert torch.equal(trained.loss, trained.lm_loss + trained.aux_loss)
        values.append((out.loss, trained.loss))
    assert torch.equal(values[0][0], values[1][0])
    assert values[1][1] > values[0][1]


def test_padding_and_ignored_labels_do_not_count_in_the_loss() -> None:
    model = small_model()
    rows = [tokens(1, 5)[0], tokens(1, 9)[0]]
    sums = sum(model(row[None], labels=row[None]).lm_loss * (len(row) - 1) for row in rows)
    for side in ("left", "right"):
        ids, mask = padded(rows, side)
        assert close(model(ids, attention_mask=mask, labels=ids).lm_loss, sums / 12)
        ignored = ids.masked_fill(mask == 0, -100)
        assert close(model(ids, attention_mask=mask, labels=ignored).lm_loss, sums / 12)
        assert close(model(ids, attention_mask=mask, labels=ids, num_items_in_batch=24).lm_loss, sums / 24)


def test_the_auxiliary_loss_is_the_sum_of_each_layers_own() -> None:
    """Opposite collapses of two layers do not cancel."""
    model = small_model({"name": "top_k", "top_k": 1}, num_experts=2, losses=[{"name": "balance", "coefficient": 1.0}])
    ids = tokens(2, 30)
    for expert, layer in enumerate(model.model.layers):
        layer.mlp.router.register_forward_hook(lambda _, __, routing, e=expert: all_to(e, routing.num_rows))
    out = model(ids, output_routings=True)
    assert [routing.load_E.tolist() for routing in out.routings] == [[60, 0], [0, 60]]
    assert close(out.aux_loss, sum(routing.losses["balance"] for routing in out.routings))
    assert out.aux_loss > 3.9  # 2 for each collapsed layer; a loss over both together would read 1


def all_to(expert: int, rows: int) -> Routing:
    """Every row to one of two experts."""
    logits_TE = torch.full((rows, 2), -20.0)
    logits_TE[:, expert] = 20.0
    return Routing(torch.full((rows, 1), expert), torch.ones(rows, 1), 2, logits_TE)


@pytest.mark.case("C09")
def test_the_balance_gradient_is_linear_in_its_coefficient() -> None:
    ids, grads = tokens(2, 16), {}
    for coefficient in (0.0, 1e-3, 1e-2):
        model = small_model(losses=[{"name": "balance", "coefficient": coefficient}]).double().train()
        out = model(ids, labels=ids)
        (out.lm_loss * 0 + out.aux_loss).backward()
        grads[coefficient] = model.model.layers[1].mlp.router.weight_ED.grad
    assert bool((grads[0.0] == 0).all())
    assert bool(grads[1e-3].abs().sum() > 0)
    assert torch.allclose(grads[1e-2], 10 * grads[1e-3], rtol=1e-5)


def test_eager_attention_equals_the_fused_one() -> None:
    ids, mask = padded([tokens(1, 4)[0], tokens(1, 9)[0]], "left")
    real = mask.bool()
    fused, eager = (
        small_model(attn_implementation=name)(ids, attention_mask=mask).logits for name in ("sdpa", "eager")
    )
    assert close(fused[real], eager[real])


def test_options_do_what_they_say() -> None:
    ids = tokens(2, 9)
    assert small_model(logit_cap=0.5)(ids).logits.abs().max() <= 0.5
    zero = small_model(zero_init_outputs=True, shared={"width": 8}, mlp_layer_types=["moe", "dense"])
    assert torch.equal(zero(ids).logits, torch.zeros(2, 9, 24))
    states = zero(ids, output_hidden_states=True).hidden_states
    assert torch.equal(states[0], states[1])  # layers start as the identity
    tied = small_model(tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    kept = small_model()(ids, logits_to_keep=2).logits
    assert torch.equal(kept, small_model()(ids).logits[:, -2:])
    roles = {name: spec.role for name, _, spec in parameter_specs(small_model())}
    assert roles["lm_head.weight"] == "head"
    assert roles["model.embed_tokens.weight"] == "embedding"
    assert roles["model.norm.weight"] == "norm"


def test_embeddings_instead_of_ids_give_the_same() -> None:
    model, ids = small_model(), tokens(2, 9)
    assert torch.equal(model(inputs_embeds=model.model.embed_tokens(ids)).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"router": {"name": "topk"}}, r"router names 'topk'; allowed are \['cosine'"),
        ({"router": {"name": "top_k", "top_k": 5}}, "top_k must be between 1 and num_experts = 4, got 5"),
        ({"router": {"name": "top_k", "top_k": 2, "groups": 2}}, r"does not take \['groups'\]"),
        ({"router": {"name": "top_k"}}, "top_k"),
        ({"experts": {"name": "mlp"}}, "experts names 'mlp'"),
        ({"experts": {"name": "ffn", "activation": "silu"}}, "activation must be one of"),
        ({"losses": [{"name": "balanced"}]}, "loss names 'balanced'"),
        ({"shared": {"name": "none"}}, "shared names 'none'"),
        ({"mlp_layer_types": ["moe"]}, "mlp_layer_types must name"),
        ({"num_key_value_heads": 3}, "num_kv_heads must divide"),
        ({"qk_norm": "heads"}, "qk_norm must be one of"),
        ({"norm": "batch"}, "norm must be one of"),
        ({"moesaic_format": 99}, "newer moesaic"),
        ({"num_experts": 0}, "num_experts must be at least 1"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small_model(**{"router": {"name": "top_k", "top_k": 2}, **changes})


def test_bad_calls_are_refused() -> None:
    model, ids = small_model(), tokens(2, 6)
    for arguments, words in (
        ({"input_ids": ids, "past_key_values": model(ids, use_cache=True).cache}, "called cache"),
        ({"input_ids": ids, "token_type": ids}, r"does not take \['token_type'\]"),
        ({"input_ids": ids.float()}, "input_ids must be integers"),
        ({"input_ids": ids[0]}, "input_ids must be integers of shape"),
        ({}, "exactly one of"),
        ({"input_ids": ids, "labels": ids[:, 1:]}, "labels must have shape"),
        ({"input_ids": ids, "position_ids": torch.arange(5)}, "position_ids must have shape"),
    ):
        with pytest.raises(ValueError, match=words):
            model(**arguments)
    with pytest.raises(ValueError, match="need input_ids"):
        small_model(ngram={"orders": [2], "rows": 11})(inputs_embeds=torch.zeros(1, 3, 16))


def test_scores_that_are_not_finite_name_the_layer() -> None:
    model = small_model()
    with torch.no_grad():
        model.model.layers[1].mlp.router.weight_ED[2] = torch.nan
    with pytest.raises(ValueError, match=r"not finite in layer model\.layers\.1\.mlp, row 0"):
        model(tokens(1, 3))


def test_importing_the_package_leaves_transformers_alone_and_teaches_it_the_model() -> None:
    code = (
        "import sys, moesaic; assert 'transformers' not in sys.modules and 'torch' not in sys.modules;"
        "from transformers import AutoConfig; c = AutoConfig.for_model('moesaic');"
        "assert 'moesaic.models.modeling' not in sys.modules;"
        "from transformers import AutoModelForCausalLM as A; from transformers.models.auto.modeling_auto import"
        " MODEL_FOR_CAUSAL_LM_MAPPING as M; assert M[type(c)].__name__ == 'MoesaicForCausalLM';"
        "assert moesaic.load.__name__ == 'load' and moesaic.export.__name__ == 'export';"
        "import moesaic.models.loading; assert callable(moesaic.load)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
