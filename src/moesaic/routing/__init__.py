"""Who goes where: contract 1 (Context, Routing, Router) and the routers, one file each."""

from moesaic.routing.checks import checks
from moesaic.routing.context import Context
from moesaic.routing.dispatch import Dispatch
from moesaic.routing.parameters import ParameterSpec, parameter_specs
from moesaic.routing.router import Router
from moesaic.routing.routing import Routing
from moesaic.routing.state import StepState, end_step

__all__ = [
    "Context",
    "Dispatch",
    "ParameterSpec",
    "Router",
    "Routing",
    "StepState",
    "checks",
    "end_step",
    "parameter_specs",
]
