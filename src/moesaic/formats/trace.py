"""Routing traces on disk: who went where, call by call, in shards that are each whole or not there.

A trace is a folder of ``shard-00000.safetensors`` ... Each shard stands for itself: its header names format, version
and layers, its tensors hold a stretch of calls. A killed writer loses the shard that it had not finished, nothing else.

| tensor | shape | holds |
|---|---|---|
| ``call/layer``, ``call/rows``, ``call/slots``, ``call/phase``, ``call/pass`` | (C,) int64 | one a call, in order |
| ``ids`` | (sum of rows x slots,) int16 or int32 | expert ids, the number of experts in empty slots |
| ``weights`` | the same, float32 | combine weights |
| ``pass/rows`` | (P,) int64 | rows of each forward pass that the shard touches, ``pass/number`` its number |
| ``mask``, ``group``, ``position`` | (sum of pass rows,) bool, int64, int64 | of each row; -1 where it was not known |
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from moesaic.formats.arguments import check_count
from moesaic.formats.atomic import atomic_file, remove_leftovers

FORMAT = "moesaic-trace"
FORMAT_VERSION = 1
PHASES = ("unknown", "train", "prefill", "decode")
_SHARD = re.compile(r"shard-(\d{5,})\.safetensors")


@dataclass(frozen=True)
class TraceLayer:
    """One MoE layer of the model that was traced.

    Attributes:
        index: by which calls name it.
        name: its path in the model.
        num_experts: E.
    """

    index: int
    name: str
    num_experts: int


@dataclass(frozen=True, eq=False)
class PassRows:
    """What is known of the rows of one forward pass.

    Attributes:
        mask_T: (T,) bool, False for padding.
        group_T, position_T: (T,) int64, -1 where not known.
    """

    mask_T: Tensor
    group_T: Tensor
    position_T: Tensor


@dataclass(frozen=True, eq=False)
class TraceCall:
    """One run of one layer.

    Attributes:
        layer: index of the layer.
        pass_number: forward pass it belongs to, counted from 0.
        phase: one of ``PHASES``.
        ids_TK: (T, K) int64, E in empty slots.
        weights_TK: (T, K) float32.
        rows: of its pass.
    """

    layer: int
    pass_number: int
    phase: str
    ids_TK: Tensor
    weights_TK: Tensor
    rows: PassRows


class TraceWriter:
    """Writes calls as they come; memory stays that of one shard.

    Args:
        folder: of the trace; made if missing.
        layers: that will be named by calls.
        shard_slots: assignments after which a shard is written.

    Raises:
        ValueError: a folder that already holds shards, ``shard_slots`` below 1.
    """

    def __init__(
        self, folder: str | os.PathLike[str], layers: Sequence[TraceLayer], shard_slots: int = 1 << 20
    ) -> None:
        shard_slots = check_count("shard_slots", shard_slots)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(_SHARD.fullmatch(entry.name) for entry in self.folder.iterdir()):
            raise ValueError(f"{str(folder)!r} already holds a trace: name another folder")
        remove_leftovers(self.folder)
        self.layers = list(layers)
        self.calls = self.shards = 0
        self._shard_slots = shard_slots
        self._experts = {layer.index: layer.num_experts for layer in layers}
        self._pending: list[TraceCall] = []
        self._slots = 0

    def add(self, call: TraceCall) -> None:
        """Take a call; its tensors may be on any device.

        Raises:
            ValueError: a layer that was not named, ids outside its experts, rows that are not those of the pass.
            OSError: the shard could not be written.
        """
        experts = self._experts.get(call.layer)
        if experts is None:
            raise ValueError(f"layer {call.layer} is none of the traced ones {sorted(self._experts)}")
        if call.ids_TK.shape != call.weights_TK.shape or call.ids_TK.shape[0] != len(call.rows.mask_T):
            raise ValueError(
                f"layer {call.layer}: ids {tuple(call.ids_TK.shape)}, weights {tuple(call.weights_TK.shape)} and"
                f" {len(call.rows.mask_T)} rows do not fit each other"
            )
        if call.ids_TK.numel() and not 0 <= int(call.ids_TK.min()) <= int(call.ids_TK.max()) <= experts:
            raise ValueError(
                f"layer {call.layer}: ids must lie in 0..{experts - 1}, or be {experts} for an empty slot; got"
                f" {int(call.ids_TK.min())}..{int(call.ids_TK.max())}"
            )
        narrow = torch.int16 if experts < 2**15 else torch.int32
        ids_TK = call.ids_TK.detach().to("cpu", narrow)
        weights_TK = call.weights_TK.detach().to("cpu", torch.float32)
        self._pending.append(TraceCall(call.layer, call.pass_number, call.phase, ids_TK, weights_TK, call.rows))
        self.calls += 1
        self._slots += max(ids_TK.numel(), ids_TK.shape[0])
        if self._slots >= self._shard_slots:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as a shard."""
        if not self._pending:
            return
        calls, passes = self._pending, {call.pass_number: call.rows for call in self._pending}
        wide = torch.int32 if any(call.ids_TK.dtype == torch.int32 for call in calls) else torch.int16
        numbers = {
            "call/layer": [call.layer for call in calls],
            "call/rows": [call.ids_TK.shape[0] for call in calls],
            "call/slots": [call.ids_TK.shape[1] for call in calls],
            "call/phase": [PHASES.index(call.phase) for call in calls],
            "call/pass": [call.pass_number for call in calls],
            "pass/number": list(passes),
            "pass/rows": [len(rows.mask_T) for rows in passes.values()],
        }
        tensors = {name: torch.tensor(values, dtype=torch.int64) for name, values in numbers.items()}
        tensors["ids"] = torch.cat([call.ids_TK.flatten().to(wide) for call in calls])
        tensors["weights"] = torch.cat([call.weights_TK.flatten() for call in calls])
        for name in ("mask", "group", "position"):
            tensors[name] = torch.cat([getattr(rows, f"{name}_T").cpu() for rows in passes.values()])
        header = {
            "format": FORMAT,
            "version": str(FORMAT_VERSION),
            "layers": json.dumps([[layer.index, layer.name, layer.num_experts] for layer in self.layers]),
        }
        with atomic_file(self.folder / f"shard-{self.shards:05d}.safetensors") as file:
            file.write(save(tensors, metadata=header))
        self.shards += 1
        self._pending, self._slots = [], 0


