"""The options of every optimizer have one default each."""

import dataclasses
import inspect

import pytest

import torch_api
from torch_api.options import Options

pytestmark = pytest.mark.quick


def test_signature_agrees_with_options():
    arguments = inspect.signature(torch_api.OptaxOptimizer).parameters
    assert {field.name: field.default for field in dataclasses.fields(Options)} == {
        field.name: arguments[field.name].default for field in dataclasses.fields(Options)
    }
