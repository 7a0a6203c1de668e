"""Settings shared by all tests."""

from hypothesis import settings

# A busy machine must not fail a test: nothing here asserts a duration.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
