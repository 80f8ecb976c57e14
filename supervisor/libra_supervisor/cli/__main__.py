"""`python -m libra_supervisor.cli`."""

import sys

from libra_supervisor.cli.main import main

sys.exit(main())
