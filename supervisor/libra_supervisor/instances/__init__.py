"""vLLM servers: their specs, HTTP client, metrics poller and health."""
