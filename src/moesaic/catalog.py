"""The catalogue: which published system is which part of the machine.

Importing it is cheap: names and texts only, no torch.
"""

from __future__ import annotations

import dataclasses

STATUSES = ("ready", "planned")


@dataclasses.dataclass(frozen=True)
class Method:
    """One of the 38 published systems.

    Args:
        slug: its name on the command line, in ``results/`` and in ``docs/methods/``.
        title: of the paper.
        arxiv: identifier, or None where the paper is not on arXiv.
        changes: the folder of ``moesaic`` that it lives in: what it changes.
        summary: what it does, in a few words.
        names: public names, ``"module:Name"`` below ``moesaic``; empty while planned.
        experiment: module that holds its ``EXPERIMENT``, or None while planned.
    """

    slug: str
    title: str
    arxiv: str | None
    changes: str
    summary: str
    names: tuple[str, ...] = ()
    experiment: str | None = None

    @property
    def status(self) -> str:
        """``"ready"`` with public names and an experiment, else ``"planned"``."""
        return "ready" if self.names and self.experiment else "planned"

    @property
    def url(self) -> str | None:
        """Address of the paper on arXiv."""
        return None if self.arxiv is None else f"https://arxiv.org/abs/{self.arxiv}"


def find(slug: str) -> Method:
    """The system called ``slug``.

    Raises:
        ValueError: there is none; the message lists what there is.
    """
    for method in METHODS:
        if method.slug == slug:
            return method
    raise ValueError(f"slug must be one of {', '.join(method.slug for method in METHODS)}; got {slug!r}")


