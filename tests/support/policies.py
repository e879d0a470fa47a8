"""Other thresholds for one test."""

import dataclasses

from bridge._compiler import policy


def change_policy(monkeypatch, name, **fields):
    """Replace fields of an instance in `bridge._compiler.policy`, for example of `BUCKETING`."""
    monkeypatch.setattr(policy, name, dataclasses.replace(getattr(policy, name), **fields))
