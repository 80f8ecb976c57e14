"""Cross-rank load: one small file per scheduler in a shared directory, written and read here."""
