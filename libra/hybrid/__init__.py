"""The lanes on which a hybrid replica's gradients come and go. No torch, no pickle."""
