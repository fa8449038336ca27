"""Aliasing: views of inputs and tensors that share memory, where AOTAutograd loses or changes eager's behaviour."""
