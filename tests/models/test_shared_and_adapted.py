"""Models in unusual states: a block in two layers, an adapter on the router, a copy taken inside fast experts."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moesaic
from moesaic.models.fast import use_fast_experts
from moesaic.models.handle import moe_layers
from moesaic.models.saving import save
from moesaic.models.surgery import drop_experts, duplicate_experts
from tests.models.families import EXPERTS, build, run
from tests.models.small import small_model, tokens


def sharing(**changes: Any) -> Any:
    """Three layers, the first and the last with one and the same block."""
    model: Any = build("qwen3_moe", **changes)
    model.model.layers[2].mlp = model.model.layers[0].mlp
    return model


@pytest.mark.parametrize("change", [[3], {0: [3]}, {"model.layers.1.mlp": [3, 5]}])
@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_a_block_in_two_layers_is_saved_and_opens_again(change: Any, tied: bool, tmp_path: Path) -> None:
    model = sharing(tie_word_embeddings=tied)
    drop_experts(model, change)
    plain = run(model)
    saved = save(model, tmp_path / "cut")
    assert list(saved.experts) == [f"model.layers.{i}.mlp" for i in range(3)]
    assert saved.experts["model.layers.0.mlp"] == saved.experts["model.layers.2.mlp"]
    assert saved.native is (change == [3])
    opened: Any = moesaic.load(saved.path)
    opened.set_experts_implementation("eager")
    assert (run(opened) - plain).abs().max() < 1e-6
    assert [layer.num_experts for layer in moe_layers(opened)] == list(saved.experts.values())
    assert (opened.lm_head.weight is opened.model.embed_tokens.weight) is tied
    assert model.model.layers[2].mlp is model.model.layers[0].mlp  # the model itself is left as it was


@torch.no_grad()
def test_a_whole_layer_used_twice_is_saved_too(tmp_path: Path) -> None:
    """Attention and norms are shared with it, not the experts alone; in a model of ours as in a foreign one."""
    foreign: Any = build("qwen3_moe")
    foreign.model.layers[2] = foreign.model.layers[0]
    ours: Any = small_model()
    ours.model.layers[1] = ours.model.layers[0]
    for name, model, ids in (("foreign", foreign, None), ("ours", ours, tokens(1, 6))):
        drop_experts(model, [1])
        opened: Any = moesaic.load(save(model, tmp_path / name).path)
        if ids is None:
            opened.set_experts_implementation("eager")
            assert (run(opened) - run(model)).abs().max() < 1e-6
        else:
            assert torch.equal(opened(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


# Adapters ------------------------------------------------------------------------------------------------------------
class LoraLinear(nn.Module):
    """Like peft's: the linear layer inside, low-rank matrices by adapter name beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"style": nn.Linear(base.in_features, EXPERTS, bias=False)})
        self.lora_B = nn.ModuleDict({"style": nn.Linear(EXPERTS, base.out_features, bias=False)})

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        low: Tensor = self.lora_B["style"](self.lora_A["style"](x))
        return self.base_layer(x) + low


class LoraAround(nn.Module):
    """Like peft's wrapper for a module with a bare parameter: whatever is called goes to the module inside."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"tone": nn.Linear(4, 4)})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs)


def adapted(where: str) -> tuple[nn.Module, str]:
    model: Any = build("gemma4" if where == "inside" else "qwen3_moe")
    layer = moe_layers(model)[1]
    assert layer.shell is not None
    if where == "inside":
        name = next(name for name, module in layer.shell.router.named_modules() if isinstance(module, nn.Linear))
        setattr(layer.shell.router, name, LoraLinear(layer.shell.router.get_submodule(name)))
        return model, "'style'"
    if where == "around":
        model.model.layers[1].mlp.gate = LoraAround(model.model.layers[1].mlp.gate)
        return model, "'tone'"
    nn.utils.parametrize.register_parametrization(layer.shell.router, "weight", nn.Identity())
    return model, "parametrization of weight"


@pytest.mark.parametrize("where", ["inside", "around", "parametrization"])
def test_an_adapter_on_the_router_is_named(where: str, tmp_path: Path) -> None:
    model, words = adapted(where)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for change in (drop_experts, duplicate_experts):
        with pytest.raises(ValueError, match="merge it first") as refused:
            change(model, [0])
        assert words in str(refused.value) and "layers.1" in str(refused.value)
    with pytest.raises(ValueError, match="merge it first"):
        save(model, tmp_path / "cut")  # type: ignore[arg-type]
    assert not (tmp_path / "cut").exists()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# Copies --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["qwen3_moe", "step3p7"])
@torch.no_grad()
def test_a_copy_taken_inside_fast_experts_is_as_the_original_was(name: str) -> None:
    """Through transformers' interface, and where the bank's own forward is replaced."""
    model: Any = build(name)
    before, plain = model.config._experts_implementation_internal, run(model)
    with use_fast_experts(model) as fast:
        copied: Any = copy.deepcopy(model)
        assert "replaced" in str(fast) or pickle.loads(pickle.dumps(model.config))._experts_implementation == before
    assert copied.config._experts_implementation_internal == before
    for one, other in zip(copied.modules(), model.modules(), strict=True):
        assert vars(one).keys() == vars(other).keys()
        assert "forward" not in vars(one) and "__deepcopy__" not in vars(one)
    assert torch.equal(run(copied), plain)
    with use_fast_experts(copied) as fast:  # and can be switched by itself
        assert not fast.refused
        assert model.config._experts_implementation_internal == before
        assert (run(copied) - plain).abs().max() < 1e-5
    assert torch.equal(run(copied), plain)
    banks = [layer.experts.module for layer in moe_layers(copied)]
    assert all(bank is not layer.experts.module for bank, layer in zip(banks, moe_layers(model), strict=True))
