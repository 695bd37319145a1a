"""moesaic: Mixture-of-Experts models as parts that combine."""

from moesaic._version import __version__

__all__ = ["__version__"]
