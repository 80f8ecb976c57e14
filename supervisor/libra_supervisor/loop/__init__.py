"""Events in, commands out, effects at the rim; the only writer of control state."""
