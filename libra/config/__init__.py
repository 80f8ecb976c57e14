"""The configuration: frozen sections grouped by owner, loaded once, strict."""
