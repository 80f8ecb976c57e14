"""What holds for every test."""

from hypothesis import settings

# The same examples on every machine, however slow it is: what CI says can be repeated. To look for
# new ones: pytest --hypothesis-profile=explore.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")
