"""What a run writes down about itself: a line per step, per reload, per trajectory."""
