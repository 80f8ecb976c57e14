"""Messages between Libra's processes, as closed unions of msgspec structs. Pure."""
