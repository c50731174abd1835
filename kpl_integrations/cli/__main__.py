"""`python -m kpl_integrations.cli`: the `kpl` command where no script is installed."""

import sys

from kpl_integrations.cli import main

sys.exit(main())
