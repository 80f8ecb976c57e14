"""Several nodes: who takes part, the link between them, and when one may act."""
