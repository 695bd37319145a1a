"""Surgery: what a change of experts leaves equal, in every family of the standard shell and in ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from moesaic.experts import FFNExperts
from moesaic.layers import MoE
from moesaic.models.handle import moe_layers
from moesaic.models.override import override_routing
from moesaic.models.surgery import (
    drop_experts,
    duplicate_experts,
    merge_experts,
    rearrange_experts,
    reorder_experts,
)
from moesaic.models.surgery_checks import group_limit
from moesaic.routing import Context, Routing, TopKRouter
from tests.models.families import _SETTINGS, EXPERTS, FAMILIES, TOP_K, VOCABULARY, _sharpen, build, run
from tests.models.small import small_model, tokens


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def roomy(name: str) -> tuple[nn.Module, int]:
    """A model whose groups, if it has any, are large enough to lose an expert each, and their number."""
    model = build(name)
    if group_limit(moe_layers(model)[0]) is not None:
        model = build(name, n_group=2, topk_group=1)
    for key, value in model.named_buffers():
        if "correction_bias" in key:  # axk2 gives other groups the score 0: below it ties would decide
            value.abs_()
    limit = group_limit(moe_layers(model)[0])
    return model, 1 if limit is None else limit.count


def one_of_each(groups: int, place: int = 1) -> list[int]:
    return [group * (EXPERTS // groups) + place for group in range(groups)]


def droppable(name: str, groups: int) -> list[int]:
    """Experts that the family can lose together: one of each group, or a key with all its pairs."""
    return one_of_each(groups) if groups > 1 else list(FAMILIES[name].gone)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_state(model: nn.Module, before: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[name], value) for name, value in before.items())


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_reordering_inside_groups_changes_nothing(name: str) -> None:
    model = build(name)
    plain = run(model)
    limit = group_limit(moe_layers(model)[0])
    size = EXPERTS // (1 if limit is None else limit.count)
    backwards = [i for start in range(0, EXPERTS, size) for i in range(start + size - 1, start - 1, -1)]
    backwards = backwards if FAMILIES[name].order is None else list(FAMILIES[name].order)
    heavy = [moe.experts.weights([1])["down"].clone() for moe in moe_layers(model)]
    surgery = reorder_experts(model, backwards)
    assert (run(model) - plain).abs().max() < 1e-5
    assert len(surgery.layers) == FAMILIES[name].layers and "tensors" in str(surgery)
    for layer, down in zip(moe_layers(model), heavy, strict=True):  # and experts did move
        assert torch.equal(layer.experts.weights([backwards.index(1)])["down"], down)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
@pytest.mark.case("C12", "C15")
def test_dropping_equals_router_logits_of_minus_infinity(name: str) -> None:
    model, groups = roomy(name)
    gone = droppable(name, groups)
    allowed = torch.ones(FAMILIES[name].choices, dtype=torch.bool)
    allowed[gone] = False

    def masked(call: Any) -> Routing:
        if FAMILIES[name].score == "sigmoid":  # a score of its own: masked logits of others move nothing
            routing: Routing = call.choose(allowed_TE=allowed)
            return routing
        if FAMILIES[name].form != "stacked":
            own = call.choose(allowed_TE=allowed)
            masked_TE = call.routing.logits_TE.masked_fill(~allowed, -torch.inf)
            weighed: Routing = own.replace(weights_TK=call.layer.shell.weigh(masked_TE, own.expert_ids_TK))
            return weighed
        shell, logits_TE = call.layer.shell, call.routing.logits_TE
        logits_TE = logits_TE.masked_fill(~allowed, -torch.inf)
        ids_TK = shell.choose(logits_TE, allowed.expand_as(logits_TE), call.routing.slots)
        return call.routing.replace(expert_ids_TK=ids_TK, weights_TK=shell.weigh(logits_TE, ids_TK))

    with override_routing(model, masked):
        expected = run(model)
    surgery = drop_experts(model, gone)
    assert surgery.bytes[1] < surgery.bytes[0]
    layers = moe_layers(model)
    assert {layer.num_experts for layer in layers} == {FAMILIES[name].experts - len(gone)}
    logits = run(model)
    assert torch.isfinite(logits).all()
    assert (logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_copy_is_its_source(name: str) -> None:
    """Rows sent to the copy compute what rows sent to the source compute, and the router gives both one logit."""
    model, groups = roomy(name)
    sources = one_of_each(groups)
    if FAMILIES[name].form == "product keys":
        with pytest.raises(ValueError, match="by pairs of 4 keys"):
            duplicate_experts(model, sources)
        return
    surgery = duplicate_experts(model, sources)
    places = surgery.layers[0].sources
    copies = [i for i, source in enumerate(places) if source in places[:i]]
    assert len(copies) == groups and len(places) == EXPERTS + groups
    assert sorted(set(places)) == list(range(EXPERTS))

    def to(expert: int) -> Any:
        def route(call: Any) -> Routing:
            logits_TE = call.routing.logits_TE
            assert torch.allclose(logits_TE[:, copies[0]], logits_TE[:, places.index(places[copies[0]])], atol=1e-5)
            ids_T1 = torch.full((call.routing.num_rows, 1), expert)
            ones = torch.ones(ids_T1.shape, dtype=call.routing.weights_TK.dtype)
            return call.routing.replace(expert_ids_TK=ids_T1, weights_TK=ones)

        return route

    with override_routing(model, to(copies[0])):
        from_copy = run(model)
    with override_routing(model, to(places.index(places[copies[0]]))):
        from_source = run(model)
    assert torch.equal(from_copy, from_source)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen3_moe_raw", "minimax_m2"])
@torch.no_grad()
def test_doubling_everything_and_top_k_changes_nothing(name: str) -> None:
    model = build(name)
    plain = run(model)
    duplicate_experts(model, range(EXPERTS))
    for layer in moe_layers(model):
        layer.shell.router.top_k = 2 * TOP_K
    assert (run(model) - plain).abs().max() < 1e-5


@torch.no_grad()
def test_merging_writes_the_mean_and_keeps_the_first_router_row() -> None:
    for name in ("qwen3_moe", "gpt_oss", "aria"):
        model = build(name)
        layer = moe_layers(model)[1]
        parts, row = layer.experts.weights(), layer.shell.router.weight.clone()
        parts = {key: value.clone() for key, value in parts.items()}
        share = [1.0] * EXPERTS
        share[2] = 3.0
        merge_experts(model, {1: [[5, 2], [0, 7]]}, {1: share})
        after = moe_layers(model)[1]
        assert [x.num_experts for x in moe_layers(model)] == [EXPERTS, EXPERTS - 2, EXPERTS]
        assert torch.equal(after.shell.router.weight, row[[0, 1, 3, 4, 5, 6]])
        for key, value in after.experts.weights().items():
            assert torch.allclose(value[4], 0.25 * parts[key][5] + 0.75 * parts[key][2], atol=1e-6)
            assert torch.allclose(value[0], 0.5 * parts[key][0] + 0.5 * parts[key][7], atol=1e-6)
            assert torch.equal(value[1], parts[key][1])


@torch.no_grad()
@pytest.mark.case("C15")
def test_keeping_all_is_bit_exact() -> None:
    model = build("deepseek_v3")
    before, plain = state(model), run(model)
    rearrange_experts(model, {0: range(EXPERTS)})
    assert same_state(model, before) and torch.equal(run(model), plain)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen3_moe", lambda m: drop_experts(m, [8]), "experts are 0..7"),
        ("qwen3_moe", lambda m: drop_experts(m, [1, 1]), "more than once"),
        ("qwen3_moe", lambda m: drop_experts(m, []), "empty"),
        ("qwen3_moe", lambda m: drop_experts(m, {}), "no layer is named"),
        ("qwen3_moe", lambda m: drop_experts(m, {0: [1], "model.layers.0.mlp": [2]}), "named twice"),
        ("qwen3_moe", lambda m: drop_experts(m, {9: [1]}), "layers names 9"),
        ("qwen3_moe", lambda m: drop_experts(m, range(8)), "keep at least 1"),
        ("qwen3_moe", lambda m: drop_experts(m, range(6)), "clamp_k=True to lower its top-k to 2"),
        ("qwen3_moe", lambda m: drop_experts(m, {0: [1], 2: range(6)}), "takes 3 experts a row and only 2"),
        ("qwen3_moe", lambda m: reorder_experts(m, range(7)), "7 of 8"),
        ("qwen3_moe", lambda m: merge_experts(m, {0: [[0, 1], [1, 2]]}), "more than once"),
        ("qwen3_moe", lambda m: merge_experts(m, {0: [[0, 1]]}, {0: [0.0] * 8}), "sum to 0"),
        ("deepseek_v3", lambda m: reorder_experts(m, [1, 2, 0, 3, 4, 5, 6, 7]), "mix the old groups"),
        ("deepseek_v3", lambda m: drop_experts(m, [0]), "equally large; \\[1, 2, 2, 2\\]"),
        ("deepseek_v3", lambda m: drop_experts(m, [0, 2, 4, 6]), "keep at least 2 of each group"),
        ("deepseek_v2", lambda m: drop_experts(m, [0, 2, 4, 6]), "in the 2 groups that a row may use"),
        ("deepseek_v3", lambda m: duplicate_experts(m, [0]), "equally large"),
        ("doge", lambda m: drop_experts(m, [1]), r"single experts cannot be .* drops \[3, 7, 11, 12, 13, 14, 15\]"),
        ("doge", lambda m: merge_experts(m, {0: [[1, 2]]}), "by pairs of 4 keys"),
        ("nllb_moe", lambda m: reorder_experts(m, [1, 0, 2, 3, 4, 5, 6, 7]), "must keep their places"),
    ],
)
def test_refusals_change_nothing(name: str, change: Any, words: str) -> None:
    model = build(name)
    before = state(model)
    with pytest.raises(ValueError, match=words):
        change(model)
    assert same_state(model, before)
    assert {layer.num_experts for layer in moe_layers(model)} == {FAMILIES[name].experts}


@torch.no_grad()
def test_whole_groups_may_change_places() -> None:
    model = build("deepseek_v3")
    plain = run(model)
    reorder_experts(model, [6, 7, 0, 1, 5, 4, 3, 2])
    assert (run(model) - plain).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2", "gemma4", "openai_privacy_filter", "dbrx", "llama4"])
@torch.no_grad()
@pytest.mark.case("C17")
def test_clamping_top_k_changes_config_and_model_together(name: str) -> None:
    model = build(name)
    limit = group_limit(moe_layers(model)[0])
    gone = list(range(6)) if limit is None else [0, 2, 4, 6]
    drop_experts(model, gone, clamp_k=True)
    assert {layer.top_k for layer in moe_layers(model)} == {2}
    rebuilt = type(model)(model.config)  # a model made from the configuration has the same numbers
    assert [(x.num_experts, x.top_k) for x in moe_layers(rebuilt)] == [
        (EXPERTS - len(gone), 2) for _ in moe_layers(model)
    ]
    rebuilt.load_state_dict(model.state_dict())
    model.set_experts_implementation("eager")
    rebuilt.set_experts_implementation("eager")
    assert torch.allclose(run(rebuilt.eval()), run(model), atol=1e-6)


def test_a_model_that_reads_top_k_from_its_configuration_cannot_differ_by_layer() -> None:
    with pytest.raises(ValueError, match="from the configuration"):
        drop_experts(build("gemma4"), {0: range(6)}, clamp_k=True)


@pytest.mark.case("C20")
def test_a_damaged_router_is_refused_by_name() -> None:
    model = build("qwen3_moe")
    with torch.no_grad():
        moe_layers(model)[2].shell.router.weight[3, 3] = torch.nan
    with pytest.raises(ValueError, match=r"model.layers.2.mlp.gate.weight holds NaN"):
        drop_experts(model, [0])
    assert {layer.num_experts for layer in moe_layers(model)} == {EXPERTS}


def test_quantized_and_absent_weights_are_refused_by_name() -> None:
    model = build("qwen3_moe")
    bank = moe_layers(model)[0].experts.module
    bank.down_proj = nn.Parameter(bank.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match=r"experts.down_proj is quantized"):
        drop_experts(model, [0])
    bank.down_proj = nn.Parameter(torch.empty_like(bank.down_proj, dtype=torch.float32, device="meta"))
    with pytest.raises(ValueError, match=r"experts.down_proj is not in memory"):
        drop_experts(model, [0])


def test_adapters_on_experts_are_refused_and_elsewhere_do_not_matter() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer, self.lora_A = base, nn.Linear(2, 2)

        def forward(self, *args: Any) -> Any:
            return self.base_layer(*args)

    model = build("qwen3_moe")
    model.model.layers[0].self_attn.q_proj = Adapter(model.model.layers[0].self_attn.q_proj)
    drop_experts(model, [0])
    model.model.layers[1].mlp.experts = Adapter(model.model.layers[1].mlp.experts)
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.experts \(Adapter\) holds .*merge it first"):
        drop_experts(model, [0])


@torch.no_grad()
def test_tied_layers_are_cut_once_and_only_together() -> None:
    model = build("qwen3_moe")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    first, last = model.model.layers[0].mlp, moe_layers(model)[-1]
    drop_experts(model, [3])
    assert first.experts.down_proj.shape[0] == last.experts.module.down_proj.shape[0] == EXPERTS - 1
    tied = build("qwen3_moe")
    tied.model.layers[1].mlp.gate.weight = tied.model.layers[0].mlp.gate.weight
    with pytest.raises(ValueError, match="is shared by layers"):
        drop_experts(tied, {0: [3]})
    drop_experts(tied, [3])
    assert torch.isfinite(run(tied)).all()


def test_low_precision_mixtures_keep_their_types() -> None:
    model = build("deepseek_v3").bfloat16()
    for layer in moe_layers(model):
        layer.shell.router.float()
    types = {name: value.dtype for name, value in model.state_dict().items()}
    reorder_experts(model, [1, 0, 3, 2, 5, 4, 7, 6])
    assert {name: value.dtype for name, value in model.state_dict().items()} == types


@torch.no_grad()
def test_a_table_of_tokens_follows() -> None:
    """DeepSeek-V4's hash layers name experts by token: entries are rewritten, a dropped one needs a successor."""
    kind = transformers.DeepseekV4ForCausalLM
    known = kind.config_class.__dataclass_fields__
    settings = {
        **_SETTINGS,
        "num_experts_per_tok": 2,
        "index_topk": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    }
    torch.manual_seed(0)
    config = kind.config_class(**{key: value for key, value in settings.items() if key in known})
    config._experts_implementation = "eager"
    model = kind(config).eval()
    _sharpen(model)
    table = model.get_submodule(moe_layers(model)[0].name).gate.tid2eid
    table.copy_(torch.stack([torch.arange(VOCABULARY) % EXPERTS, (torch.arange(VOCABULARY) + 1) % EXPERTS], 1))
    plain = run(model)
    reorder_experts(model, [7, 1, 2, 3, 4, 5, 6, 0])
    assert (run(model) - plain).abs().max() < 1e-5
    assert table[8].tolist() == [7, 1]
    before = state(model)
    with pytest.raises(ValueError, match=r"tid2eid assigns tokens to the experts \[2\].*redirect"):
        drop_experts(model, [2])
    with pytest.raises(ValueError, match="the same expert twice"):
        drop_experts(model, [2], redirect={2: 3})
    assert same_state(model, before)
    drop_experts(model, [2], redirect={2: 5})
    assert int(table.max()) == EXPERTS - 2 and torch.isfinite(run(model)).all()


