"""One torchrun rank: Megatron-Core model, loss, optimizer step, checkpoint."""
