"""Mutated bytes against the parsers, for as long as one wants: `make native-fuzz`."""
