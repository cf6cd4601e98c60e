"""Tandem: speculative decoding as a service. What every part shares lives here; the services are beside it."""

__version__ = "0.1.0"
