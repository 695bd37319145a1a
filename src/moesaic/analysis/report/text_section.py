"""A text whose tokens are coloured by their expert, layer by layer."""

from __future__ import annotations

import html
import json

from moesaic.analysis.report.sections import Section, Subject, register_section

# Colours by the golden angle, so that neighbouring ids differ; the script only reads numbers.
SCRIPT = """
(function(){var box=document.getElementById('coloured'),slider=document.getElementById('layer'),
data=JSON.parse(document.getElementById('experts').textContent),name=document.getElementById('layer-name'),spans=box.children;
function paint(){var row=data.experts[slider.value];name.textContent=slider.value+': '+data.names[slider.value];
for(var i=0;i<spans.length;i++){var e=row[i];spans[i].style.background=e<0?'#ddd':'hsl('+(e*137.508%360)+' 65% 72%)';
spans[i].title=e<0?'no expert':'expert '+e;}}
slider.addEventListener('input',paint);paint();})();
"""


@register_section("text", order=50)
def coloured_text(subject: Subject) -> Section | None:
    """The first tokens of the text; a slider chooses the layer."""
    experts = subject.statistics.top_experts_LT
    count = min([len(subject.tokens), *(len(row) for row in experts)])
    if not count:
        return None
    spans = "".join(f"<span>{html.escape(token)}</span>" for token in subject.tokens[:count])
    names = [layer.name for layer in subject.statistics.layers]
    # Inside a script element only "</" could end it early.
    payload = json.dumps({"experts": [row[:count] for row in experts], "names": names}).replace("<", "\\u003c")
    body = (
        f"<p>The first {count} tokens; colour is the expert with the largest weight. Hover a token for its number.</p>"
        f'<label>layer <span id="layer-name"></span><br><input id="layer" type="range" min="0"'
        f' max="{len(experts) - 1}" value="0" aria-label="MoE layer"></label>'
        f'<div class="text" id="coloured">{spans}</div>'
        f'<script type="application/json" id="experts">{payload}</script><script>{SCRIPT}</script>'
    )
    data = {"tokens": subject.tokens[:count], "experts": [row[:count] for row in experts]}
    return Section("text", "A text, coloured by expert", body, data)