class TraceReader:
    """Reads a trace; one shard is in memory at a time.

    Args:
        folder: that a :class:`TraceWriter` wrote.

    Attributes:
        layers: of the traced model.

    Raises:
        ValueError: no shard, one of another or a newer format, shards of different models, a damaged or missing one.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        found = sorted(entry.name for entry in self.folder.glob("shard-*.safetensors") if _SHARD.fullmatch(entry.name))
        if not found:
            raise ValueError(f"{str(folder)!r} holds no routing trace: no file shard-00000.safetensors in it")
        expected = [f"shard-{number:05d}.safetensors" for number in range(len(found))]
        if found != expected:
            missing = sorted(set(expected) - set(found))
            raise ValueError(f"the trace {str(folder)!r} lacks {missing[0]}: copy it whole")
        self._paths = [self.folder / name for name in found]
        headers = [self._header(path) for path in self._paths]
        if any(header != headers[0] for header in headers):
            raise ValueError(f"shards of {str(folder)!r} name different layers: they are of different models")
        self.layers = [TraceLayer(*entry) for entry in json.loads(headers[0])]
        self._calls = [self._count(path) for path in self._paths]
        self._cached: tuple[int, list[TraceCall]] | None = None

    def __len__(self) -> int:
        return sum(self._calls)

    def __getitem__(self, number: int) -> TraceCall:
        """Call ``number``, from 0."""
        if not 0 <= number < len(self):
            raise IndexError(f"call {number} of a trace of {len(self)} calls")
        for shard, count in enumerate(self._calls):
            if number < count:
                return self._shard(shard)[number]
            number -= count
        raise AssertionError

    def __iter__(self) -> Iterator[TraceCall]:
        for shard in range(len(self._paths)):
            yield from self._shard(shard)

    def _header(self, path: Path) -> str:
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        if header.get("format") != FORMAT:
            raise ValueError(f"{path} has the format {header.get('format')!r}, expected {FORMAT!r}")
        if int(header["version"]) > FORMAT_VERSION:
            raise ValueError(
                f"{path} has version {header['version']}, this moesaic reads up to {FORMAT_VERSION}:"
                " install a newer one"
            )
        return str(header["layers"])

    def _count(self, path: Path) -> int:
        with safe_open(path, framework="pt") as file:
            return int(file.get_slice("call/layer").get_shape()[0])

    def _shard(self, number: int) -> list[TraceCall]:
        if self._cached is None or self._cached[0] != number:
            with safe_open(self._paths[number], framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iteration)
            self._cached = (number, _calls(tensors))
        return self._cached[1]


def _calls(tensors: Mapping[str, Tensor]) -> list[TraceCall]:
    sizes = tensors["pass/rows"].tolist()
    split = {name: torch.split(tensors[name], sizes) for name in ("mask", "group", "position")}
    passes = {
        number: PassRows(split["mask"][i], split["group"][i], split["position"][i])
        for i, number in enumerate(tensors["pass/number"].tolist())
    }
    columns = zip(*(tensors[f"call/{name}"].tolist() for name in ("layer", "rows", "slots", "phase", "pass")))
    calls, start = [], 0
    for layer, rows, slots, phase, number in columns:
        span = slice(start, start + rows * slots)
        ids_TK = tensors["ids"][span].view(rows, slots).to(torch.int64)
        weights_TK = tensors["weights"][span].view(rows, slots)
        calls.append(TraceCall(layer, number, PHASES[phase], ids_TK, weights_TK, passes[number]))
        start += rows * slots
    return calls
