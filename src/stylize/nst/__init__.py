"""The method: tensors in, tensors out. Nothing in here knows a file, a terminal or a progress bar."""
