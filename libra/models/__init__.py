"""Architecture and hardware arithmetic: parameters, FLOPs, KV bytes and capacity. Pure."""
