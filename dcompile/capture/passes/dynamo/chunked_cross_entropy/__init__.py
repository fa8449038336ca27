"""Cross-entropy behind a linear layer, computed in chunks without the logits."""
