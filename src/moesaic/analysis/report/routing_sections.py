"""The report's own sections on sizes and routing."""

from __future__ import annotations

import html
import math

import numpy as np
from matplotlib.figure import Figure

from moesaic.analysis.report.sections import Section, Subject, register_section
from moesaic.analysis.statistics import OVERLOADED, LayerStatistics, parameter_count

MOST_PAIRS = 6  # co-activation matrices shown; the data holds all


@register_section("sizes", order=10)
def sizes(subject: Subject) -> Section:
    """Parameters total and active, layers, experts."""
    layers = subject.statistics.layers
    used = [layer.active_per_token() for layer in layers]
    count = parameter_count(subject.model, used)
    experts = sorted({layer.num_experts for layer in layers})
    tiles = {
        "parameters": _short(count.total),
        "active per token": f"{_short(count.active)} ({count.active / count.total:.0%})",
        "in routed experts": f"{_short(count.experts)} ({count.experts / count.total:.0%})",
        "MoE layers": str(len(layers)),
        "experts a layer": _range(experts),
        "experts per token": f"{min(used):.3g}" + (f" to {max(used):.3g}" if max(used) - min(used) > 0.005 else ""),
        "tokens read": f"{subject.statistics.tokens:,}",
    }
    body = "".join(
        f'<div class="tile">{html.escape(name)}<b>{html.escape(value)}</b></div>' for name, value in tiles.items()
    )
    data = {
        "parameters": count.total,
        "active": count.active,
        "in_experts": count.experts,
        "in_routers": count.routers,
        "layers": [{"name": item.name, "experts": item.num_experts, "top_k": item.top_k} for item in layers],
        "tokens": subject.statistics.tokens,
        "text": subject.source,
    }
    return Section("sizes", "Sizes", f'<div class="tiles">{body}</div>', data)


@register_section("load", order=20)
def load(subject: Subject) -> Section:
    """Heat map layers x experts, with dead and overloaded experts named."""
    layers = subject.statistics.layers
    widest = max(layer.num_experts for layer in layers)
    relative = np.full((len(layers), widest), np.nan)
    for row, layer in enumerate(layers):
        relative[row, : layer.num_experts] = layer.share_E().numpy() * layer.num_experts
    figure = Figure(figsize=(min(11, 3 + widest * 0.28), 1.6 + len(layers) * 0.28))
    axes = figure.add_subplot()
    image = axes.imshow(
        relative, aspect="auto", cmap="viridis", vmin=0, vmax=max(OVERLOADED, float(np.nanmax(relative)))
    )
    axes.set(xlabel="expert", ylabel="MoE layer", title="load, times the layer's mean")
    axes.set_yticks(range(len(layers)))
    if widest <= 32:
        axes.set_xticks(range(widest))
    figure.colorbar(image, ax=axes, use_gridspec=False)
    dead, heavy = sum(len(layer.dead()) for layer in layers), sum(len(layer.overloaded()) for layer in layers)
    total = sum(layer.num_experts for layer in layers)
    words = (
        f"<p>{dead} of {total} experts got no token; {heavy} got more than {OVERLOADED:g} times their layer's mean.</p>"
    )
    rows = "".join(_load_row(layer) for layer in layers)
    heads = "<tr><th>layer</th><th>largest share</th><th>smallest share</th><th>dead</th><th>overloaded</th></tr>"
    data = {
        "dead": {layer.index: layer.dead() for layer in layers},
        "overloaded": {layer.index: layer.overloaded() for layer in layers},
        "load": [layer.load_E.tolist() for layer in layers],
        "importance": [layer.importance_E.tolist() for layer in layers],
    }
    return Section("load", "Load of each expert", f"{words}{_table(heads + rows)}", data, {"heatmap": figure})