METHODS: tuple[Method, ...] = (
    # Who goes where -----------------------------------------------------------------------------------------------
    Method(
        "star-routing",
        "STAR: Rethinking MoE Routing as Structure-Aware Subspace Learning",
        "2606.08814",
        "routing",
        "a second gate in the principal subspace of the router's inputs, tracked online",
        (
            "routing:PrincipalSubspaceRouter",
            "routing:GHASubspace",
            "routing:test_time_adaptation",
        ),
        "moesaic.experiments.star_routing",
    ),
    Method(
        "dtop-p",
        "DTop-p MoE: Sparsity-Controlled Dynamic Top-p MoE for Foundation Model Pre-training",
        "2512.13996",
        "routing",
        "the fewest experts that reach a probability mass; a controller holds their mean number at a target",
        (
            "routing:DynamicTopPRouter",
            "routing:TopPRouter",
            "routing:PIThresholdController",
            "routing:share_controllers",
        ),
        "moesaic.experiments.dtop_p",
    ),
    Method(
        "usmoe",
        "Rethinking Sparse Mixture of Experts from a Unified Perspective",
        "2503.22996",
        "routing",
        "one budget over all token-expert pairs instead of one a token or an expert",
    ),
    # What is learned beside the task ------------------------------------------------------------------------------
    Method(
        "specialization-losses",
        "Synergistic Intra- and Cross-Layer Regularization Losses for MoE Expert Specialization",
        "2602.14159",
        "losses",
        "experts of one token made different, routing made decisive along depth",
    ),
    Method(
        "sink-moe-attention",
        "Attention Sink Forges Native MoE in Attention Layers: Sink-Aware Training to Address Head Collapse",
        "2602.01203",
        "layers",
        "attention heads as experts gated by the sink, balanced by a head loss",
    ),
    # What an expert is --------------------------------------------------------------------------------------------
    Method(
        "latent-moe",
        "LatentMoE: Toward Optimal Accuracy per FLOP and Parameter in Mixture of Experts",
        "2601.18089",
        "experts",
        "experts work in a shared latent space: fewer bytes an expert, more experts a token",
    ),
    Method(
        "multi-head-latent-moe",
        "Multi-Head LatentMoE and Head Parallel: Communication-Efficient and Deterministic MoE Parallelism",
        "2602.04870",
        "experts",
        "a token split into sub-tokens, a small MoE for each; heads sharded over devices",
    ),
    Method(
        "moram",
        "Little by Little: Continual Learning via Incremental Mixture of Rank-1 Associative Memory Experts",
        "2506.21035",
        "experts",
        "rank-1 atoms that are their own routers, appended task by task",
    ),
    # Training -----------------------------------------------------------------------------------------------------
    Method(
        "moe-parameterization",
        "Hyperparameter Transfer with Mixture-of-Experts Layers",
        "2601.20205",
        "training",
        "learning rates and initialisation that transfer over width, depth and number of experts",
    ),
    Method(
        "eco-optimizer",
        "ECO: Quantized Training without Full-Precision Master Weights",
        "2601.22101",
        "training",
        "rounding errors go into the momentum, so no float master copy is kept",
    ),
    Method(
        "orthogonal-growth",
        "Beyond Sunk Costs: Boosting LLM Pre-training Efficiency via Orthogonal Growth of Mixture-of-Experts",
        "2510.08008",
        "training",
        "a converged checkpoint grown in depth and in experts",
    ),
    Method(
        "sparkling",
        "SPARKLING: Balancing Signal Preservation and Symmetry Breaking for Width-Progressive Learning",
        "2602.02472",
        "training",
        "width grown in the middle of training without a spike or a symmetry lock",
    ),
    Method(
        "adaptive-upcycling",
        "Efficient Bilevel Optimization for CKA-Guided MoE Upcycling",
        None,
        "training",
        "a learned mask says which experts to copy and which to recycle",
    ),
    # Smaller and faster -------------------------------------------------------------------------------------------
    Method(
        "ragep",
        "RaGEP: Rank-aware Geometric Expert Pruning for Mixture-of-Experts Language Models",
        None,
        "compression",
        "budgets by effective rank, experts kept for being strong and different",
    ),
    Method(
        "tileq",
        "TileQ: Efficient Low-Rank Quantization of Mixture-of-Experts with 2D Tiling",
        "2605.09281",
        "compression",
        "low-bit experts with low-rank corrections shared over a grid",
    ),
    Method(
        "specmd",
        "SpecMD: A Comprehensive Study On Speculative Expert Prefetching",
        "2602.03921",
        "serving",
        "expert caches taken apart: eviction, prefetch, misses, hardware",
    ),
    Method(
        "zipmoe",
        "ZipMoE: Efficient On-Device MoE Serving via Lossless Compression and Cache-Affinity Scheduling",
        "2601.21198",
        "serving",
        "exponents compressed without loss, decompressed while the rest is read",
    ),
    Method(
        "team-dllm",
        "TEAM: Temporal-Spatial Consistency Guided Expert Activation for MoE Diffusion Language Model Acceleration",
        "2602.08404",
        "decoding",
        "fewer experts a pass and more tokens a pass in masked-diffusion decoding",
    ),
    Method(
        "poe-bridge",
        "Diffusion Language Model Parallel Decoding via Product-of-Experts Bridge",
        "2606.08048",
        "decoding",
        "drafts of a diffusion model corrected to an autoregressive one over a geometric bridge",
    ),
    Method(
        "expert-sample",
        "Certain Head, Uncertain Tail: Expert-Sample for Test-Time Scaling in Fine-Grained MoE",
        "2602.02443",
        "decoding",
        "diverse answers by sampling among the router's near-equal experts",
    ),
    # Safety -------------------------------------------------------------------------------------------------------
    Method(
        "route-safety-audit",
        "Sparse Models, Sparse Safety: Unsafe Routes in Mixture-of-Experts LLMs",
        "2602.08621",
        "safety",
        "whether a behaviour hangs on a few routers, and two ways to harden it",
    ),
    Method(
        "mesa",
        "MESA: Improving MoE Safety Alignment via Decentralized Expertise",
        "2606.00651",
        "safety",
        "a protected behaviour spread over experts by optimal transport",
    ),
    # Learning on --------------------------------------------------------------------------------------------------
    Method(
        "care",
        "Scaling Continual Learning to 300+ Tasks with Bi-Level Routing Mixture-of-Experts",
        "2602.03473",
        "continual",
        "class perceptors choose routers, routers choose experts",
    ),
    Method(
        "same",
        "SAME: Stabilized Mixture-of-Experts for Multimodal Continual Instruction Tuning",
        "2602.01990",
        "continual",
        "router and expert drift held back by spectra of past inputs",
    ),
    Method(
        "time-editing",
        "TIME: Tensor-Factorized Mixture-of-Experts with Intrinsic Routing for Lifelong Multimodal Knowledge Editing",
        None,
        "continual",
        "each edit a CP tensor whose input factors say when it is active",
    ),
    # Data of other kinds ------------------------------------------------------------------------------------------
    Method(
        "ofa-tad",
        "Towards One-for-All Anomaly Detection for Tabular Data",
        "2603.14407",
        "tabular",
        "one detector for every table: distances to neighbours in several views, gated",
        (
            "tabular:OneForAllDetector",
            "tabular:MultiViewDistanceEncoder",
            "tabular:PseudoAnomalySampler",
            "tabular:GatedViewMoE",
        ),
        "moesaic.experiments.ofa_tad",
    ),
    Method(
        "timi",
        "TiMi: Empower Time Series Transformers with Multimodal Mixture of Experts",
        "2602.21693",
        "timeseries",
        "text chooses the experts of a forecaster and is never fused with its tokens",
    ),
    Method(
        "timemode",
        "Towards a Unified Generative Model for Scarce Time Series with Domain Experts",
        "2606.15172",
        "timeseries",
        "a diffusion transformer whose router sees a domain prompt",
    ),
    Method(
        "c2gmoe",
        "Discriminative Mixture-of-Experts on Graphs with Reliable Expert Fusion",
        None,
        "graphs",
        "gates made discriminative by a contrastive loss, experts fused by their reliability",
    ),
    Method(
        "dygmoce",
        "DyGMoCE: a dynamic graph Transformer with a mixture of curvature-aware experts",
        None,
        "graphs",
        "attention and feed-forward experts of their own curvature for dynamic graphs",
    ),
    Method(
        "graphon-mixture",
        "From Moments to Models: Graphon-Mixture Learning for Mixup and Contrastive Learning",
        "2510.03690",
        "graphs",
        "data sets as mixtures of graphons, found by motif densities",
    ),
    Method(
        "eeg-moce",
        "EEG-Based Multimodal Learning via Hyperbolic Mixture-of-Curvature Experts",
        "2604.12579",
        "neuro",
        "a Lorentz expert of its own curvature for each modality",
    ),
    Method(
        "neurips-fmri",
        "NeurIPS: Neuro-anatomical Inductive Priors for Sphere-based Brain Decoding",
        "2605.24993",
        "neuro",
        "experts routed by cortical structure alone",
    ),
    Method(
        "molf",
        "MoLF: Mixture-of-Latent-Flow for Pan-Cancer Spatial Gene Expression Prediction from Histology",
        "2602.02282",
        "omics",
        "flow matching with a velocity field of two experts out of six",
    ),
    # Acting -------------------------------------------------------------------------------------------------------
    Method(
        "sphere",
        "SPHERE: Mitigating the Loss of Spectral Plasticity in Mixture-of-Experts for Deep Reinforcement Learning",
        "2605.04712",
        "rl",
        "a Parseval penalty on routed features keeps policies able to learn",
    ),
    Method(
        "pa-moe",
        "Phase-Aware Mixture of Experts for Agentic Reinforcement Learning",
        "2602.17038",
        "rl",
        "one decision an environment step, held over a phase",
    ),
    Method(
        "come",
        "CoME: Empowering Channel-of-Mobile-Experts with Informative Hybrid-Capabilities Reasoning",
        "2602.24142",
        "rl",
        "four experts with channels of their own, one for each stage of an agent's step",
    ),
    Method(
        "eco-moe",
        "ECo-MoE: Embodiment-Conditioned Mixture of Experts Increases the Evolvability of Robots",
        "2605.24225",
        "rl",
        "a gate that sees only the robot's genotype, evolved with its body",
    ),
)


def systems_map(links: str) -> str:
    """The systems by what they change, as Markdown: what is there links to its page, the rest says that it is planned.

    Args:
        links: folder of the method pages, as seen from the page that shows the map.
    """
    order = list(dict.fromkeys(method.changes for method in METHODS))
    lines = ["| changes | systems |", "|---|---|"]
    for folder in order:
        cells = []
        for method in METHODS:
            if method.changes != folder:
                continue
            if method.status == "ready":
                cells.append(f"[**{method.slug}**]({links}{method.slug}.md): {method.summary}")
            else:
                cells.append(f"{method.slug}: {method.summary} *(planned)*")
        lines.append(f"| `{folder}` | {'<br>'.join(cells)} |")
    return "\n".join(lines) + "\n"
