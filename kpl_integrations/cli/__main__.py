"""`python -m kpl_integrations.cli`: the same as the `kpl` command."""

import sys

from kpl_integrations.cli import main

sys.exit(main())
