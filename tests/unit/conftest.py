"""How thorough the properties are: quick by default, HYPOTHESIS_PROFILE=thorough for a long look."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("quick", max_examples=50, deadline=None)
settings.register_profile("thorough", max_examples=5_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
