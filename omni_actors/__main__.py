"""The `omni-actors` command as `python -m omni_actors`."""

from __future__ import annotations

import sys

from omni_actors.cli.main import main

sys.exit(main())
