"""Logs, spans and metrics."""
