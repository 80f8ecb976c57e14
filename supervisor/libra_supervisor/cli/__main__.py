"""`python -m libra_supervisor.cli`."""

from libra_supervisor.cli.main import program

program()