@torch.no_grad()
def test_a_composite_model_follows_in_its_text_configuration() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    kind = transformers.Qwen3VLMoeForConditionalGeneration
    known = kind.config_class.sub_configs["text_config"].__dataclass_fields__
    text = {key: value for key, value in _SETTINGS.items() if key in known}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = kind.config_class(text_config={**text, "rope_parameters": rope}, vision_config=vision)
    model = kind(config).eval()
    drop_experts(model, [0])
    assert model.config.get_text_config().num_local_experts == EXPERTS - 1
    assert torch.isfinite(run(model)).all()


@torch.no_grad()
def test_a_layer_of_ours_follows() -> None:
    torch.manual_seed(0)
    router = TopKRouter(8, 4, 2, score="sigmoid", bias=True)
    router.selection_bias_E.copy_(torch.randn(4))
    layer = MoE(FFNExperts(8, 6, 4, widths=(6, 2, 5, 3)), router).eval()
    x_TD = torch.randn(20, 8)
    plain, _ = layer(x_TD)
    reorder_experts(layer, [2, 0, 3, 1])
    assert layer.experts.widths == (5, 6, 3, 2)
    assert torch.allclose(layer(x_TD)[0], plain, atol=1e-6)
    allowed_TE = torch.tensor([True, True, False, True]).expand(20, 4)
    ids_TK = router.choose(router.score(x_TD, Context()), Context(), allowed_TE)
    kept = {0: 0, 1: 1, 3: 2}
    drop_experts(layer, [2])
    _, routing = layer(x_TD)
    assert routing.num_experts == 3 and layer.experts.widths == (5, 6, 2)
    assert torch.equal(routing.expert_ids_TK, ids_TK.clone().apply_(lambda i: kept[i]))
    layer.train()(x_TD)
    router.end_step()  # the counter of loads has the new size


def test_a_router_whose_state_depends_on_the_count_is_refused() -> None:
    model = small_model("principal_subspace")
    before = state(model)
    with pytest.raises(ValueError, match=r"basis_KD .* does not declare"):
        drop_experts(model, [0])
    assert same_state(model, before)
    assert model(tokens(1, 4)).logits.shape[1] == 4