def _load_row(layer: LayerStatistics) -> str:
    share = layer.share_E()
    cells = (
        html.escape(layer.name),
        f"{float(share.max()):.1%}",
        f"{float(share.min()):.1%}",
        _ids(layer.dead()),
        _ids(layer.overloaded()),
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


@register_section("sharpness", order=30)
def sharpness(subject: Subject) -> Section | None:
    """Entropy per layer and the mean sorted score profile."""
    layers = [layer for layer in subject.statistics.layers if layer.rows_with_probs]
    if not layers:
        return None
    figure = Figure(figsize=(9.5, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    entropies = [layer.mean_entropy() or 0.0 for layer in layers]
    left.bar([layer.index for layer in layers], entropies, color="#31688e")
    ceiling = max(math.log(layer.num_experts) for layer in layers)
    left.axhline(ceiling, color="#888", linestyle="--", linewidth=1)
    left.set(xlabel="MoE layer", ylabel="nats", title="mean entropy (dashed: uniform)")
    left.set_xticks([layer.index for layer in layers])
    left.set_xlim(layers[0].index - 1.5, layers[-1].index + 1.5)  # a single bar stays a bar
    for layer in layers:
        profile = layer.mean_profile() or []
        colour = (0.2, 0.35 + 0.5 * layer.index / max(len(layers) - 1, 1), 0.65)
        right.plot(range(1, len(profile) + 1), profile, color=colour, linewidth=1.2, label=f"layer {layer.index}")
    right.set(xlabel="rank of the expert", ylabel="mean probability", title="sorted score profile", yscale="log")
    if len(layers) <= 8:
        right.legend(fontsize=9)
    names = ("layer", "entropy, nats", "of uniform", "experts per token", "first expert's share")
    heads = "<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
    rows = "".join(_sharpness_row(layer, entropy) for layer, entropy in zip(layers, entropies, strict=True))
    data = {
        "entropy": {layer.index: layer.mean_entropy() for layer in layers},
        "profile": {layer.index: layer.mean_profile() for layer in layers},
        "active_per_token": {layer.index: layer.active_per_token() for layer in layers},
    }
    return Section("sharpness", "How sure the routers are", _table(heads + rows), data, {"profile": figure})


def _sharpness_row(layer: LayerStatistics, entropy: float) -> str:
    cells = (
        html.escape(layer.name),
        f"{entropy:.3f}",
        f"{entropy / math.log(max(layer.num_experts, 2)):.0%}",
        f"{layer.active_per_token():.2f}",
        f"{(layer.mean_profile() or [0.0])[0]:.1%}",
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


@register_section("coactivation", order=40)
def coactivation(subject: Subject) -> Section | None:
    """Which expert of a layer a token uses, given its expert one layer earlier."""
    pairs = subject.statistics.coactivation
    if not pairs or not any(int(pair.sum()) for pair in pairs):
        return None
    shown = pairs if len(pairs) <= MOST_PAIRS else [pairs[round(i)] for i in np.linspace(0, len(pairs) - 1, MOST_PAIRS)]
    positions = (
        range(len(pairs))
        if len(pairs) <= MOST_PAIRS
        else [round(i) for i in np.linspace(0, len(pairs) - 1, MOST_PAIRS)]
    )
    columns = min(3, len(shown))
    lines = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(3.3 * columns, 3.1 * lines))
    for place, (low, pair) in enumerate(zip(positions, shown, strict=True)):
        axes = figure.add_subplot(lines, columns, place + 1)
        counts = pair.double().numpy()
        expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / max(counts.sum(), 1)
        lift = np.divide(counts, expected, out=np.ones_like(counts), where=expected > 0)
        axes.imshow(np.log2(np.clip(lift, 0.125, 8)), cmap="RdBu_r", vmin=-3, vmax=3, aspect="auto")
        axes.set(
            title=f"layers {low} and {low + 1}", xlabel=f"expert of layer {low + 1}", ylabel=f"expert of layer {low}"
        )
    figure.tight_layout()
    words = (
        "<p>How much more (red) or less (blue) often a token uses both experts than their loads alone would give,"
        f" on a scale of doublings from 1/8 to 8; {len(shown)} of {len(pairs)} pairs of neighbouring layers.</p>"
    )
    data = {"pairs": {low: pair.tolist() for low, pair in enumerate(pairs)}}
    return Section("coactivation", "Neighbouring layers", words, data, {"pairs": figure})


def _short(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _range(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _ids(ids: list[int]) -> str:
    return (
        "none" if not ids else ", ".join(map(str, ids[:12])) + (f" and {len(ids) - 12} more" if len(ids) > 12 else "")
    )


def _table(rows: str) -> str:
    return f'<div class="scroll"><table>{rows}</table></div>'
