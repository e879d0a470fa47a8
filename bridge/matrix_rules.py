"""A public path of the update rules in `bridge.rules.matrix`."""

from .rules.matrix import NS_COEFFICIENTS, adafactor, muon, muon_with, newton_schulz

__all__ = ["NS_COEFFICIENTS", "adafactor", "muon", "muon_with", "newton_schulz"]
