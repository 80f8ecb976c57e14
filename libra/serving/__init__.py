"""One vLLM server with the guarded reload endpoint and the version ledger."""
