"""Which optimizer moves which parameter, read from the roles of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.models.parameter_roles import model_parameter_specs
from moesaic.routing import ParameterSpec
from moesaic.training.config import OptimizerConfig
from moesaic.training.muon import Muon
from moesaic.training.row_adam import RowAdam

NO_DECAY = frozenset({"router", "norm", "bias", "expert-bias", "scalar"})
MATRICES = frozenset({"dense", "expert-in", "expert-out"})
EXPERT_MATRICES = frozenset({"expert-in", "expert-out"})


class Optimizers:
    """The optimizers of a run, driven as one.

    Args:
        parts: name -> optimizer; a group's ``base_lr`` is its learning rate at factor 1.
        names: parameter -> name, for saving.
    """

    def __init__(self, parts: Mapping[str, torch.optim.Optimizer], names: Mapping[Tensor, str]) -> None:
        self.parts = dict(parts)
        self._names = dict(names)
        for optimizer in self.parts.values():
            for group in optimizer.param_groups:
                group.setdefault("base_lr", group["lr"])

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter that is moved."""
        return [p for optimizer in self.parts.values() for group in optimizer.param_groups for p in group["params"]]

    def set_factor(self, factor: float) -> None:
        """Set every group's learning rate to ``factor`` times its base."""
        for optimizer in self.parts.values():
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor

    @torch.no_grad()
    def clip(self, largest: float) -> Tensor:
        """Scale all gradients so that their common norm is at most ``largest``.

        Returns:
            The norm before, a 0-dim tensor.
        """
        norm = self.gradient_norm()
        factor = (largest / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(self._gradients(), factor)
        return norm

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Norm of all gradients together, a 0-dim tensor."""
        norms = torch._foreach_norm(self._gradients())
        norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))
        return norm

    def _gradients(self) -> list[Tensor]:
        """All gradients; of sparse ones the values, each row once."""
        found = []
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
                found.append(parameter.grad._values())
            else:
                found.append(parameter.grad)
        return found

    def step(self) -> None:
        """Take one step with each."""
        for optimizer in self.parts.values():
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.parts.values():
            optimizer.zero_grad(set_to_none=True)

    def carry(self, new: Optimizers) -> None:
        """Move the state of parameters that ``new`` has too, as the same objects of the same shape, into ``new``."""
        for part, optimizer in new.parts.items():
            old = self.parts.get(part)
            if old is None:
                continue
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = old.state.get(parameter)
                    if state and all(not v.dim() or v.shape[:1] == parameter.shape[:1] for v in _tensors(state)):
                        optimizer.state[parameter] = state
            for before, now in zip(old.param_groups, optimizer.param_groups):
                if isinstance(before.get("step"), int):
                    now["step"] = before["step"]

    def state_tensors(self) -> dict[str, Tensor]:
        """All state as tensors, ``optimizer/parameter/key`` -> tensor; steps of groups as 0-dim int64."""
        tensors: dict[str, Tensor] = {}
        for part, optimizer in self.parts.items():
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    tensors[f"{part}/{self._names[parameter]}/{key}"] = torch.as_tensor(value)
            for index, group in enumerate(optimizer.param_groups):
                if isinstance(group.get("step"), int):
                    tensors[f"{part}/#{index}/step"] = torch.tensor(group["step"])
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`state_tensors` gave.

        Raises:
            ValueError: state of a parameter or optimizer that this run does not have, or of another shape.
        """
        by_name = {name: parameter for parameter, name in self._names.items()}
        for full, value in tensors.items():
            if full == "__empty__":
                continue
            part, _, rest = full.partition("/")
            name, _, key = rest.rpartition("/")
            optimizer = self.parts.get(part)
            if optimizer is None:
                raise ValueError(
                    f"the checkpoint holds state of the optimizer {part!r}, this run has {sorted(self.parts)}"
                )
            if name.startswith("#"):
                optimizer.param_groups[int(name[1:])]["step"] = int(value)
                continue
            parameter = by_name.get(name)
            if parameter is None:
                raise ValueError(
                    f"the checkpoint holds optimizer state of {name!r}, which is no parameter of this model"
                )
            if value.dim() and value.shape[:1] != parameter.shape[:1]:
                raise ValueError(
                    f"optimizer state {full} has shape {tuple(value.shape)}, {tuple(parameter.shape)} is needed"
                )
            optimizer.state[parameter][key] = value.to(parameter.device if value.dim() else "cpu").clone()


def build_optimizers(model: nn.Module, config: OptimizerConfig) -> Optimizers:
    """Optimizers for every trainable parameter of ``model``.

    Roles come from :func:`moesaic.models.parameter_roles.model_parameter_specs`, the same for our models and for those
    of transformers: with ``config.name == "muon"`` matrices (dense, expert-in, expert-out) go to Muon and all else to
    AdamW; routers, norms, biases and scalars never decay. Tables with sparse gradients go to
    :class:`moesaic.training.row_adam.RowAdam`.

    Raises:
        ValueError: a model without trainable parameters.
    """
    adamw: dict[tuple[float, float], list[nn.Parameter]] = {}
    muon: dict[tuple[float, int | None, bool], list[nn.Parameter]] = {}
    rows: dict[float, list[nn.Parameter]] = {}
    names: dict[Tensor, str] = {}
    sparse, head = _sparse_parameters(model), _head(model)
    for name, parameter, spec in model_parameter_specs(model):
        if not parameter.requires_grad:
            continue
        if parameter is head and spec.role == "dense":
            spec = ParameterSpec(("vocab", "model"), "head")
        names[parameter] = name
        if parameter in sparse:
            rows.setdefault(config.role_lr.get(spec.role, config.lr), []).append(parameter)
        elif config.name == "muon" and _is_matrix(parameter, spec, config):
            default = config.muon.lr
            if spec.role in EXPERT_MATRICES and config.muon.expert_lr is not None:
                default = config.muon.expert_lr
            stack = _stack_axis(spec) if config.muon.experts == "stack" else None
            muon.setdefault((config.role_lr.get(spec.role, default), stack, _transposed(spec)), []).append(parameter)
        else:
            decay = 0.0 if spec.role in NO_DECAY or parameter.dim() < 2 else config.weight_decay
            adamw.setdefault((config.role_lr.get(spec.role, config.lr), decay), []).append(parameter)
    if not names:
        raise ValueError("model has no trainable parameter: unfreeze some (requires_grad)")
    parts: dict[str, torch.optim.Optimizer] = {}
    if adamw:
        groups = [{"params": params, "lr": lr, "weight_decay": decay} for (lr, decay), params in adamw.items()]
        fused = _can_fuse(groups) if config.fused is None else config.fused
        parts["adamw"] = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    if muon:
        parts["muon"] = Muon(
            [{"params": p, "lr": lr, "stack": stack, "transposed": turned} for (lr, stack, turned), p in muon.items()],
            momentum=config.muon.momentum,
            momentum_warmup=config.muon.momentum_warmup,
            weight_decay=config.weight_decay if config.muon.weight_decay is None else config.muon.weight_decay,
            iterations=config.muon.iterations,
            every=config.muon.every,
        )
    if rows:
        parts["rows"] = RowAdam([{"params": params, "lr": lr} for lr, params in rows.items()], eps=config.eps)
    return Optimizers(parts, names)


def _tensors(state: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def _sparse_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Tables with sparse gradients: what a module names in ``sparse_parameters``, and sparse ``nn.Embedding``."""
    found = set()
    for module in model.modules():
        names = getattr(module, "sparse_parameters", ())
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            names = ("weight",)
        found |= {getattr(module, name) for name in names}
    return found


def _head(model: nn.Module) -> nn.Parameter | None:
    """The output matrix, by transformers' convention; a plain Linear does not say that it is one."""
    find = getattr(model, "get_output_embeddings", None)
    layer = find() if find is not None else None
    weight = getattr(layer, "weight", None)
    return weight if isinstance(weight, nn.Parameter) else None


def _is_matrix(parameter: nn.Parameter, spec: ParameterSpec, config: OptimizerConfig) -> bool:
    if spec.role not in MATRICES or (spec.role in EXPERT_MATRICES and config.muon.experts == "adamw"):
        return False
    inner = parameter.dim() - spec.axes.count("expert")
    return parameter.dim() >= 2 and inner == 2 and min(parameter.shape[-2:]) > 1


def _stack_axis(spec: ParameterSpec) -> int | None:
    """The axis along which stacked experts join: the hidden width, so that the whole maps from or to the model."""
    if spec.axes[:1] != ("expert",) or len(spec.axes) != 3 or "width" not in spec.axes:
        return None
    return spec.axes.index("width")


def _transposed(spec: ParameterSpec) -> bool:
    """Whether a matrix is stored (in, out), which only its axes can say."""
    first, last = spec.axes[-2:]
    if spec.role == "expert-in":
        return last == "width"
    if spec.role == "expert-out":
        return first == "width"
    return (first, last) == ("in", "out")


def _can_fuse(groups: Sequence[Mapping[str, Any]]) -> bool:
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for group in groups for p in group["params"])
