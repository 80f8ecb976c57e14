"""What a trainer rank and a vLLM worker share of a weight transfer: group and buckets. Torch."""
