"""Cross-entropy of a linear layer's result, computed in chunks of classes without storing the logits."""
