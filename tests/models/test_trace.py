"""Traces: what a model decided, on disk as it comes, cut, joined, imported and replayed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moesaic.formats.trace import TraceLayer, TraceWriter
from moesaic.models.override import override_routing
from moesaic.models.record import record_routing
from moesaic.models.trace import RoutingTrace
from tests.models.families import EXPERTS, build, run, token_ids
from tests.models.small import small_model, tokens


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build("qwen3_moe")


def trace_of(model: nn.Module, folder: Path, *batches: torch.Tensor, **inputs) -> RoutingTrace:
    with torch.no_grad(), record_routing(model, stream_to=folder):
        for ids in batches:
            run(model, ids, **inputs)
    return RoutingTrace.load(folder)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "gemma4"])
def test_a_trace_is_what_was_recorded(name: str, tmp_path: Path) -> None:
    model = build(name)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    with record_routing(model) as record:
        run(model, attention_mask=mask)
    trace = trace_of(model, tmp_path / "t", token_ids(), attention_mask=mask)
    assert len(trace) == len(record.calls)
    assert trace.passes == 1
    for call, kept in zip(record.calls, trace, strict=True):
        routing = trace.routing(kept)
        assert kept.layer == call.layer.index
        assert kept.phase == "prefill"
        assert torch.equal(routing.expert_ids_TK, call.routing.expert_ids_TK)
        assert torch.equal(routing.weights_TK, call.routing.weights_TK.float())
        assert torch.equal(kept.rows.mask_T, call.routing.real_T)
        assert torch.equal(routing.load_E, call.routing.load_E)
        assert torch.equal(kept.rows.position_T, call.context.position_T)


@torch.no_grad()
def test_a_replayed_trace_gives_the_logits_again(model: nn.Module, tmp_path: Path) -> None:
    batches = [token_ids(2, 9), token_ids(1, 5, seed=4)]
    forced = torch.arange(2)
    with (
        record_routing(model, stream_to=tmp_path / "t"),
        override_routing(model, lambda call: call.choose(ids_TK=forced.expand(call.routing.num_rows, 2))),
    ):
        expected = [run(model, ids) for ids in batches]
    trace = RoutingTrace.load(tmp_path / "t")
    assert trace.passes == 2
    with override_routing(model, trace.replay()):
        again = [run(model, ids) for ids in batches]
    for first, second in zip(expected, again, strict=True):
        assert torch.equal(first, second)
    assert not torch.allclose(run(model, batches[0]), expected[0])
    with pytest.raises(ValueError, match="no further call"), override_routing(model, trace.slice(0, 1).replay()):
        [run(model, ids) for ids in batches]
    words = "18 rows in pass 0, the model has 10"
    with pytest.raises(ValueError, match=words), override_routing(model, trace.replay()):
        run(model, token_ids(2, 5))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["foreign", "ours"])
def test_prefill_and_decode_with_padding_on_either_side(kind: str, tmp_path: Path) -> None:
    model = build("qwen3_moe") if kind == "foreign" else small_model()
    ids = tokens(2, 6)
    for side, where in (("left", slice(0, 2)), ("right", slice(4, 6))):
        mask = torch.ones_like(ids)
        mask[0, where] = 0
        with record_routing(model, stream_to=tmp_path / side):
            cache = model(ids, attention_mask=mask, use_cache=True)
            cache = getattr(cache, "cache", None) or cache.past_key_values
            longer = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
            model(ids[:, :1], attention_mask=longer, cache=cache, use_cache=True)
        trace = RoutingTrace.load(tmp_path / side)
        prefill, decode = trace.slice(phase="prefill"), trace.slice(phase="decode")
        assert (prefill.passes, decode.passes) == (1, 1)
        assert [call.rows.mask_T.view(2, 6)[0].tolist() for call in prefill] == [mask[0].bool().tolist()] * len(prefill)
        assert all(len(call.ids_TK) == 2 and bool(call.rows.mask_T.all()) for call in decode)
        for call in prefill:  # padding: only empty slots
            assert bool((call.ids_TK[~call.rows.mask_T] == trace.layers[0].num_experts).all())


def test_slices_and_concatenation(model: nn.Module, tmp_path: Path) -> None:
    trace = trace_of(model, tmp_path / "a", *(token_ids(1, 4 + i, seed=i) for i in range(4)))
    other = trace_of(model, tmp_path / "b", token_ids(1, 30))
    middle = trace.slice(1, 3)
    assert [len(call.ids_TK) for call in middle] == [5] * 3 + [6] * 3
    joined = middle.concatenate(other, trace)
    assert joined.passes == 2 + 1 + 4
    joined.save(tmp_path / "joined")
    back = RoutingTrace.load(tmp_path / "joined")
    assert back.layers == trace.layers
    for first, second in zip(joined, back, strict=True):
        assert (first.layer, first.pass_number, first.phase) == (second.layer, second.pass_number, second.phase)
        assert torch.equal(first.ids_TK, second.ids_TK)
        assert torch.equal(first.weights_TK, second.weights_TK)
    with pytest.raises(ValueError, match="different layers"):
        trace.concatenate(RoutingTrace([], [TraceLayer(0, "x", 4)]))


def test_shards_are_small_and_a_killed_writer_leaves_a_readable_trace(tmp_path: Path) -> None:
    """SIGKILL while a shard is being written: those before it open, in order, and nothing half-written with them."""
    script = f"""
        import itertools, os, signal
        import torch
        from moesaic.formats.trace import PassRows, TraceCall, TraceLayer, TraceWriter
        replace, count = os.replace, itertools.count(1)
        from pathlib import Path
        whole = Path.replace
        def die(self, target):
            if next(count) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(self, target)
        Path.replace = die
        writer = TraceWriter({str(tmp_path / "t")!r}, [TraceLayer(0, "moe", 8)], shard_slots=64)
        none = torch.full((16,), -1)
        for number in range(100):
            rows = PassRows(torch.ones(16, dtype=torch.bool), none, none)
            ids = torch.full((16, 2), number % 8)
            writer.add(TraceCall(0, number, "prefill", ids, torch.ones(16, 2), rows))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    trace = RoutingTrace.load(tmp_path / "t")
    assert len(trace) == 6  # three shards of two calls
    assert [int(call.ids_TK[0, 0]) for call in trace] == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_million_tokens_with_flat_memory(tmp_path: Path) -> None:
    script = f"""
        import resource
        import torch
        from moesaic.models.record import record_routing
        from tests.models.small import small_model, tokens
        torch.set_num_threads(1)
        model = small_model(num_hidden_layers=1, mlp_layer_types=["moe"])
        with torch.no_grad(), record_routing(model, stream_to={str(tmp_path / "t")!r}):
            for step in range(500):
                model(tokens(8, 250, step))
                if step == 150:
                    early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        late = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print((late - early) / 1024)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    assert float(done.stdout) < 60  # MB; the million tokens' ids and weights alone are 12 MB a layer a shard more
    trace = RoutingTrace.load(tmp_path / "t")
    assert sum(len(call.ids_TK) for call in trace) == 1_000_000


@pytest.mark.case("C13")
def test_what_serving_engines_give_is_imported(tmp_path: Path) -> None:
    ids = torch.tensor([[[0, 3], [1, -1]], [[2, 2], [7, 0]], [[-1, -1], [-1, -1]]], dtype=torch.int16)
    trace = RoutingTrace.from_ids(ids, EXPERTS, layers=["a", "b"])
    first, second = (trace.routing(call) for call in trace)
    assert first.expert_ids_TK.tolist() == [[0, 3], [2, 2], [8, 8]]
    assert second.weights_TK.tolist() == [[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]]
    assert second.load_E.tolist() == [1, 1, 0, 0, 0, 0, 0, 1]
    assert first.real_T.tolist() == [True, True, False]
    for wrong in (-2, 8):
        with pytest.raises(ValueError, match=f"ids_TLK holds {wrong}: ids must lie in 0..7, or be padding = -1"):
            RoutingTrace.from_ids(ids.masked_fill(ids == 3, wrong), EXPERTS)
    with pytest.raises(ValueError, match=r"must be integers \(T, L, K\)"):
        RoutingTrace.from_ids(ids[0], EXPERTS)
    writer_layers = [TraceLayer(0, "a", EXPERTS)]
    call = next(iter(trace))
    for wrong in (-1, 9):
        bad = type(call)(0, 0, "decode", call.ids_TK.masked_fill(call.ids_TK == 3, wrong), call.weights_TK, call.rows)
        with pytest.raises(ValueError, match=r"ids must lie in 0\.\.7, or be 8 for an empty slot"):
            TraceWriter(tmp_path / str(wrong), writer_layers).add(bad)


def test_refusals(model: nn.Module, tmp_path: Path) -> None:
    trace_of(model, tmp_path / "t", token_ids())
    with pytest.raises(ValueError, match="already holds a trace"):
        trace_of(model, tmp_path / "t", token_ids())
    with pytest.raises(ValueError, match="leave hidden, outputs and reduce out"):
        record_routing(model, hidden=True, stream_to=tmp_path / "u").__enter__()
    with pytest.raises(ValueError, match="holds no routing trace"):
        RoutingTrace.load(tmp_path)
    with record_routing(model, stream_to=tmp_path / "v") as record, torch.no_grad():
        run(model)
    assert len(record) == 3
    with pytest.raises(RuntimeError, match="streamed to"):
        _ = record.calls
    shard = tmp_path / "t" / "shard-00000.safetensors"
    tensors = load_file(shard)
    save_file(tensors, shard, {"format": "moesaic-trace", "version": "99", "layers": "[]"})
    with pytest.raises(ValueError, match="version 99, this moesaic reads up to 1"):
        RoutingTrace.load(tmp_path / "t")
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        RoutingTrace.load(tmp_path / "t")
    shard.rename(shard.with_name("shard-00001.safetensors"))
    with pytest.raises(ValueError, match=r"lacks shard-00000\.safetensors"):
        RoutingTrace.load(tmp_path / "t")
