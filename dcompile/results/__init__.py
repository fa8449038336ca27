"""Steps on the results of a program, shared by capture and the run time: views, separate tensors, gradients."""
