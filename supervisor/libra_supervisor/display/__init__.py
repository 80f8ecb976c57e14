"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere."""
