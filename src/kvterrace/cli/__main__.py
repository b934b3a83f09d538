"""`python -m kvterrace.cli`."""

from __future__ import annotations

import sys

from kvterrace.cli.app import main

sys.exit(main())
