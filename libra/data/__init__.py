"""Dataset readers and the cursor that a resumed run continues from."""
