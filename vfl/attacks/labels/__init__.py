"""Label-inference attacks by a feature party, from cuts, gradients or its trained bottom."""
