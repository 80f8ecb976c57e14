"""`libra-supervisor` with every part of it real; it takes plans from files, see `wanted_plans`."""

import sys

import wanted_plans
from libra_supervisor.cli import main

wanted_plans.listen()
sys.exit(main())
