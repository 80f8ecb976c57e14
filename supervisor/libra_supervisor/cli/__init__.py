"""`libra-supervisor`: the command line. Verbs import what they need when they are called."""

from libra_supervisor.cli.main import program as main

__all__ = ["main"]
