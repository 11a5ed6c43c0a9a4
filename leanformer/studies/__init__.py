"""What many runs say together, as plain data: which shapes differ, by how much, and how sure that is. And what can be
known without any: weights that are written down."""
