"""One small input for each pass of each list, which the pass changes: `tests/test_pass_texts.py` runs them."""
