"""Models after 135 seconds of training: a reference transformer, our best dense one, our MoE as active, and n-grams.

    python benchmarks/quickstart.py            # 4 arms x 3 seeds, about 32 minutes; a rerun goes on where it stopped
    python benchmarks/quickstart.py --table    # print the stored table

One process at a time, two threads, compile time and everything else of the training loop inside the 135 seconds; run it
alone on the machine. Text: the bundled Shakespeare, characters. Hyper-parameters were chosen by training on the first
85 % and reading the next 5 %; here each arm trains on the first 90 % and the last 10 % are reported. Windows overlap by
half, each character is scored once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ARMS = {
    "reference": "reference, dense",
    "dense": "our best dense",
    "moe": "our MoE",
    "moe-ngram": "our MoE with n-gram tables",
}
NGRAM = "model.ngram={orders: [2, 3, 4, 5, 6], rows: 65536, min_count: 3}"
SECONDS = 135.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "bench" / "quickstart.json")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="other lengths are for trying; not stored")
    parser.add_argument("--arm", choices=ARMS, help="measure one arm and seed in this process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.arm is not None:
        print(json.dumps(measure(options.arm, options.seed, options.seconds, options.threads)))
        return
    stored = json.loads(options.results.read_text()) if options.results.exists() else {"rows": []}
    if not options.table:
        run_missing(stored, options)
    print(table(stored["rows"]))


def run_missing(stored: dict[str, Any], options: argparse.Namespace) -> None:
    """Measure what is not stored yet, arms in turn, and store each row as it comes."""
    from moesaic.analysis.machine import machine_facts
    from moesaic.formats.atomic import atomic_file

    done = {(row["arm"], row["seed"]) for row in stored["rows"]}
    for seed in range(options.seeds):
        for arm in ARMS:
            if (arm, seed) in done:
                continue
            command = [sys.executable, __file__, "--arm", arm, "--seed", str(seed)]
            command += ["--seconds", str(options.seconds), "--threads", str(options.threads)]
            answer = subprocess.run(command, check=True, capture_output=True, text=True)
            row = json.loads(answer.stdout.splitlines()[-1])
            print(f"{arm}, seed {seed}: {row['steps']} steps, last 10 %: {row['test']:.4f}", flush=True)
            stored["rows"].append(row)
            stored["machine"] = machine_facts() | {"threads": options.threads}
            stored["command"] = "python benchmarks/quickstart.py"
            if options.seconds == SECONDS:
                with atomic_file(options.results) as file:
                    file.write(json.dumps(stored, indent=1).encode() + b"\n")


def measure(arm: str, seed: int, seconds: float, threads: int) -> dict[str, Any]:
    """Train one model for ``seconds`` and score it once on the last 10 %."""
    import time

    start = time.perf_counter()
    import torch

    from moesaic.training import Trainer, evaluate_tokens, load_text_data
    from moesaic.training.config_file import read_run_config
    from moesaic.training.recipes import recipe
    from moesaic.training.run import build_model

    torch.set_num_threads(threads)
    changes = [f"train.seconds={seconds}", f"train.seed={seed}", "data.eval=0.0"]
    if arm == "moe-ngram":
        changes.append(NGRAM)
    run = read_run_config(recipe("moe" if arm.startswith("moe") else "dense"), changes)
    if arm == "reference":
        run.train = reference_training(seconds, seed)
    data = load_text_data(run.data, seed=seed)
    assert data.tokenizer is not None and data.eval_tokens is None and data.test_tokens is not None
    model = reference_model(data.tokenizer.vocab_size, seed) if arm == "reference" else build_model(run, data)
    report = Trainer(model, data, run.train).train()
    length = run.train.all_stages()[-1].length
    test = evaluate_tokens(model, data.test_tokens, length=length, stride=length // 2).loss
    return {
        "arm": arm,
        "seed": seed,
        "steps": report.steps,
        "tokens": report.items,
        "seconds": report.seconds,
        "whole_seconds": time.perf_counter() - start,
        "train": report.loss,
        "test": test,
        **active_parameters(model),
    }


def reference_model(vocabulary: int, seed: int) -> Any:
    """GPT-2's architecture in transformers: 4 layers, 4 heads, width 128, context 64, GELU, learned positions."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=64, n_embd=128, n_layer=4, n_head=4, activation_function="gelu",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def reference_training(seconds: float, seed: int) -> Any:
    """AdamW at 1e-3 with a cosine to a tenth, batch 12."""
    from moesaic.training import OptimizerConfig, ScheduleConfig, TrainConfig

    return TrainConfig(
        seconds=seconds, seed=seed, batch=12, length=64, clip=1.0, log_every=100, hold_memory=True,
        schedule=ScheduleConfig("cosine", warmup=100, final=0.1),
        optimizer=OptimizerConfig("adamw", lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
    )  # fmt: skip


def active_parameters(model: Any) -> dict[str, int]:
    """All parameters, and those that one token multiplies with or reads."""
    from moesaic.analysis.statistics import parameter_count

    try:
        count = parameter_count(model)
        return {"parameters": count.total, "active": count.active}
    except ValueError:  # no MoE layer
        total = sum(parameter.numel() for parameter in model.parameters())
        tables = [module for module in model.modules() if hasattr(module, "active_parameters")]
        idle = sum(table.table_RD.numel() - table.active_parameters for table in tables)
        return {"parameters": total, "active": total - idle}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: median over seeds, with the range."""
    lines = [
        "| arm | nats per character, last 10 % (median, range) | steps | active parameters | all |",
        "|---|---|---|---|---|",
    ]
    for arm, label in ARMS.items():
        own = [row for row in rows if row["arm"] == arm]
        if not own:
            continue
        tests = sorted(row["test"] for row in own)
        steps = round(statistics.median(row["steps"] for row in own))
        lines.append(
            f"| {label} | **{statistics.median(tests):.3f}** ({tests[0]:.3f} to {tests[-1]:.3f}, {len(own)} seeds)"
            f" | {steps} | {own[0]['active']:,} | {own[0]['parameters']:,} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
