"""What a router or an expert may know beside the token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

PHASES = ("train", "prefill", "decode")


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """Everything a router or an expert may know beside the token; goes to routers, experts and override calls alike.

    Args:
        token_mask_T: (T,) bool, True for real rows; padded rows get only empty slots and count nowhere.
        group_T: (T,) int64, the sequence, sample, subject or environment step that a row belongs to.
        position_T: (T,) int64, position of the row inside its sequence.
        phase: ``"train"``, ``"prefill"``, ``"decode"`` or None when it is not known.
        condition: named tensors (text, domain prompt, diffusion time, task ...), one row a token or one for all.

    Raises:
        ValueError: fields of different lengths or kinds, an unknown phase.
    """

    token_mask_T: Tensor | None = None
    group_T: Tensor | None = None
    position_T: Tensor | None = None
    phase: str | None = None
    condition: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        rows: int | None = None
        for name in ("token_mask_T", "group_T", "position_T"):
            value = getattr(self, name)
            if value is None:
                continue
            if value.dim() != 1:
                raise ValueError(f"{name} must have shape (T,), got {tuple(value.shape)}")
            if rows is not None and value.shape[0] != rows:
                raise ValueError(f"{name} has {value.shape[0]} rows, other fields of the context have {rows}")
            rows = value.shape[0]
        if self.token_mask_T is not None and self.token_mask_T.dtype != torch.bool:
            raise ValueError(f"token_mask_T must be bool (True = real row), got {self.token_mask_T.dtype}")
        for name in ("group_T", "position_T"):
            value = getattr(self, name)
            if value is not None and value.dtype != torch.int64:
                raise ValueError(f"{name} must be int64, got {value.dtype}")
        if self.phase is not None and self.phase not in PHASES:
            raise ValueError(f"phase must be one of {PHASES} or None, got {self.phase!r}")
        object.__setattr__(self, "condition", MappingProxyType(dict(self.condition)))

    @classmethod
    def from_mask(
        cls,
        mask_BS: Tensor | None,
        batch: int,
        length: int,
        *,
        device: torch.device | None = None,
        position_BS: Tensor | None = None,
        phase: str | None = None,
        condition: Mapping[str, Tensor] | None = None,
    ) -> Context:
        """Context of a padded batch of sequences flattened to T = B * S rows.

        Args:
            mask_BS: (B, S') bool or integer mask, nonzero for real tokens, S' >= S (with a cache it covers the past
                too; the last S columns count), or None when nothing is padded. A 4-D mask says who may attend to
                whom, not which rows are real: it is refused.
            batch: B.
            length: S, the tokens of this call.
            device: where to build the fields; that of the mask by default.
            position_BS: (B, S) or (S,) positions; by default counted from the first real token of each row.
            phase: see the class.
            condition: see the class.

        Raises:
            ValueError: a mask or positions of another shape or kind.
        """
        if mask_BS is not None:
            if mask_BS.dim() != 2 or mask_BS.shape[0] != batch or mask_BS.shape[1] < length:
                raise ValueError(
                    f"mask must have shape (B, S) = ({batch}, >= {length}), got {tuple(mask_BS.shape)}; give the 2-D"
                    " padding mask (1 = real token): a 4-D attention mask does not say which tokens are padding"
                )
            if mask_BS.dtype.is_floating_point:
                raise ValueError(
                    f"mask must be bool or integer (1 = real token), got {mask_BS.dtype}: an additive mask is ambiguous"
                )
            device = mask_BS.device if device is None else device
        if position_BS is None:
            if mask_BS is not None:
                position_BS = ((mask_BS != 0).long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
            else:
                position_BS = torch.arange(length, device=device)
        elif position_BS.shape not in ((length,), (1, length), (batch, length)):
            raise ValueError(
                f"position_BS must have shape ({batch}, {length}) or ({length},), got {tuple(position_BS.shape)}"
            )
        position_T = position_BS.to(torch.int64).expand(batch, length).reshape(-1)
        return cls(
            token_mask_T=None if mask_BS is None else mask_BS[:, -length:].to(torch.bool).reshape(-1),
            group_T=torch.arange(batch, device=device).repeat_interleave(length),
            position_T=position_T,
            phase=phase,
            condition=condition or {},
        )

    @property
    def num_rows(self) -> int | None:
        """T, or None when no field says it."""
        for value in (self.token_mask_T, self.group_T, self.position_T):
            if value is not None:
                return int(value.shape[0])
        return None

    def require(self, needs: Iterable[str], who: str) -> None:
        """Refuse at the door when something that a part needs is missing.

        Args:
            needs: field names (``"group_T"``) or ``"condition:NAME"``.
            who: name of the part, for the message.

        Raises:
            ValueError: a need that the context does not meet.
        """
        for need in needs:
            field, _, key = need.partition(":")
            missing = key not in self.condition if field == "condition" else getattr(self, field) is None
            if missing:
                has = [
                    f.name
                    for f in dataclasses.fields(self)
                    if f.name != "condition" and getattr(self, f.name) is not None
                ]
                has += [f"condition:{name}" for name in self.condition]
                give = f"condition={{{key!r}: ...}}" if field == "condition" else f"{field}=..."
                raise ValueError(
                    f"{who} needs {need} in its context, which has {has or 'nothing'}: pass Context({give})"
                )

    def check_rows(self, rows: int, who: str) -> None:
        """Refuse a context made for another number of rows.

        Raises:
            ValueError: the fields have another length than ``rows``.
        """
        have = self.num_rows
        if have is not None and have != rows:
            raise ValueError(f"{who} got {rows} rows and a context for {have}")

    def replace(self, **changes: Any) -> Context:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)
