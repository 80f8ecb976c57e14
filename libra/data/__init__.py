"""Prompts: readers by suffix, tokenisation, and the cursor that says which prompt comes next.

Light on purpose: `tokenizers` and `jinja2`, never `transformers` or torch.
"""
