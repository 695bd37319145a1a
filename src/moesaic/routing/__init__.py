"""Who goes where: contract 1 (Context, Routing, Router) and the routers, one file each."""

from moesaic.routing.checks import checks
from moesaic.routing.context import Context
from moesaic.routing.cosine import CosineRouter
from moesaic.routing.dispatch import Dispatch
from moesaic.routing.dynamic_top_p import (
    DynamicTopPRouter,
    TopPRouter,
    normalize_router_logits,
    share_controllers,
    top_p_select,
)
from moesaic.routing.expert_choice import ExpertChoiceRouter
from moesaic.routing.multi_head import MultiHeadRouter
from moesaic.routing.pair_choice import PairChoiceRouter
from moesaic.routing.pair_choice_program import routing_program, routing_program_by_solver
from moesaic.routing.pair_choice_scores import unified_score
from moesaic.routing.parameters import ParameterSpec, parameter_specs
from moesaic.routing.principal_subspace import PrincipalSubspaceRouter, test_time_adaptation
from moesaic.routing.relu import L1Controller, ReLURouter
from moesaic.routing.router import Router
from moesaic.routing.routing import Routing, gather_slots
from moesaic.routing.selection import TopKSelection
from moesaic.routing.state import StepCounter, StepState, end_step
from moesaic.routing.streaming import streaming_top_k
from moesaic.routing.subspace import GHASubspace
from moesaic.routing.threshold_controller import PIThresholdController
from moesaic.routing.top_k import TopKRouter

__all__ = [
    "Context",
    "CosineRouter",
    "Dispatch",
    "DynamicTopPRouter",
    "ExpertChoiceRouter",
    "GHASubspace",
    "L1Controller",
    "MultiHeadRouter",
    "PIThresholdController",
    "PairChoiceRouter",
    "ParameterSpec",
    "PrincipalSubspaceRouter",
    "ReLURouter",
    "Router",
    "Routing",
    "StepCounter",
    "StepState",
    "TopKRouter",
    "TopKSelection",
    "TopPRouter",
    "checks",
    "end_step",
    "gather_slots",
    "normalize_router_logits",
    "parameter_specs",
    "routing_program",
    "routing_program_by_solver",
    "share_controllers",
    "streaming_top_k",
    "test_time_adaptation",
    "top_p_select",
    "unified_score",
]
