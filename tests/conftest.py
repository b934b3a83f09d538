"""What all tests share."""

from hypothesis import settings

# A busy machine is no failure: examples are bounded in number, whole tests in time (pytest-timeout).
settings.register_profile("kvterrace", deadline=None)
settings.load_profile("kvterrace")
