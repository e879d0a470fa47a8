"""What the constructor of a class shows, apart from the arguments that all optimizers share."""

import inspect

import torch_api

SWITCHES = ("foreach", "fused", "capturable", "differentiable")


def own_parameters(cls, without=()):
    """Return the parameters of the constructor by name, without the shared options and selectors and those named in `without`."""
    general = inspect.signature(torch_api.OptaxOptimizer).parameters.values()
    shared = {parameter.name for parameter in general if parameter.kind is parameter.KEYWORD_ONLY}
    return {name: p for name, p in inspect.signature(cls).parameters.items() if name not in {*shared, *without}}
