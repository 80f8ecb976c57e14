"""The composition root: builds every part, opens the one root task group, maps errors to exits."""
