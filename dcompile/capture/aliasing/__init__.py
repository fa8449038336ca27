"""Views of inputs, and tensors that share memory: what AOTAutograd loses or gets wrong about them."""
