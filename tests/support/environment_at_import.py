"""A module that reads the environment when it is imported, as many libraries do."""

from __future__ import annotations

import os

SEEN = dict(os.environ)
