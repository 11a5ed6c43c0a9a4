"""What many runs say together, as plain data: which shapes differ, by how much, and how sure that is."""
