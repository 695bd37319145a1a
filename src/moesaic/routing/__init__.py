"""Who goes where: contract 1 (Context, Routing, Router) and the routers, one file each."""

from moesaic.routing.checks import checks
from moesaic.routing.context import Context
from moesaic.routing.cosine import CosineRouter
from moesaic.routing.dispatch import Dispatch
from moesaic.routing.expert_choice import ExpertChoiceRouter
from moesaic.routing.parameters import ParameterSpec, parameter_specs
from moesaic.routing.relu import L1Controller, ReLURouter
from moesaic.routing.router import Router
from moesaic.routing.routing import Routing
from moesaic.routing.selection import TopKSelection
from moesaic.routing.state import StepCounter, StepState, end_step
from moesaic.routing.top_k import TopKRouter

__all__ = [
    "Context",
    "CosineRouter",
    "Dispatch",
    "ExpertChoiceRouter",
    "L1Controller",
    "ParameterSpec",
    "ReLURouter",
    "Router",
    "Routing",
    "StepCounter",
    "StepState",
    "TopKRouter",
    "TopKSelection",
    "checks",
    "end_step",
    "parameter_specs",
]
