"""How numbers become bytes: bits and sets of indices, values, a range coder, layouts."""
