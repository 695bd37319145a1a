"""``moesaic quickstart``: train a small MoE on the bundled Shakespeare text and show what it learned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.cli.common import apply_threads_and_seed, emit, stderr_console, stdout_console

QUICK_SECONDS = 12.0
PROMPT = "\n"


def quickstart(
    out: Annotated[Path, typer.Option(help="Folder of the run; must not hold one already.")] = Path("runs/quickstart"),
    quick: Annotated[bool, typer.Option("--quick", help="The same path in 40 seconds, for a first look.")] = False,
    seconds: Annotated[float | None, typer.Option(help="Training seconds, instead of the recipe's.")] = None,
    characters: Annotated[int, typer.Option(help="Characters of the sample.")] = 300,
    seed: Annotated[int, typer.Option(help="Of weights, data order and sample.")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Train, save, report: loss, load of each expert, a sample, and what to try next."""
    if characters < 1:
        raise ValueError(f"--characters must be at least 1, got {characters}")
    if seconds is not None and quick:
        raise ValueError("--quick and --seconds both say how long to train: give one of them")
    from moesaic.models import load
    from moesaic.training.config_file import read_run_config
    from moesaic.training.observers import ProgressLine
    from moesaic.training.recipes import recipe
    from moesaic.training.run import train_from_config

    apply_threads_and_seed(threads, seed)
    length = QUICK_SECONDS if quick else seconds
    changes = [f"train.seed={seed}", *([] if length is None else [f"train.seconds={length}"])]
    run = read_run_config(recipe("moe"), changes)
    run.out = str(out)
    console = stderr_console()
    console.print(f"training for {run.train.seconds:.0f} seconds on the bundled Shakespeare text", highlight=False)
    report = train_from_config(run, observers=[ProgressLine(console)])
    assert report.model is not None
    model = load(report.model)
    result: dict[str, Any] = {
        "model": str(report.model),
        "routing": str(out / "routing.safetensors"),
        "steps": report.steps,
        "seconds": round(report.seconds, 1),
        "train_loss": report.loss,
        "held_out_loss": report.eval_loss,
        "parameters": None,
        "active": None,
        "load": {},
        "unmoved_experts": len(report.unmoved),
        "sample": sample(model, report.model, characters, seed),
    }
    _add_routing(result, model, report.model)
    emit(result, json_output)
    if not json_output:
        _show(result)


def sample(model: Any, folder: Path, characters: int, seed: int) -> str:
    """Text that the model writes on its own, at temperature 0.8."""
    import torch

    from moesaic.data.tokenize import Tokenizer

    tokenizer = Tokenizer.load(folder)
    prompt = torch.from_numpy(tokenizer.encode(PROMPT)).long()[None]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids = model.generate(
            prompt, max_new_tokens=characters, do_sample=True, temperature=0.8, top_k=0, pad_token_id=0
        )
    return tokenizer.decode(ids[0].tolist()).strip("\n")


def _add_routing(result: dict[str, Any], model: Any, folder: Path) -> None:
    """Parameters and the share of tokens of each expert, on held-out text."""
    from moesaic.analysis.statistics import parameter_count, routing_statistics
    from moesaic.analysis.text import read_batches

    reading = read_batches(folder, model, None, 8192, 128)
    statistics = routing_statistics(model, reading.batches, coloured=0)
    count = parameter_count(model, [layer.active_per_token() for layer in statistics.layers])
    result["parameters"], result["active"] = count.total, count.active
    result["load"] = {
        layer.name: [round(share, 4) for share in layer.share_E().tolist()] for layer in statistics.layers
    }


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table

    console = stdout_console()
    console.print(
        f"\n{result['parameters']:,} parameters, {result['active']:,} active per token;"
        f" {result['steps']} steps in {result['seconds']} s",
        soft_wrap=True,
    )
    console.print(
        f"held-out loss {result['held_out_loss']:.4f} nats per character (of the 5 % of the text before its last 10 %;"
        " training saw neither)\n",
        soft_wrap=True,
    )
    table = Table(title="share of the tokens that each expert took", title_justify="left", box=None, pad_edge=False)
    table.add_column("MoE layer")
    for expert in range(max(map(len, result["load"].values()), default=0)):
        table.add_column(str(expert), justify="right")
    for number, shares in enumerate(result["load"].values()):
        table.add_row(str(number), *(f"{share:.0%}" for share in shares))
    console.print(table)
    console.print("\na sample\n--------")
    console.print(result["sample"], markup=False)
    console.print(
        f"--------\nmodel: {result['model']}\nrouting table: {result['routing']}", markup=False, soft_wrap=True
    )
    console.print("\nnext:", markup=False)
    for line in (
        f"moesaic inspect {result['model']} --html report.html    # see who goes where",
        f"moesaic train {_recipe_path()} --out runs/longer --set train.seconds=600    # the same recipe, longer",
        "moesaic methods    # the published systems that are parts here",
    ):
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _recipe_path() -> Path:
    from moesaic.training.recipes import recipe

    path = recipe("moe")
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
