"""The `validate` and `schema` verbs: what a configuration amounts to, for people and programs."""
